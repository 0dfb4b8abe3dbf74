"""Reward 1 for a response that is the right integer and nothing else on its line; otherwise 0.

A strict pattern and no evaluation: a verifier that evaluates expressions rewards a policy that echoes the
question.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from megatron_ppo.protocol.trajectory import Prompt

_NUMBER_LINE = re.compile(r" ?(-?[0-9]+) ?")


class FinalNumber:
    """Reads the response as text: ` 42` and a newline or EOS."""

    def __init__(self, *, tokenizer_dir: str, eos_token_id: int) -> None:
        """Args:
        tokenizer_dir: the policy's model folder.   eos_token_id: also ends the answer.
        """
        self._tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
        self._eos_token_id = eos_token_id

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """1.0 or 0.0. An unfinished line is wrong: its next token might have been a digit.

        Raises: ValueError for an empty response, an unknown token, or an answer that is no integer.
        """
        if not response_token_ids:
            raise ValueError(f"prompt {prompt.ordinal}: an empty response cannot be scored")
        unknown = [i for i in response_token_ids if not 0 <= i < self._tokenizer.get_vocab_size()]
        if unknown:
            raise ValueError(f"prompt {prompt.ordinal}: the response has unknown token ids {unknown}")
        answer = int(prompt.answer)
        ids = list(response_token_ids)
        ended = ids[-1] == self._eos_token_id
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        line, newline, _ = text.partition("\n")
        match = _NUMBER_LINE.fullmatch(line)
        return float(match is not None and (ended or bool(newline)) and match[1] == str(answer))
