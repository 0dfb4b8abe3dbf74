"""Fakes of the loop's parts; together they check that the loop calls them in the one right order.

Owns `StepOrder`, the state machine of a step, which all fakes of one run share. Driven by the real `train`.
Invariant: a call that the real parts would answer with wrong numbers (a window that opens before the publish,
values from an updated critic, a batch without advantages) raises `CallerError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.protocol.errors import CheckpointError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.testing.fakes import make_group, require


class StepOrder:
    """Which call may come next, over all parts of one run.

    Args:
        first_step: completed steps at the start; > 0 after a resume.

    Attributes:
        events: every call that was accepted, with its argument, in order.
    """

    def __init__(self, *, schedule: AsyncSchedule, ppo_epochs: int, first_step: int = 0) -> None:
        self.events: list[tuple[str, int]] = []
        self._schedule = schedule
        self._ppo_epochs = ppo_epochs
        self._step = first_step
        self._version: int | None = None
        self._opened = False
        self._unpublished = False
        self._begin_step()

    def _begin_step(self) -> None:
        self._taken = self._valued = self._scored = False
        self._critic_epochs = self._policy_epochs = 0

    @property
    def version(self) -> int:
        """Weight version that the engines serve. Raises: CallerError before the first publish."""
        require(self._version is not None, "nothing was published yet")
        return self._version or 0

    def took(self, step: int) -> None:
        """The groups of `step` are taken, once, from an open window."""
        require(self._opened and step == self._step, f"step {step} taken while step {self._step} is open")
        require(not self._taken, f"step {step} is taken twice")
        self._taken = True
        self._record("take", step)

    def valued(self) -> None:
        """Critic values come first, from the critic before its update."""
        require(self._taken and not self._valued, "values are computed once per step, after the take")
        require(self._critic_epochs == 0, "values must come from the critic before its update")
        self._valued = True
        self._record("values", self._step)

    def scored(self) -> None:
        """Old log-probs come after the values and before any update."""
        require(
            self._valued and not self._scored, "old log-probs are computed once per step, after the values"
        )
        require(self._policy_epochs == 0, "old log-probs must come from the policy before its update")
        self._scored = True
        self._record("logprobs", self._step)

    def referenced(self) -> None:
        """Reference log-probs come after the old ones."""
        require(self._scored, "reference log-probs come after the policy's")
        self._record("reference", self._step)

    def critic_updated(self) -> None:
        """A critic epoch comes before the policy epoch of the same number."""
        require(self._scored, "the critic is updated before the batch is scored")
        behind = self._critic_epochs - (self._policy_epochs if self._trains_policy() else self._critic_epochs)
        require(behind == 0, "two critic epochs in a row; the policy's comes in between")
        require(self._critic_epochs < self._ppo_epochs, f"more than {self._ppo_epochs} critic epochs")
        self._critic_epochs += 1
        self._record("critic_update", self._step)

    def policy_updated(self) -> None:
        """A policy epoch follows its critic epoch, and never happens on a frozen step."""
        require(self._trains_policy(), f"step {self._step} is frozen, but the policy is updated")
        require(self._policy_epochs == self._critic_epochs - 1, "the policy is updated before the critic")
        self._policy_epochs += 1
        self._record("policy_update", self._step)

    def pushed(self, version: int) -> None:
        """One publish at the start, then one after each step that trained the policy."""
        if self._version is None:
            expected = self._schedule.version_at(self._step)
        else:
            require(self._is_updated() and self._trains_policy(), f"publish of {version} without new weights")
            expected = self._version + 1
        require(version == expected, f"version {version} is published, expected {expected}")
        self._version = version
        self._record("push", version)

    def not_pushed(self, version: int) -> None:
        """A publish fails for good: nothing may come after it but a save of the step that is complete without it."""
        require(self._is_updated() and self._trains_policy(), f"publish of {version} without new weights")
        self._unpublished = True

    def opened(self, step: int, frontier: int) -> None:
        """The next window opens after the publish of the weights that the step produced."""
        if self._opened:
            require(self._is_updated(), f"the window of step {step} opens before step {self._step} is done")
            self._step += 1
        require(step == self._step, f"the window of step {step} opens, expected {self._step}")
        expected = self._schedule.version_at(step)
        require(self._version == expected, f"window {step} opens at version {self._version}, not {expected}")
        allowed = self._schedule.frontier(step)
        require(frontier == allowed, f"frontier {frontier} at step {step}, the schedule says {allowed}")
        self._opened = True
        self._begin_step()
        self._record("open", step)

    def at_boundary(self, event: str, step: int) -> None:
        """Validation and saving happen between steps, with the step's own weights in the engines."""
        # The next window may open before or after.
        completed = self._step + (self._taken and self._is_updated())
        inside = self._taken and not self._is_updated()
        require(step == completed and not inside, f"{event} of step {step} inside step {self._step}")
        lacks = self._version != self._schedule.version_at(step)
        require(
            not lacks or (self._unpublished and event == "save"), f"{event} of step {step} with other weights"
        )
        self._record(event, step)

    def _record(self, event: str, argument: int) -> None:
        self.events.append((event, argument))

    def _trains_policy(self) -> bool:
        return self._schedule.trains_policy(self._step)

    def _is_updated(self) -> bool:
        policy_epochs = self._ppo_epochs if self._trains_policy() else 0
        return self._critic_epochs == self._ppo_epochs and self._policy_epochs == policy_epochs


