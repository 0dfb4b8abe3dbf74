"""A whole run in one thread: the real `train`, checkpoints and replay buffer, fake models and generator.

The generator fills every window in the moment it opens, so a run is the same every time, bit for bit, and one
that was killed and resumed can be compared with one that was not.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.loop.async_ppo import LoopSettings, Parts
from megatron_ppo.loop.checkpoint_folder import Retention
from megatron_ppo.loop.checkpoints import ModelStore, RunCheckpoints
from megatron_ppo.loop.identity import Trait
from megatron_ppo.loop.ports import Checkpoints
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import make_group
from megatron_ppo.testing.loop_fakes import (
    FakeCheckpoints,
    FakeCritic,
    FakeModelStore,
    FakePolicy,
    FakeRefit,
    FakeTelemetry,
    FakeValidator,
    StepOrder,
)

T = TypeVar("T")
PROMPTS, GENERATIONS = 2, 2
BATCH = PROMPTS * GENERATIONS


def loop_settings(schedule: AsyncSchedule, **changes: Any) -> LoopSettings:
    """One epoch, two minibatches, neither validation nor checkpoints."""
    plain = LoopSettings(
        max_num_steps=schedule.max_num_steps,
        seed=42,
        num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=GENERATIONS,
        ppo_epochs=1,
        train_global_batch_size=BATCH // 2,
        shuffle_minibatches=True,
        pad_token_id=0,
        seq_logprob_error_threshold=None,
        overlong_filtering=False,
        use_reference=False,
        validation_period=0,
        validate_at_start=False,
        validate_at_end=False,
        checkpoint_period=0,
    )
    return replace(plain, **changes)


class WorkLog:
    """What each step was trained on, and with which results. A step that is trained again replaces its entry."""

    def __init__(self) -> None:
        self.steps: dict[int, list[object]] = {}
        self._current: list[object] = []

    def begin(self, step: int, groups: Sequence[PromptGroup]) -> None:
        """`step` starts, with `groups`."""
        self._current = [list(groups)]
        self.steps[step] = self._current

    def note(self, model: str, num_optimizer_steps: int, minibatches: Sequence[TrainBatch]) -> None:
        """One epoch of one model: everything that its loss depends on."""
        rows = [[_rows(t) for t in _tensors(minibatch)] for minibatch in minibatches]
        self._current.append((model, num_optimizer_steps, rows))

    def groups(self, step: int) -> list[PromptGroup]:
        """The groups that `step` was trained on."""
        return self.steps[step][0]  # type: ignore[return-value]

    def trained_ordinals(self) -> list[int]:
        """Ordinals in the order of training."""
        return [group.ordinal for step in sorted(self.steps) for group in self.groups(step)]


def _tensors(batch: TrainBatch) -> list[Tensor]:
    required = [
        batch.ordinal_B,
        batch.token_ids_BT,
        batch.response_mask_BT,
        batch.sample_mask_B,
        batch.generation_logprobs_BT,
    ]
    scored = [
        batch.old_logprobs_BT,
        batch.ref_logprobs_BT,
        batch.values_BT,
        batch.advantages_BT,
        batch.returns_BT,
    ]
    return required + [tensor for tensor in scored if tensor is not None]


def _rows(tensor: Tensor) -> object:
    return tensor.tolist()


class LoggedPolicy(FakePolicy):
    """`FakePolicy` that logs what it is trained on."""

    def __init__(self, order: StepOrder, work: WorkLog) -> None:
        super().__init__(order)
        self._work = work

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Policy.update`."""
        self._work.note("policy", self.num_optimizer_steps, minibatches)
        return super().update(minibatches)


