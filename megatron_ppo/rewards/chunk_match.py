"""Graded reward for answers made of items of a fixed width: the share of items that are right."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.answer_ids import answer_token_ids


class ChunkMatch:
    """Compares item by item, by position; EOS is the last item.

    An inserted or missing token therefore costs every item after it, items beyond the answer count as
    wrong, and 1.0 is reached by the exact answer only.
    """

    def __init__(self, *, chunk_tokens: int) -> None:
        """Args: chunk_tokens: width of an item, in tokens. Raises: ValueError if it is below 1."""
        if chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be >= 1, got {chunk_tokens}")
        self._width = chunk_tokens

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """Share of right items in [0, 1]. Raises: ValueError as ExactMatch does."""
        if not response_token_ids:
            raise ValueError(f"prompt {prompt.ordinal}: an empty response cannot be scored")
        expected = self._chunks(answer_token_ids(prompt))
        seen = self._chunks(list(response_token_ids))
        right = sum(a == b for a, b in zip(expected, seen, strict=False))
        return right / max(len(expected), len(seen))

    def _chunks(self, ids: list[int]) -> list[list[int]]:
        return [ids[start : start + self._width] for start in range(0, len(ids), self._width)]