class FakePolicy:
    """A `Policy` whose log-probs depend on the token and on the number of optimizer steps."""

    def __init__(self, order: StepOrder) -> None:
        self._order = order
        self.num_optimizer_steps = 0

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        """See `Policy.logprobs`. A call with `temperature` is a probe and may come at any time."""
        if temperature is None:
            self._order.scored()
        return _fake_logprobs(batch, self.num_optimizer_steps)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """See `Policy.reference_logprobs`."""
        self._order.referenced()
        return _fake_logprobs(batch, 0)

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Policy.update`."""
        self._order.policy_updated()
        _check_minibatches(minibatches, ("old_logprobs_BT", "advantages_BT"))
        self.num_optimizer_steps += len(minibatches)
        return {"train/loss": 1.0 / self.num_optimizer_steps, "train/grad_norm": 1.0}


class FakeCritic:
    """A `Critic` whose values depend on the number of optimizer steps."""

    def __init__(self, order: StepOrder) -> None:
        self._order = order
        self.num_optimizer_steps = 0

    def values(self, batch: TrainBatch) -> Tensor:
        """See `Critic.values`."""
        self._order.valued()
        value = self.num_optimizer_steps / (1.0 + self.num_optimizer_steps)
        return torch.where(batch.response_mask_BT, value, 0.0)

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Critic.update`."""
        self._order.critic_updated()
        _check_minibatches(minibatches, ("values_BT", "returns_BT"))
        self.num_optimizer_steps += len(minibatches)
        return {"train/critic/loss": 1.0 / self.num_optimizer_steps, "train/critic/grad_norm": 1.0}


class FakeRefit:
    """A `Refit` that only counts versions."""

    def __init__(self, order: StepOrder) -> None:
        self._order = order

    def push(self, *, version: int) -> Mapping[str, float]:
        """See `Refit.push`."""
        self._order.pushed(version)
        return {"refit/transfer_s": 0.0}


class FakeGroupSource:
    """A `GroupSource` with an infinitely fast generator behind it: every window is filled when it opens.

    So groups are as old as the schedule allows.

    Args:
        response_tokens: length of every response.
    """

    def __init__(
        self,
        order: StepOrder,
        *,
        schedule: AsyncSchedule,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        response_tokens: int = 3,
    ) -> None:
        self._order = order
        self._schedule = schedule
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._response_tokens = response_tokens
        self._next_target: int | None = None
        self._next_ordinal = 0
        self._ready: dict[int, list[PromptGroup]] = {}

    def open(self, *, step: int, frontier: int) -> None:
        """See `GroupSource.open`."""
        self._order.opened(step, frontier)
        first = step if self._next_target is None else self._next_target
        for target in range(first, frontier + 1):
            self._ready[target] = [self._generate(target, step) for _ in range(self._num_prompts)]
        self._next_target = max(first, frontier + 1)

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """See `GroupSource.take`."""
        self._order.took(target_step)
        return self._ready.pop(target_step)

    def _generate(self, target: int, step: int) -> PromptGroup:
        ordinal = self._next_ordinal
        self._next_ordinal += 1
        return make_group(
            ordinal=ordinal,
            target_step=target,
            opened_at_step=step,
            versions=(self._order.version,) * self._response_tokens,
            num_generations=self._num_generations,
            reward=float(ordinal % 2),
        )


class FakeValidator:
    """A `Validator` that reports the step as its accuracy."""

    def __init__(self, order: StepOrder) -> None:
        self._order = order

    def run(self, *, step: int) -> Mapping[str, float]:
        """See `Validator.run`."""
        self._order.at_boundary("validate", step)
        return {"validation/accuracy": float(step)}


class FakeCheckpoints:
    """A `Checkpoints` in memory: restores `first_step` and records what is saved.

    Attributes:
        saved: metrics that each save was given.   published: steps whose save became visible, in order.
        overdue: tests set it to be asked for a save at the next step boundary.
    """

    def __init__(self, order: StepOrder, *, first_step: int = 0) -> None:
        self._order = order
        self._first_step = first_step
        self._written: int | None = None
        self.saved: dict[int, dict[str, float]] = {}
        self.published: list[int] = []
        self.overdue = False

    def restore(self) -> int:
        """See `Checkpoints.restore`."""
        return self._first_step

    def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """See `Checkpoints.save`."""
        self._order.at_boundary("save", step)
        require(
            self._written is None, f"step {step} is saved before the save of {self._written} was published"
        )
        self.saved[step] = dict(metrics)
        self._written = step
        self.overdue = False
        return {}

    def publish(self, *, wait: bool = False) -> None:
        """See `Checkpoints.publish`."""
        if self._written is not None:
            self.published.append(self._written)
        self._written = None


class FakeBackgroundSave:
    """A `BackgroundSave` that writes its files when it was asked `boundaries` times, or when it has to."""

    def __init__(self, folder: Path, steps: Mapping[str, int], *, boundaries: int) -> None:
        self._folder = folder
        self._steps = dict(steps)
        self._boundaries = boundaries
        self._written = False

    def is_written(self) -> bool:
        """See `BackgroundSave.is_written`."""
        require(not self._written, "asked again after it was written")
        self._boundaries -= 1
        return self._boundaries < 0

    def finish(self) -> None:
        """See `BackgroundSave.finish`."""
        require(not self._written, "finished twice")
        self._written = True
        for name, step in self._steps.items():
            (self._folder / f"{name}.json").write_text(json.dumps(step))


class FakeModelStore:
    """A `ModelStore` over the fake models: their state is the number of their optimizer steps.

    Args:
        boundaries: how often a save in the background is asked before its files appear.
    """

    def __init__(self, *, policy: FakePolicy, critic: FakeCritic, boundaries: int = 0) -> None:
        self._models = {"policy": policy, "critic": critic}
        self._boundaries = boundaries

    def save(self, folder: Path) -> None:
        """See `ModelStore.save`."""
        require(folder.is_dir(), f"{folder} must exist before the models are saved into it")
        for name, model in self._models.items():
            path = folder / f"{name}.json"
            require(not path.exists(), f"{path} was saved already")
            path.write_text(json.dumps(model.num_optimizer_steps))

    def begin_save(self, folder: Path) -> FakeBackgroundSave:
        """See `ModelStore.begin_save`."""
        require(folder.is_dir(), f"{folder} must exist before the models are saved into it")
        steps = {name: model.num_optimizer_steps for name, model in self._models.items()}
        return FakeBackgroundSave(folder, steps, boundaries=self._boundaries)

    def load(self, folder: Path) -> None:
        """See `ModelStore.load`."""
        for name, model in self._models.items():
            try:
                model.num_optimizer_steps = int(json.loads((folder / f"{name}.json").read_text()))
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{folder}: the {name} cannot be loaded: {error}") from error


class FakeStepLog:
    """A `StepLog` that keeps what it is given; `running` has the timers that are on."""

    def __init__(self, rows: list[dict[str, float]], running: set[str]) -> None:
        self._rows = rows
        self._values: dict[str, float] = {}
        self._running = running
        self._flushed = False

    @property
    def values(self) -> Mapping[str, float]:
        """See `StepLog.values`."""
        return dict(self._values)

    def add(self, metrics: Mapping[str, float], /) -> None:
        """See `StepLog.add`."""
        require(not self._flushed, f"metrics after the step's row was written: {sorted(metrics)}")
        repeated = sorted(metrics.keys() & self._values.keys())
        require(not repeated, f"metrics are added twice: {repeated}")
        self._values.update(metrics)

    @contextmanager
    def timed(self, name: str, /) -> Iterator[None]:
        """See `StepLog.timed`."""
        require(name not in self._running, f"the timer {name} runs already")
        self._running.add(name)
        try:
            yield
        finally:
            self._running.remove(name)

    def flush(self) -> None:
        """See `StepLog.flush`."""
        require(not self._flushed and not self._running, "a row is written once, outside of every timer")
        self._flushed = True
        self._rows.append(self._values)


class FakeTelemetry:
    """A `Telemetry` in memory.

    Attributes:
        rows: metrics of each flushed step, in order.   before: those of validation before the first step.
        running: timers that are on.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []
        self.before: list[dict[str, float]] = []
        self.running: set[str] = set()

    def step(self, step: int, /) -> FakeStepLog:
        """See `Telemetry.step`."""
        return FakeStepLog(self.rows, self.running)

    def before_first_step(self) -> FakeStepLog:
        """See `Telemetry.before_first_step`."""
        require(not self.rows, "a step was logged already")
        return FakeStepLog(self.before, self.running)


def _fake_logprobs(batch: TrainBatch, num_updates: int) -> Tensor:
    logprobs = -0.25 - 0.125 * (batch.token_ids_BT % 4).float() - 0.001 * num_updates
    return torch.where(batch.response_mask_BT, logprobs, 0.0)


def _check_minibatches(minibatches: Sequence[TrainBatch], fields: Sequence[str]) -> None:
    require(len(minibatches) > 0, "an update without minibatches")
    sizes = {len(minibatch) for minibatch in minibatches}
    require(len(sizes) == 1, f"minibatches of different sizes: {sizes}")
    for minibatch in minibatches:
        for name in fields:
            value = getattr(minibatch, name)
            require(value is not None, f"{name} is missing in an update")
            require(bool(value.isfinite().all()), f"{name} is not finite in an update")
            require(value.shape == minibatch.token_ids_BT.shape, f"{name} has shape {tuple(value.shape)}")
