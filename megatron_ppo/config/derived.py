"""Numbers that follow from the configuration and the world size. Computed once, never configured.

Made by `checks.derive`; printed by `scripts/check_config.py`, used by the app.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Protocol

from megatron_ppo.protocol.schedule import AsyncSchedule


class ModelFacts(Protocol):
    """What `megatron_ppo.warm_start.facts` knows of a model without loading it."""

    @property
    def architecture(self) -> str: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def num_heads(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def ffn_hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def moe_ffn_hidden_size(self) -> int: ...
    @property
    def has_dense_layers(self) -> bool: ...
    @property
    def tie_word_embeddings(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelSizes:
    """Ranks along each axis; their product is the world size. `expert` is a part of data * context."""

    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tensor * self.pipeline * self.context * self.data

    def __str__(self) -> str:
        experts = f" ep={self.expert}" if self.expert > 1 else ""
        return f"tp={self.tensor} pp={self.pipeline} cp={self.context} dp={self.data}{experts}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudgets:
    """Attributes:
    train, score: positions of a microbatch, at most, in passes with and without gradient.
    packed: sequences are laid end to end; else padded to the longest of their microbatch.
    multiple: lengths are rounded up to it.
    """

    train: int
    score: int
    packed: bool
    multiple: int

    def __str__(self) -> str:
        way = "packed" if self.packed else "padded"
        return (
            f"{self.train} tokens in training, {self.score} in scoring, {way}, lengths in multiples of "
            f"{self.multiple}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """Attributes:
    world_size: trainer ranks.   policy, critic: their layouts.
    policy_budgets, critic_budgets: tokens of their microbatches; None where the number of sequences is fixed.
    schedule: the staleness rule.   frontiers: highest target that may be reserved at steps 0, 1, ….
    sequences_per_step: N·G.   minibatches_per_epoch: optimizer steps per epoch of a step.
    buffer_capacity: groups.   max_concurrent_groups: groups in flight.
    max_model_len: engine's limit of prompt + response, in tokens.
    validation_max_new_tokens: response limit of validation, in tokens.
    policy_scheduler_ticks, critic_scheduler_ticks: length of the learning-rate schedules.
    needs_reference: reference log-probs are computed.   run_directory: folder of this experiment's runs.
    warnings: advice that is no error.
    """

    world_size: int
    policy: ParallelSizes
    critic: ParallelSizes
    policy_budgets: TokenBudgets | None
    critic_budgets: TokenBudgets | None
    policy_model: ModelFacts
    critic_model: ModelFacts
    schedule: AsyncSchedule
    frontiers: tuple[int, ...]
    sequences_per_step: int
    minibatches_per_epoch: int
    buffer_capacity: int
    max_concurrent_groups: int
    max_model_len: int
    validation_max_new_tokens: int
    policy_scheduler_ticks: int
    critic_scheduler_ticks: int
    needs_reference: bool
    run_directory: Path
    warnings: tuple[str, ...]

    def rows(self) -> Iterator[tuple[str, str]]:
        """Name and value of each number, for a table."""
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in ("policy_model", "critic_model"):
                yield field.name, describe(value)
            elif field.name == "frontiers":
                yield "frontier at step 0, 1, …", ", ".join(map(str, value))
            elif field.name == "schedule":
                yield (
                    "weight version at step 0, 1, …",
                    ", ".join(str(self.schedule.version_at(step)) for step in range(len(self.frontiers))),
                )
            elif field.name in ("policy_budgets", "critic_budgets"):
                if value is not None:
                    yield field.name, str(value)
            elif field.name != "warnings":
                yield field.name, str(value)


def describe(model: ModelFacts) -> str:
    """One line on a model."""
    return (
        f"{model.architecture}, {model.num_layers} layers, hidden {model.hidden_size}, "
        f"{model.num_heads} heads, {model.num_kv_heads} KV heads, vocabulary {model.vocab_size}, context "
        f"{model.context_length}" + (f", {model.num_experts} experts" if model.num_experts else "")
    )
