"""Reward 1 for exactly the right tokens, EOS included; otherwise 0."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.answer_ids import answer_token_ids


class ExactMatch:
    """Compares token ids, so neither a missing EOS nor anything after the answer is forgiven."""

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """1.0 or 0.0. Raises: ValueError for an empty response or a prompt without recorded answer."""
        if not response_token_ids:
            raise ValueError(f"prompt {prompt.ordinal}: an empty response cannot be scored")
        return float(list(response_token_ids) == answer_token_ids(prompt))
