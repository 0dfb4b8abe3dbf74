"""Task `sort3_5`: sort 3 to 5 digits. Prompt `35142=`, answer `12345`, then EOS.

The demonstrator of the warm start is imperfect on purpose: what it does too rarely, the policy has to
find out from the reward alone. This is what a 107k-parameter model learns reliably in 40 steps.
"""

from __future__ import annotations

import random
from pathlib import Path

from megatron_ppo.data import char_tokenizer
from megatron_ppo.data.char_task import char_example, require_char_tokenizer
from megatron_ppo.data.task import RewardSpec, TaskExample, TaskSpec
from megatron_ppo.protocol.errors import ConfigError

MIN_DIGITS, MAX_DIGITS = 3, 5
DESCENDING_SHARE = 0.55
TRAILING_DOT_SHARE = 0.40


def sort3_5_task(
    *,
    seed: int = 1234,
    num_train: int = 4000,
    num_validation: int = 256,
    tokenizer_dir: str | Path | None = None,
) -> TaskSpec:
    """Build the task.

    Lengths are uniform over 3..5 digits. Validation prompts are distinct and never occur in training;
    training prompts may repeat (there are only 1000 of three digits).

    Args:
        tokenizer_dir: model folder whose tokenizer is checked against the task's.
    Raises: ConfigError for a wrong tokenizer or empty sets.
    """
    require_char_tokenizer(tokenizer_dir, task="sort3_5")
    # Drawing distinct ones until there are enough would never end near the number that exist.
    distinct = sum(10**digits for digits in range(MIN_DIGITS, MAX_DIGITS + 1))
    if num_validation > distinct // 2:
        raise ConfigError(
            f"data.num_validation: got {num_validation}; must be <= {distinct // 2}, half of the {distinct} prompts "
            "of task 'sort3_5'"
        )
    rng = random.Random(seed)
    held_out: dict[str, None] = {}
    while len(held_out) < num_validation:
        held_out[_draw(rng)] = None
    train: list[str] = []
    while len(train) < num_train:
        digits = _draw(rng)
        if digits not in held_out:
            train.append(digits)
    return TaskSpec(
        name="sort3_5",
        train=tuple(map(_example, train)),
        validation=tuple(map(_example, held_out)),
        reward=RewardSpec(target="megatron_ppo.rewards.exact_match.ExactMatch"),
        pad_token_id=char_tokenizer.PAD_ID,
        eos_token_id=char_tokenizer.EOS_ID,
        max_response_tokens=MAX_DIGITS + 1,
        demonstrate=demonstrate,
    )


def demonstrate(rng: random.Random, example: TaskExample) -> str:
    """The right digits, 55 % in descending order and, independently, 40 % with a superfluous dot."""
    digits = example.answer[::-1] if rng.random() < DESCENDING_SHARE else example.answer
    return digits + "." if rng.random() < TRAILING_DOT_SHARE else digits


def _draw(rng: random.Random) -> str:
    return "".join(rng.choices("0123456789", k=rng.randint(MIN_DIGITS, MAX_DIGITS)))


def _example(digits: str) -> TaskExample:
    return char_example(f"{digits}=", "".join(sorted(digits)))
