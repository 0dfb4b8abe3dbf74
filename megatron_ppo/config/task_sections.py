"""Sections of the task: prompts, reward, validation and the gates that a finished run is judged by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue, model_validator

from megatron_ppo.config.base import MAX_SEED, Section, setting

Statistic = Literal["mean", "median", "min", "max", "last", "first"]


class DataSection(Section):
    """Keys that every task has."""

    seed: int = setting(
        1234, "Seed of the prompts. Their order over the run comes from run.seed.", ge=0, le=MAX_SEED
    )
    num_train: int = setting(4000, "Training prompts; the endless stream repeats them.", unit="prompts", ge=1)
    num_validation: int = setting(256, "Held-out prompts, none of them trained on.", unit="prompts", ge=1)
    max_prompt_tokens: int = setting(
        8, "Longest prompt; sizes the engine and is checked against the task.", unit="tokens", ge=1
    )

    def kwargs(self) -> dict[str, Any]:
        """Arguments of `megatron_ppo.data.tasks.build_task`."""
        return self.model_dump(exclude={"max_prompt_tokens"})


class SortTaskSection(DataSection):
    """`35142=`: 3 to 5 digits; the answer is the digits in ascending order."""

    task: Literal["sort3_5"] = setting(doc="Name of the task.")


class CountTaskSection(DataSection):
    """`qk75=`: count up to 99 in items of five tokens; answers of 66 to 126 tokens and a graded reward."""

    task: Literal["count_long"] = setting(doc="Name of the task.")
    num_validation: int = setting(64, "Held-out prompts, none of them trained on.", unit="prompts", ge=1)


class ChainSumTaskSection(DataSection):
    """`reasoning-gym` chain_sum with a compact few-shot prompt, for a pretrained model."""

    task: Literal["chain_sum"] = setting(doc="Name of the task.")
    num_train: int = setting(2000, "Training prompts; the endless stream repeats them.", unit="prompts", ge=1)
    num_validation: int = setting(64, "Held-out prompts, none of them trained on.", unit="prompts", ge=1)
    min_digits: int = setting(1, "Digits of the smallest terms.", unit="digits", ge=1)
    max_digits: int = setting(2, "Digits of the largest terms.", unit="digits", ge=1)
    max_prompt_tokens: int = setting(
        48, "Longest prompt; sizes the engine and is checked against the task.", unit="tokens", ge=1
    )


class Gsm8kTaskSection(DataSection):
    """Word problems of GSM8K, from files, in the chat format of the policy's folder."""

    task: Literal["gsm8k"] = setting(doc="Name of the task.")
    train_path: str = setting(
        "data/gsm8k/train.jsonl",
        "Rows with question and answer: .jsonl, .jsonl.gz, .parquet or a folder of the datasets package.",
        min_length=1,
    )
    validation_path: str = setting(
        "data/gsm8k/test.jsonl", "Held-out rows, in the same formats.", min_length=1
    )
    num_train: int = setting(
        7473, "Most training prompts; the seed chooses them where there are more.", unit="prompts", ge=1
    )
    num_validation: int = setting(
        1319, "Most held-out prompts; the seed chooses them where there are more.", unit="prompts", ge=1
    )
    max_prompt_tokens: int = setting(
        512, "Longest prompt; sizes the engine and is checked against the task.", unit="tokens", ge=1
    )
    instruction: str = setting(
        "Solve the problem step by step. Put the final answer, a single number, inside \\boxed{}.",
        "Stands before every question. Empty is none.",
    )
    chat_template: bool = setting(
        True, "Use the chat format of the model folder; false sends the text as it is, for a base model."
    )
    needs_mark: bool = setting(
        False, "Reward numbers in \\boxed{} or after #### only, not the last number of any other text."
    )


Data = Annotated[
    SortTaskSection | CountTaskSection | ChainSumTaskSection | Gsm8kTaskSection, Field(discriminator="task")
]


class RewardSection(Section):
    """The verifier."""

    target: (
        Literal[
            "megatron_ppo.rewards.exact_match.ExactMatch",
            "megatron_ppo.rewards.chunk_match.ChunkMatch",
            "megatron_ppo.rewards.final_number.FinalNumber",
            "megatron_ppo.rewards.gsm8k.Gsm8kAnswer",
        ]
        | None
    ) = Field(None, alias="_target_", description="Class. null is the verifier that the task was made for.")
    options: dict[str, JsonValue] = setting(
        doc="Keyword arguments of the class; only with an explicit `_target_`.", default_factory=dict
    )
    isolation: Literal["process", "thread"] = setting(
        "process",
        "Where it runs. process: in processes that are killed at the deadline and started again; thread: in the "
        "collector, where one that hangs ends the run, and what it starts does not hear SIGTERM.",
    )

    def spec(self, *, target: str, kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The verifier to build, as `_target_` and keyword arguments.

        Args:
            target, kwargs: the verifier that the task was made for.
        """
        if self.target is None:
            return {"_target_": target, **kwargs}
        return {"_target_": self.target, **self.options}

    @model_validator(mode="after")
    def _options_have_a_target(self) -> RewardSection:
        if self.target is None and self.options:
            raise ValueError(f"options: got {sorted(self.options)}; must be empty while _target_ is null")
        return self


class ValidationSection(Section):
    """Held-out prompts scored with the current weights. Has sampling settings of its own."""

    period: int = setting(5, "Completed steps between validations. 0 is none.", unit="steps", ge=0)
    at_start: bool = setting(True, "Validate the initial weights, before collection starts.")
    at_end: bool = setting(True, "Validate after the last step.")
    max_samples: int = setting(
        256, "Prompts per validation, from the front of the held-out ones.", unit="prompts", ge=1
    )
    temperature: float = setting(0.0, "Sampling temperature. 0 is greedy.", ge=0.0)
    top_p: float = setting(
        1.0, "Nucleus sampling; allowed here, because nothing trains on it.", gt=0.0, le=1.0
    )
    top_k: int = setting(0, "Sample from the k likeliest tokens. 0 is all of them.", unit="tokens", ge=0)
    max_new_tokens: int | None = setting(
        None, "Response limit. null is inference.max_new_tokens.", unit="tokens", ge=1
    )
    seed: int = setting(0, "Seed of validation sampling.", ge=0, le=MAX_SEED)


class GateReference(Section):
    """A statistic that is subtracted from the gate's own."""

    metric: str | None = setting(None, "Metric. null is the gate's own.")
    stat: Statistic = setting("mean", "Statistic over the steps.")
    steps: tuple[int, int] | None = setting(
        None, "First and last completed step, both inclusive. null is all.", unit="steps", strict=False
    )


class GateSection(Section):
    """A condition on a finished run: `stat(metric over steps) - minus op value`."""

    metric: str = setting(doc="Name as in metrics.jsonl.")
    stat: Statistic = setting("mean", "Statistic over the steps.")
    steps: tuple[int, int] | None = setting(
        None, "First and last completed step, both inclusive. null is all.", unit="steps", strict=False
    )
    minus: GateReference | None = setting(None, "Statistic to subtract. null subtracts nothing.")
    op: Literal["<", "<=", ">", ">=", "=="] = setting(doc="Comparison with `value`.")
    value: float = setting(doc="Bound.")
    reason: str = setting("", "Why the bound is what it is.")

    @model_validator(mode="after")
    def _steps_in_order(self) -> GateSection:
        for steps in (self.steps, self.minus.steps if self.minus else None):
            if steps is not None and not 0 <= steps[0] <= steps[1]:
                raise ValueError(f"steps must be [first, last] with 0 <= first <= last, got {list(steps)}")
        return self
