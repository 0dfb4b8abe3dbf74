"""The character tokenizer of the small tasks: one token per character, vocabulary 64.

Pure Python; `warm_start.tokenizer_files` writes the same mapping as a Hugging Face tokenizer.
Invariant: `decode(encode(text)) == text` for every text over `ALPHABET`; other characters raise.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from megatron_ppo.protocol.trajectory import token_array

PAD_TOKEN, BOS_TOKEN, EOS_TOKEN = "<pad>", "<bos>", "<eos>"
SPECIAL_TOKENS = (PAD_TOKEN, BOS_TOKEN, EOS_TOKEN)
PAD_ID, BOS_ID, EOS_ID = range(3)
ALPHABET = "0123456789+-*/=()<>, :?.abcdefghijklmnopqrstuvwxyz"
# Embedding rows of the models; ids from 53 on are never produced by the tokenizer.
VOCAB_SIZE = 64

_ID_OF = {character: index for index, character in enumerate(ALPHABET, start=len(SPECIAL_TOKENS))}
_CHARACTER_OF = {index: character for character, index in _ID_OF.items()}


def vocabulary() -> dict[str, int]:
    """Token -> id, special tokens included."""
    return {token: index for index, token in enumerate((*SPECIAL_TOKENS, *ALPHABET))}


def encode(text: str) -> list[int]:
    """Token ids of `text`, without BOS and EOS. Raises: ValueError for a character outside `ALPHABET`."""
    unknown = sorted(set(text) - _ID_OF.keys())
    if unknown:
        raise ValueError(f"characters {unknown} of {text!r} are not in the alphabet {ALPHABET!r}")
    return [_ID_OF[character] for character in text]


def encode_prompt(text: str) -> array[int]:
    """BOS + `text`: what the engine is given."""
    return token_array([BOS_ID, *encode(text)])


def encode_answer(text: str) -> list[int]:
    """`text` + EOS: what the policy is to produce."""
    return [*encode(text), EOS_ID]


def decode(token_ids: Iterable[int]) -> str:
    """Text of `token_ids`. Special tokens appear by name, so that nothing vanishes from a log.

    Raises: ValueError for an id that the tokenizer never produces.
    """
    parts = []
    for token_id in token_ids:
        if 0 <= token_id < len(SPECIAL_TOKENS):
            parts.append(SPECIAL_TOKENS[token_id])
        elif token_id in _CHARACTER_OF:
            parts.append(_CHARACTER_OF[token_id])
        else:
            raise ValueError(f"token id {token_id} is unknown; ids run from 0 to {len(vocabulary()) - 1}")
    return "".join(parts)
