"""What the loop expects of the adapters. Every method is called by all trainer ranks in the same order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.protocol.weights import TensorMeta

Metrics = Mapping[str, float]


class Policy(Protocol):
    """The trained model. Results are the same on every rank."""

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        """float32 [B, T] nats with the current weights; 0 outside the response mask.

        At the sampling temperature, or at `temperature` if it is given.
        """
        ...

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """The same with the frozen initial weights."""
        ...

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        """One optimizer step per minibatch, then one scheduler tick. Metrics are means over the minibatches.

        Raises: NonFiniteError, with the offending ordinals, before the optimizer step is applied.
        """
        ...


class Critic(Protocol):
    """The value model. Results are the same on every rank."""

    def values(self, batch: TrainBatch) -> Tensor:
        """float32 [B, T] reward units; V of the state before token j; 0 outside the response mask."""
        ...

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        """As Policy.update."""
        ...


class WeightSource(Protocol):
    """The sender's side of a refit: full tensors in the Hugging Face layout and order."""

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """Names, shapes and dtypes in the order of `full_weights`; the same on every rank."""
        ...

    def full_weights(self) -> Iterator[Tensor]:
        """Collective over all ranks, which all run it to its end: gathers one tensor at a time, for rank 0. What it
        yields elsewhere, if anything, is not for reading.

        A yielded tensor may share the memory of a parameter: copy it before the next update, do not write to it.
        """
        ...


class GroupSource(Protocol):
    """The learner's side of the replay buffer."""

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """The N groups of `target_step`, first in first out, the same on every rank; waits for them.

        Raises: PartDiedError or WaitTimeoutError with the cause.
        """
        ...

    def open(self, *, step: int, frontier: int) -> None:
        """Announce the learner's step and let the collector reserve targets up to `frontier`."""
        ...


class Refit(Protocol):
    """Makes the inference weights equal the policy's, under a new version."""

    def push(self, *, version: int) -> Metrics:
        """Returns when every engine serves `version`. Raises: RefitError."""
        ...


class Validator(Protocol):
    """Scores the current inference weights on held-out prompts."""

    def run(self, *, step: int) -> Metrics:
        """`validation/...` metrics, the same on every rank."""
        ...


class Advantage(Protocol):
    """The advantage estimator."""

    def apply(self, batch: TrainBatch) -> TrainBatch:
        """The batch with advantages and returns. Raises: ValueError when every token is masked."""
        ...

    def metrics(self, batch: TrainBatch) -> Metrics:
        """`train/...` statistics of an applied batch."""
        ...


class Checkpoints(Protocol):
    """Saves and restores everything that the run needs to go on."""

    def restore(self) -> int:
        """Load the checkpoint to continue from, if any, and return the completed steps (0 for a new run)."""
        ...

    @property
    def overdue(self) -> bool:
        """Whether the last save failed and the next step boundary should save again. The same on every rank."""
        ...

    def save(self, *, step: int, metrics: Metrics) -> Metrics:
        """Write, or begin to write, the state after `step` completed steps; not visible before `publish`.

        Returns: `checkpoint/...` metrics. Raises: CheckpointError on every rank, unless failures are only reported.
        """
        ...

    def publish(self, *, wait: bool = False) -> None:
        """Make the last save visible once it is complete; with `wait`, wait for that. Raises: as `save`."""
        ...


class StepLog(Protocol):
    """Metrics and timers of one step."""

    @property
    def values(self) -> Metrics:
        """What has been added so far."""
        ...

    def add(self, metrics: Metrics, /) -> None:
        """Add metrics; a key may be added once."""
        ...

    def timed(self, name: str, /) -> AbstractContextManager[None]:
        """Time a phase; repeated phases of one step add up."""
        ...

    def flush(self) -> object:
        """Write the step's row."""
        ...


class Telemetry(Protocol):
    """Where metrics go. Ranks other than 0 hold one that drops them."""

    def step(self, step: int, /) -> StepLog:
        """The log of the step that starts with `step` completed steps."""
        ...

    def before_first_step(self) -> StepLog:
        """The log of what happens before the first step; its row has step 0."""
        ...
