"""Task `gsm8k`: grade-school word problems of the data set of that name, for an instruction-tuned model.

Rows are {question, answer}, where the answer is a worked solution whose last line is `#### number`; the data set of
Cobbe et al., arXiv:2110.14168, in any format of `data.records`. The prompt is an instruction and the question in the
chat format of the policy's folder.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

from megatron_ppo.data.chain_sum import load_tokenizer, special_token_ids
from megatron_ppo.data.chat_prompt import chat_renderer
from megatron_ppo.data.plain_number import parse_number
from megatron_ppo.data.records import text_rows
from megatron_ppo.data.task import RewardSpec, TaskExample, TaskSpec
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.trajectory import token_array

logger = logging.getLogger(__name__)

INSTRUCTION = "Solve the problem step by step. Put the final answer, a single number, inside \\boxed{}."
_MARK = "####"


def gsm8k_task(
    *,
    train_path: str | Path,
    validation_path: str | Path,
    tokenizer_dir: str | Path,
    seed: int = 1234,
    num_train: int = 7473,
    num_validation: int = 1319,
    instruction: str = INSTRUCTION,
    chat_template: bool = True,
    needs_mark: bool = False,
) -> TaskSpec:
    """Build the task.

    Args:
        train_path, validation_path: rows with `question` and `answer`.
        tokenizer_dir: model folder with tokenizer.json, tokenizer_config.json and a chat template.
        num_train, num_validation: at most so many rows; `seed` chooses which where there are more.
        instruction: stands before the question; empty for none.
        chat_template: False sends instruction and question as they are, for base models.
        needs_mark: the verifier takes numbers in `\\boxed{}` or after `####` only.
    Raises: ConfigError for a missing file, a row without a number as answer, or a folder without tokenizer.
    """
    tokenizer = load_tokenizer(tokenizer_dir)
    render = chat_renderer(tokenizer_dir) if chat_template else _as_it_is
    held_out = _problems(validation_path, "data.validation_path", num_validation, seed)
    train = _problems(train_path, "data.train_path", num_train, seed)
    shared = {question for question, _ in held_out} & {question for question, _ in train}
    if shared:
        # A held-out question that is trained on would make the accuracy mean something else.
        logger.warning("%d training questions are validation questions and left out", len(shared))
        train = [problem for problem in train if problem[0] not in shared]
    build = _ExampleBuilder(tokenizer, render, instruction)
    eos_token_id, pad_token_id = special_token_ids(tokenizer, tokenizer_dir)
    return TaskSpec(
        name="gsm8k",
        train=tuple(build(*problem) for problem in train),
        validation=tuple(build(*problem) for problem in held_out),
        reward=RewardSpec(
            target="megatron_ppo.rewards.gsm8k.Gsm8kAnswer",
            kwargs={
                "tokenizer_dir": str(tokenizer_dir),
                "eos_token_id": eos_token_id,
                "needs_mark": needs_mark,
            },
        ),
        pad_token_id=pad_token_id,
        eos_token_id=eos_token_id,
        # The right answers of the data set themselves; the model's own may be longer.
        max_response_tokens=1
        + max(
            len(tokenizer.encode(solution, add_special_tokens=False).ids)
            for _, solution in (*train, *held_out)
        ),
    )


def _as_it_is(message: str) -> str:
    return message


def _problems(path: str | Path, key: str, limit: int, seed: int) -> list[tuple[str, str]]:
    """Question and worked solution of at most `limit` rows, each question once, in the order of the file."""
    rows: dict[str, str] = {}
    for question, solution in text_rows(path, ("question", "answer"), key=key):
        if right_answer(solution) is None:
            raise ConfigError(
                f"{key}: the answer to {question[:60]!r}… in {path} must end with '{_MARK} number', got "
                f"{solution[-60:]!r}"
            )
        rows.setdefault(question.strip(), solution)
    if not rows:
        raise ConfigError(f"{key}: {path} has no rows")
    if len(rows) <= limit:
        return list(rows.items())
    chosen = sorted(random.Random(f"gsm8k/{seed}").sample(range(len(rows)), limit))
    items = list(rows.items())
    return [items[index] for index in chosen]


def right_answer(solution: str) -> str | None:
    """The text behind the last `####`, if it is a number."""
    _, mark, answer = solution.rpartition(_MARK)
    answer = answer.strip()
    return answer if mark and parse_number(answer) is not None else None


class _ExampleBuilder:
    def __init__(self, tokenizer: Tokenizer, render: Callable[[str], str], instruction: str) -> None:
        self._tokenizer, self._render, self._instruction = tokenizer, render, instruction

    def __call__(self, question: str, solution: str) -> TaskExample:
        text = self._render(f"{self._instruction}\n\n{question}" if self._instruction else question)
        answer = right_answer(solution)
        assert answer is not None, "checked when the rows were read"
        # The template writes its own BOS where the model has one.
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return TaskExample(token_ids=token_array(ids), text=text, answer=answer)
