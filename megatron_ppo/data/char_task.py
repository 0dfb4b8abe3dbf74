"""Shared construction of the tasks over the character tokenizer.

Driven by the task modules. Invariant: the tokenizer of the model folder, when one is given, is ours.
"""

from __future__ import annotations

import json
from pathlib import Path

from megatron_ppo.data import char_tokenizer
from megatron_ppo.data.task import ANSWER_TOKEN_IDS, TaskExample
from megatron_ppo.protocol.errors import ConfigError


def char_example(text: str, answer: str) -> TaskExample:
    """An example whose verifier can compare token ids."""
    answer_ids = char_tokenizer.encode_answer(answer)
    return TaskExample(
        token_ids=char_tokenizer.encode_prompt(text),
        text=text,
        answer=answer,
        metadata={ANSWER_TOKEN_IDS: " ".join(map(str, answer_ids))},
    )


def require_char_tokenizer(tokenizer_dir: str | Path | None, *, task: str) -> None:
    """Check that a model folder speaks the task's tokens; nothing to check without a folder.

    Raises: ConfigError if the folder has no tokenizer.json or another vocabulary.
    """
    if tokenizer_dir is None:
        return
    path = Path(tokenizer_dir) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"task {task!r}: {path} does not exist; the model folder needs a tokenizer.json")
    vocab = json.loads(path.read_text(encoding="utf-8"))["model"].get("vocab")
    if vocab != char_tokenizer.vocabulary():
        seen = f"{len(vocab)} tokens" if isinstance(vocab, dict) else "no word list"
        raise ConfigError(
            f"task {task!r} needs the character tokenizer ({len(char_tokenizer.vocabulary())} tokens); "
            f"{path} has {seen}. Use a model prepared by a warm-start recipe of this task."
        )
