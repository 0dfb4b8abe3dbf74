"""Task `chain_sum`: sums and differences of reasoning-gym, as a compact prompt for a pretrained base model.

The prompt is three solved examples and `{expression} =`; the response ends at the first newline. Needs the
package `reasoning-gym` (its dependencies are not needed) and the model folder's tokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer

from megatron_ppo.data.bare_package import import_module_only
from megatron_ppo.data.task import RewardSpec, TaskExample, TaskSpec
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.trajectory import token_array

# A model of 135M parameters answers .44 of such prompts (greedy), against .13 in the chat format.
SOLVED_EXAMPLES = "3 + 4 = 7\n25 - 5 = 20\n12 + 6 = 18\n"
INSTALL_HINT = "install it with: pip install --no-deps reasoning-gym==0.1.25"


def chain_sum_task(
    *,
    seed: int = 1234,
    num_train: int = 2000,
    num_validation: int = 64,
    tokenizer_dir: str | Path,
    min_digits: int = 1,
    max_digits: int = 2,
) -> TaskSpec:
    """Build the task: two terms of `min_digits` to `max_digits` digits.

    Validation expressions are distinct and never occur in training.

    Args:
        tokenizer_dir: model folder with tokenizer.json and tokenizer_config.json.
    Raises: ConfigError if the tokenizer or the package is missing, or too few expressions exist.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    pairs = _expressions(seed, min_digits=min_digits, max_digits=max_digits)
    held_out: dict[str, str] = {}
    train: list[tuple[str, str]] = []
    # Twenty draws per prompt: enough for any set that is not nearly exhausted.
    for _ in range(20 * (num_train + num_validation)):
        expression, answer = next(pairs)
        if len(held_out) < num_validation:
            held_out[expression] = answer
        elif expression not in held_out:
            train.append((expression, answer))
            if len(train) == num_train:
                break
    if len(train) < num_train:
        raise ConfigError(
            f"chain_sum with {min_digits} to {max_digits} digits has too few expressions for "
            f"data.num_train {num_train} and data.num_validation {num_validation}"
        )
    eos_token_id, pad_token_id = special_token_ids(tokenizer, tokenizer_dir)
    return TaskSpec(
        name="chain_sum",
        train=tuple(_example(tokenizer, *pair) for pair in train),
        validation=tuple(_example(tokenizer, *pair) for pair in held_out.items()),
        reward=RewardSpec(
            target="megatron_ppo.rewards.final_number.FinalNumber",
            kwargs={"tokenizer_dir": str(tokenizer_dir), "eos_token_id": eos_token_id},
        ),
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        stop_token_ids=newline_token_ids(tokenizer),
        # Space, sign, one token per digit (a carry adds one), newline.
        max_response_tokens=max_digits + 4,
    )


def load_tokenizer(folder: str | Path) -> Tokenizer:
    """The tokenizer of a model folder. Raises: ConfigError if the folder has no tokenizer.json."""
    path = Path(folder) / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; the task needs the tokenizer of the policy's model folder")
    return Tokenizer.from_file(str(path))


def special_token_ids(tokenizer: Tokenizer, folder: str | Path) -> tuple[int, int]:
    """EOS and padding id, as tokenizer_config.json names them; EOS pads when no padding token is named.

    Raises: ConfigError if the folder names no EOS token that the tokenizer knows.
    """
    path = Path(folder) / "tokenizer_config.json"
    settings = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    eos = _token_id(tokenizer, settings.get("eos_token"))
    if eos is None:
        raise ConfigError(
            f"{path} must name an eos_token of the tokenizer, got {settings.get('eos_token')!r}"
        )
    pad = _token_id(tokenizer, settings.get("pad_token"))
    return eos, eos if pad is None else pad


def newline_token_ids(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token whose text contains a newline: each of them ends the answer's line."""
    ids = range(tokenizer.get_vocab_size())
    texts = tokenizer.decode_batch([[i] for i in ids], skip_special_tokens=False)
    return tuple(i for i, text in zip(ids, texts, strict=True) if "\n" in text)


def _token_id(tokenizer: Tokenizer, token: str | dict[str, str] | None) -> int | None:
    # Older folders store a token as {"content": ..., ...}.
    content = token.get("content") if isinstance(token, dict) else token
    return None if content is None else tokenizer.token_to_id(content)


def _expressions(seed: int, *, min_digits: int, max_digits: int) -> Iterator[tuple[str, str]]:
    """Endless (expression, answer). An item depends on (seed, its index) only: the size plays no part."""
    try:
        module = import_module_only("reasoning_gym.arithmetic.chain_sum", install_hint=INSTALL_HINT)
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.task 'chain_sum': {error}") from error
    dataset = module.ChainSumDataset(
        module.ChainSumConfig(
            min_terms=2, max_terms=2, min_digits=min_digits, max_digits=max_digits, seed=seed, size=1
        )
    )
    index = 0
    while True:
        item = dataset[index]
        yield item["metadata"]["expression"], item["answer"]
        index += 1


def _example(tokenizer: Tokenizer, expression: str, answer: str) -> TaskExample:
    text = f"{SOLVED_EXAMPLES}{expression} ="
    return TaskExample(
        token_ids=token_array(tokenizer.encode(text).ids),
        text=text,
        answer=answer,
        metadata={"expression": expression},
    )
