"""Task `count_long`: count up to 99 in items of five tokens. Responses of 66 to 126 tokens.

Prompt `qk75=`, answer `qk75,qk76,` … `qk99,`, then EOS. The reward is graded: the share of items that are
right. As in `sort3_5` the demonstrator is imperfect on purpose: it often counts down instead, and often
separates items with a blank; which is wanted, the policy has to find out from the reward.
"""

from __future__ import annotations

import random
from pathlib import Path

from megatron_ppo.data import char_tokenizer
from megatron_ppo.data.char_task import char_example, require_char_tokenizer
from megatron_ppo.data.task import RewardSpec, TaskExample, TaskSpec
from megatron_ppo.protocol.errors import ConfigError

LAST_UP = 99
# Counting down from any start takes as many items as counting up does from some start.
LAST_DOWN = 63
FIRST_START, LAST_START = 75, 87
ITEM_TOKENS = 5
DOWN_SHARE = 0.50
BLANK_SHARE = 0.50


def count_long_task(
    *,
    seed: int = 1234,
    num_train: int = 4000,
    num_validation: int = 64,
    tokenizer_dir: str | Path | None = None,
) -> TaskSpec:
    """Build the task. There are 26 · 26 · 13 = 8788 prompts; training and validation share none.

    Args:
        tokenizer_dir: model folder whose tokenizer is checked against the task's.
    Raises: ConfigError for a wrong tokenizer, empty sets, or more prompts than there are.
    """
    require_char_tokenizer(tokenizer_dir, task="count_long")
    letters = "abcdefghijklmnopqrstuvwxyz"
    prompts = [
        (first + second, start)
        for first in letters
        for second in letters
        for start in range(FIRST_START, LAST_START + 1)
    ]
    if num_train + num_validation > len(prompts):
        raise ConfigError(
            f"data.num_train + data.num_validation: got {num_train} + {num_validation}; must be <= {len(prompts)}, "
            "the prompts of task 'count_long'"
        )
    chosen = random.Random(seed).sample(prompts, num_train + num_validation)
    examples = tuple(char_example(f"{tag}{start}=", _items(tag, start, LAST_UP)) for tag, start in chosen)
    return TaskSpec(
        name="count_long",
        train=examples[num_validation:],
        validation=examples[:num_validation],
        reward=RewardSpec(
            target="megatron_ppo.rewards.chunk_match.ChunkMatch", kwargs={"chunk_tokens": ITEM_TOKENS}
        ),
        pad_token_id=char_tokenizer.PAD_ID,
        eos_token_id=char_tokenizer.EOS_ID,
        max_response_tokens=ITEM_TOKENS * (LAST_UP - FIRST_START + 1) + 1,
        demonstrate=demonstrate,
    )


def demonstrate(rng: random.Random, example: TaskExample) -> str:
    """Half of the answers count down to 63; independently, half of the separators are a blank."""
    tag, start = example.text[:2], int(example.text[2:4])
    answer = _items(tag, start, LAST_DOWN) if rng.random() < DOWN_SHARE else example.answer
    return "".join(" " if c == "," and rng.random() < BLANK_SHARE else c for c in answer)


def _items(tag: str, start: int, last: int) -> str:
    step = 1 if last >= start else -1
    return "".join(f"{tag}{number}," for number in range(start, last + step, step))
