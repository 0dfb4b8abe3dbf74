"""Reward 1 for the right final number of a worked solution; otherwise 0.

The final answer is the content of the last `\\boxed{}`; without one, the rest of the line after the last `####`;
without either, the last number of a finished response. One place is looked at and one number has to stand there:
a response that offers several answers is judged by the last one, and is wrong where it offers them side by side.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from tokenizers import Tokenizer

from megatron_ppo.data.plain_number import parse_number, plain_characters
from megatron_ppo.protocol.trajectory import Prompt

_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_MARK = "####"
# From a digit to the next space or bracket; what is inside must be a number by itself.
_LAST_NUMBER = re.compile(r"(?P<before>^|[^\w.,/^])(?P<number>[0-9.][^\s()\[\]{}*=:;!?\"'`<>|\\$€£]*)")
_SIGN = re.compile(r"(?:^|[\s(:=*$\[{|])(?P<sign>[-+])[$€£]?$")


class Gsm8kAnswer:
    """Reads the response as text and compares numbers exactly: `18`, `18.0` and `$18` are one answer."""

    def __init__(self, *, tokenizer_dir: str, eos_token_id: int, needs_mark: bool = False) -> None:
        """Args:
        tokenizer_dir: the policy's model folder.
        eos_token_id: ends a response; one that does not end with it was cut off.
        needs_mark: answers without `\\boxed{}` and `####` are wrong, whatever number comes last.
        """
        self._tokenizer = Tokenizer.from_file(str(Path(tokenizer_dir) / "tokenizer.json"))
        self._eos_token_id = eos_token_id
        self._needs_mark = needs_mark

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """1.0 or 0.0.

        Raises: ValueError for an empty response, or for a prompt whose answer is no number.
        """
        if not response_token_ids:
            raise ValueError(f"prompt {prompt.ordinal}: an empty response cannot be scored")
        right = parse_number(prompt.answer)
        if right is None:
            raise ValueError(
                f"prompt {prompt.ordinal}: the right answer must be a number, got {prompt.answer!r}"
            )
        ids = list(response_token_ids)
        # An embedding has more rows than the tokenizer has tokens; decoding would drop such a token silently.
        if any(not 0 <= i < self._tokenizer.get_vocab_size() for i in ids):
            return 0.0
        ended = ids[-1] == self._eos_token_id
        text = self._tokenizer.decode(ids[:-1] if ended else ids, skip_special_tokens=False)
        return float(final_number(text, ended=ended, needs_mark=self._needs_mark) == right)


def final_number(text: str, *, ended: bool, needs_mark: bool = False) -> Fraction | None:
    """The number that a solution ends with, None where it has none or several.

    Args:
        ended: False for a response that was cut off: a number at its very end might have gone on.
    """
    box = _last_box(text)
    if box is not None:
        return parse_number(box)
    if _MARK in text:
        line, newline, _ = text.rpartition(_MARK)[2].partition("\n")
        return parse_number(line) if ended or newline else None
    return _last_plain_number(text) if ended and not needs_mark else None


def _last_box(text: str) -> str | None:
    """Content of the last box; empty, hence no number, for one that never closes."""
    opened = list(_BOX.finditer(text))
    if not opened:
        return None
    start, depth = opened[-1].end(), 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return ""


def _last_plain_number(text: str) -> Fraction | None:
    found = list(_LAST_NUMBER.finditer(plain_characters(text)))
    if not found:
        return None
    last = found[-1]
    number = parse_number(last["number"].rstrip(".,"))
    sign = _SIGN.search(last.string[: last.start("number")])
    return -number if number is not None and sign is not None and sign["sign"] == "-" else number