class LoggedCritic(FakeCritic):
    """`FakeCritic` that logs what it is trained on."""

    def __init__(self, order: StepOrder, work: WorkLog) -> None:
        super().__init__(order)
        self._work = work

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Critic.update`."""
        self._work.note("critic", self.num_optimizer_steps, minibatches)
        return super().update(minibatches)


class InstantCollection:
    """`GroupSource` and `ReplaySnapshots` over the real replay buffer, whose free slots are filled at once."""

    def __init__(self, order: StepOrder, *, schedule: AsyncSchedule, work: WorkLog) -> None:
        self._order = order
        self._work = work
        self._loop = asyncio.new_event_loop()
        self.replay = ReplayService(
            PromptGroupBuffer(
                schedule=schedule, num_prompts_per_step=PROMPTS, num_generations_per_prompt=GENERATIONS
            )
        )

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of a coroutine of the service."""
        return self._loop.run_until_complete(work)

    def open(self, *, step: int, frontier: int) -> None:
        """See `GroupSource.open`."""
        self._order.opened(step, frontier)
        self.call(self.replay.open(step=step, frontier=frontier))
        while reservations := self.call(self.replay.reserve(limit=100, timeout_s=0.0)):
            for slot in reservations:
                group = make_group(
                    ordinal=slot.ordinal,
                    target_step=slot.target_step,
                    opened_at_step=slot.opened_at_step,
                    versions=(self._order.version,) * (1 + slot.ordinal % 4),
                    num_generations=GENERATIONS,
                    reward=float(slot.ordinal % 3 == 0),
                )
                self.call(self.replay.commit(group))

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """See `GroupSource.take`."""
        self._order.took(target_step)
        groups = self.call(self.replay.take(target_step=target_step, timeout_s=0.0))
        self._work.begin(target_step, groups)
        return groups

    def snapshot(self) -> str:
        """See `ReplaySnapshots.snapshot`."""
        return self.call(self.replay.snapshot())

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """See `ReplaySnapshots.restore`."""
        self.call(self.replay.restore(snapshot, resume_step=resume_step))

    def close(self) -> None:
        """Close the event loop."""
        self._loop.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeRun:
    """The parts of one process's life, and what can be asked about them."""

    parts: Parts
    order: StepOrder
    work: WorkLog
    policy: FakePolicy
    critic: FakeCritic
    collection: InstantCollection
    telemetry: FakeTelemetry

    @property
    def events(self) -> list[str]:
        """Names of the calls, in order."""
        return [name for name, _ in self.order.events]

    def but(self, **parts: Any) -> FakeRun:
        """The same run with some parts replaced."""
        return replace(self, parts=replace(self.parts, **parts))


def fake_run(
    schedule: AsyncSchedule,
    *,
    epochs: int = 1,
    first_step: int = 0,
    work: WorkLog | None = None,
    make_order: Callable[..., StepOrder] = StepOrder,
    folder: Path | None = None,
    keep: int = 1000,
    load_replay_buffer: bool = True,
    wrap_store: Callable[[ModelStore], ModelStore] = lambda store: store,
    asynchronous: bool = False,
) -> FakeRun:
    """A process that is about to call `train`.

    Args:
        first_step: completed steps; with `folder`, those of its newest checkpoint.
        work: goes on from an earlier process's.   folder: for real checkpoints.   wrap_store: of their models.
        asynchronous: these are written while training goes on, over one more step boundary.
    """
    order = make_order(schedule=schedule, ppo_epochs=epochs, first_step=first_step)
    work = work or WorkLog()
    policy, critic = LoggedPolicy(order, work), LoggedCritic(order, work)
    collection = InstantCollection(order, schedule=schedule, work=work)
    telemetry = FakeTelemetry()
    checkpoints: Checkpoints = FakeCheckpoints(order, first_step=first_step)
    if folder is not None:
        real = RunCheckpoints(
            folder=folder,
            resume=True,
            retention=Retention(keep=keep, keep_best=1, metric=None, higher_is_better=True),
            identity={"run.seed": Trait(value="42", because="of the seeds")},
            load_replay_buffer=load_replay_buffer,
            models=wrap_store(FakeModelStore(policy=policy, critic=critic, boundaries=1)),
            asynchronous=asynchronous,
            replay=collection,
            version_at=schedule.version_at,
            on_rank_zero=on_rank_zero,
        )
        checkpoints = OrderedCheckpoints(order, real)
    parts = Parts(
        policy=policy,
        critic=critic,
        advantage=GAE(gae_lambda=0.95, gae_gamma=1.0),
        groups=collection,
        refit=FakeRefit(order),
        validator=FakeValidator(order),
        checkpoints=checkpoints,
        telemetry=telemetry,
    )
    return FakeRun(
        parts=parts,
        order=order,
        work=work,
        policy=policy,
        critic=critic,
        collection=collection,
        telemetry=telemetry,
    )


class OrderedCheckpoints:
    """Tells the order about the saves and passes them on."""

    def __init__(self, order: StepOrder, checkpoints: RunCheckpoints) -> None:
        self._order = order
        self._checkpoints = checkpoints

    def restore(self) -> int:
        """See `Checkpoints.restore`."""
        return self._checkpoints.restore()

    @property
    def overdue(self) -> bool:
        """See `Checkpoints.overdue`."""
        return self._checkpoints.overdue

    def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        """See `Checkpoints.save`."""
        self._order.at_boundary("save", step)
        return self._checkpoints.save(step=step, metrics=metrics)

    def publish(self, *, wait: bool = False) -> None:
        """See `Checkpoints.publish`."""
        self._checkpoints.publish(wait=wait)


def on_rank_zero(what: str, function: Callable[[], T]) -> T:
    """The one rank of a run of one."""
    assert what
    return function()
