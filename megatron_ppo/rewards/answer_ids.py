"""The right response as token ids, as the tasks record it. Read by the verifiers that compare ids."""

from __future__ import annotations

from megatron_ppo.data.task import ANSWER_TOKEN_IDS
from megatron_ppo.protocol.trajectory import Prompt


def answer_token_ids(prompt: Prompt) -> list[int]:
    """Token ids of the right response, EOS included.

    Raises: ValueError if the prompt does not record them.
    """
    text = prompt.metadata.get(ANSWER_TOKEN_IDS)
    if not text:
        raise ValueError(
            f"prompt {prompt.ordinal} ({prompt.text!r}) cannot be scored: its metadata has "
            f"{sorted(prompt.metadata)}, it needs {ANSWER_TOKEN_IDS!r}"
        )
    return [int(part) for part in text.split()]
