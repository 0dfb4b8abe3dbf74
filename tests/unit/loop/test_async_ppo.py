"""The real `train`: the order of its calls, what it refuses, and that a resume changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.batch import TrainBatch, minibatch_order, pack_groups
from megatron_ppo.loop.async_ppo import LoopSettings, train
from megatron_ppo.protocol.errors import (
    GroupMismatchError,
    NonFiniteError,
    StaleGroupError,
    WaitTimeoutError,
    WeightMismatchError,
)
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.testing.fakes import make_group, require
from megatron_ppo.testing.loop_fakes import FakeCheckpoints, FakeCritic, FakePolicy, StepOrder
from megatron_ppo.testing.strategies import schedules
from tests.unit.loop.fake_run import BATCH, GENERATIONS, PROMPTS, FakeRun, WorkLog, fake_run, loop_settings


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class ScriptedGroups:
    """A `GroupSource` that hands out the given groups at the given step, real ones before."""

    def __init__(self, run: FakeRun, step: int, groups: Sequence[PromptGroup]) -> None:
        self._source = run.parts.groups
        self._step = step
        self._groups = list(groups)

    def take(self, *, target_step: int) -> list[PromptGroup]:
        groups = self._source.take(target_step=target_step)
        return self._groups if target_step == self._step else groups

    def open(self, *, step: int, frontier: int) -> None:
        self._source.open(step=step, frontier=frontier)


def groups_for(step: int, *versions: int, count: int = PROMPTS, **changes: Any) -> list[PromptGroup]:
    return [
        make_group(ordinal=q, target_step=step, opened_at_step=step, versions=versions, **changes)
        for q in range(count)
    ]


def test_a_new_run_publishes_then_validates_and_only_then_starts_to_collect() -> None:
    """P3."""
    schedule = AsyncSchedule(max_num_steps=1)
    run = fake_run(schedule)
    train(loop_settings(schedule, validate_at_start=True), schedule, run.parts)
    assert run.events[:4] == ["push", "validate", "open", "take"]
    assert run.telemetry.before == [{"validation/accuracy": 0.0}]


def test_a_resumed_run_publishes_its_own_version_and_does_not_repeat_the_first_validation() -> None:
    schedule = AsyncSchedule(max_num_steps=6, policy_training_start_step=1)
    run = fake_run(schedule, first_step=4)
    train(loop_settings(schedule, validate_at_start=True), schedule, run.but(groups=_made_up(run)).parts)
    assert run.order.events[:2] == [("push", 3), ("open", 4)]
    assert "validate" not in run.events and run.telemetry.before == []


def _made_up(run: FakeRun) -> Any:
    """Groups of the present version; a buffer that was not restored would not know the resumed step."""

    class Groups:
        def take(self, *, target_step: int) -> list[PromptGroup]:
            run.order.took(target_step)
            return groups_for(target_step, run.order.version)

        def open(self, *, step: int, frontier: int) -> None:
            run.order.opened(step, frontier)

    return Groups()


def test_a_step_with_everything_due_runs_in_the_documented_order() -> None:
    schedule = AsyncSchedule(max_num_steps=2, policy_training_start_step=1)
    run = fake_run(schedule, epochs=2)
    plan = loop_settings(schedule, ppo_epochs=2, use_reference=True, validation_period=1, checkpoint_period=1)
    train(plan, schedule, run.parts)
    scored = ["take", "values", "logprobs", "reference"]
    frozen = [*scored, "critic_update", "critic_update", "open", "validate", "save"]
    epoch = ["critic_update", "policy_update"]
    trained = [*scored, *epoch, *epoch, "push", "open", "validate", "save"]
    assert run.events == ["push", "open", *frozen, *trained]


def test_a_run_that_generates_alone_opens_the_window_when_everything_else_is_done() -> None:
    schedule = AsyncSchedule(max_num_steps=2, max_trajectory_age_steps=0, policy_training_start_step=1)
    run = fake_run(schedule)
    plan = loop_settings(schedule, validation_period=1, checkpoint_period=1, generates_alone=True)
    train(plan, schedule, run.parts)
    scored = ["take", "values", "logprobs", "critic_update"]
    frozen = [*scored, "validate", "save", "open"]
    trained = [*scored, "policy_update", "push", "validate", "save", "open"]
    assert run.events == ["push", "open", *frozen, *trained]
    assert run.parts.checkpoints.published == [1, 2]  # type: ignore[attr-defined]


def test_a_frozen_step_publishes_nothing_and_logs_no_policy_keys() -> None:
    """W5 and W6: two steps, one of them frozen."""
    schedule = AsyncSchedule(max_num_steps=2, policy_training_start_step=1)
    run = fake_run(schedule)
    train(loop_settings(schedule), schedule, run.parts)
    assert [version for name, version in run.order.events if name == "push"] == [0, 1]
    first, second = run.telemetry.rows
    assert {"train/critic/loss"} <= first.keys() and not {
        "train/loss",
        "train/grad_norm",
        "refit/transfer_s",
    } & first.keys()
    assert {"train/critic/loss", "train/loss", "train/grad_norm", "refit/transfer_s"} <= second.keys()


def test_how_the_scored_batch_was_cut_is_asked_after_its_passes_and_before_any_update() -> None:
    schedule = AsyncSchedule(max_num_steps=2, policy_training_start_step=1)
    run = fake_run(schedule)
    asked_after: list[str] = []

    def scoring() -> dict[str, float]:
        asked_after.append(run.events[-1])
        return {"train/logprob_packing_efficiency": 0.5 + len(asked_after)}

    run = run.but(scoring=scoring)
    train(loop_settings(schedule, use_reference=True), schedule, run.parts)
    assert asked_after == ["reference", "reference"]
    # On frozen steps too: they score as well.
    assert [row["train/logprob_packing_efficiency"] for row in run.telemetry.rows] == [1.5, 2.5]


def test_two_steps_of_two_epochs_publish_three_times_and_update_each_model_in_four_epochs() -> None:
    """P1: as many publishes as policy steps, and the one at the start."""
    schedule = AsyncSchedule(max_num_steps=2, max_trajectory_age_steps=0)
    run = fake_run(schedule, epochs=2)
    train(loop_settings(schedule, ppo_epochs=2), schedule, run.parts)
    counts = {name: run.events.count(name) for name in set(run.events)}
    assert (counts["push"], counts["policy_update"], counts["critic_update"]) == (3, 4, 4)
    assert (run.policy.num_optimizer_steps, run.critic.num_optimizer_steps) == (8, 8)


def test_age_zero_makes_the_same_calls_as_age_one_and_every_group_is_fresh() -> None:
    events = []
    for age in (0, 1):
        schedule = AsyncSchedule(max_num_steps=4, max_trajectory_age_steps=age)
        run = fake_run(schedule)
        train(loop_settings(schedule, validation_period=2), schedule, run.parts)
        events.append(run.order.events)
        ages = [row["age/max_versions"] for row in run.telemetry.rows]
        steps_ahead = [row["train/avg_trajectory_age"] for row in run.telemetry.rows]
        assert ages == steps_ahead == [min(step, age) for step in range(4)]
    assert events[0] == events[1]


def test_a_finished_run_touches_no_part() -> None:
    """R10."""
    schedule = AsyncSchedule(max_num_steps=3)
    run = fake_run(schedule, first_step=3)
    untouchable = dict.fromkeys(
        ("policy", "critic", "advantage", "groups", "refit", "validator", "telemetry"), object()
    )
    assert train(loop_settings(schedule), schedule, run.but(**untouchable).parts) == 3
    assert run.events == []


def test_both_models_see_every_sequence_once_per_epoch_in_the_order_of_the_seed() -> None:
    schedule = AsyncSchedule(max_num_steps=3)
    run = fake_run(schedule, epochs=2)
    train(loop_settings(schedule, ppo_epochs=2, seed=7), schedule, run.parts)
    for step in range(3):
        groups, *epochs = run.work.steps[step]
        batch = pack_groups(groups, pad_token_id=0)  # type: ignore[arg-type]
        for index, (model, _, minibatches) in enumerate(epochs):  # type: ignore[misc]
            assert model == ("critic", "policy")[index % 2]
            order = minibatch_order(BATCH, shuffle=True, seed=(7, step, index // 2))
            ordinals = [ordinal for minibatch in minibatches for ordinal in minibatch[0]]
            assert ordinals == batch.ordinal_B[order].tolist()


def test_the_seed_of_minibatches_changes_with_run_step_and_epoch() -> None:
    orders = {
        tuple(minibatch_order(64, shuffle=True, seed=(run, step, epoch)).tolist())
        for run in (1, 2)
        for step in range(3)
        for epoch in range(3)
    }
    assert len(orders) == 18
    assert minibatch_order(4, shuffle=False, seed=(1, 2, 3)).tolist() == [0, 1, 2, 3]


def test_a_checkpoint_appears_after_the_row_of_its_step_which_holds_the_time_of_the_save() -> None:
    schedule = AsyncSchedule(max_num_steps=5)
    run = fake_run(schedule)

    class RowFirst(FakeCheckpoints):
        def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
            require(len(run.telemetry.rows) == step - 1, f"the row of {step} is out before the save")
            require("checkpointing" in run.telemetry.running, "the save is not timed")
            return {**super().save(step=step, metrics=metrics), "checkpoint/failed_saves": 1.0}

        def publish(self, *, wait: bool = False) -> None:
            step = len(run.telemetry.rows)
            require(wait is (step == 5), f"wait={wait} after step {step}: only the end of the run waits")
            super().publish(wait=wait)
            require(self.published == [saved for saved in (2, 4, 5) if saved <= step], "published late")

    checkpoints = RowFirst(run.order)
    train(
        loop_settings(schedule, validation_period=2, checkpoint_period=2),
        schedule,
        run.but(checkpoints=checkpoints).parts,
    )
    assert sorted(checkpoints.saved) == [2, 4, 5]
    assert checkpoints.saved[4]["validation/accuracy"] == 4.0
    assert "validation/accuracy" not in checkpoints.saved[5]
    assert [row.get("checkpoint/failed_saves") for row in run.telemetry.rows] == [None, 1.0, None, 1.0, 1.0]


def test_a_save_that_is_overdue_is_made_at_the_next_step_boundary() -> None:
    schedule = AsyncSchedule(max_num_steps=6)
    run = fake_run(schedule)

    class FailsOnce(FakeCheckpoints):
        def publish(self, *, wait: bool = False) -> None:
            self.overdue = self.overdue or (2 in self.saved and 3 not in self.saved)
            super().publish(wait=wait)

    checkpoints = FailsOnce(run.order)
    plan = loop_settings(schedule, checkpoint_period=2)
    train(plan, schedule, run.but(checkpoints=checkpoints).parts)
    assert checkpoints.published == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("changes", "validated", "saved"),
    [
        ({}, [], []),
        ({"validation_period": 3, "checkpoint_period": 2}, [3, 6], [2, 4, 6, 7]),
        ({"validate_at_end": True, "checkpoint_period": 7}, [7], [7]),
        ({"validation_period": 7, "validate_at_end": True, "checkpoint_period": 9}, [7], [7]),
    ],
)
def test_validation_and_checkpoints_are_due(
    changes: dict[str, Any], validated: list[int], saved: list[int]
) -> None:
    plan = loop_settings(AsyncSchedule(max_num_steps=7), **changes)
    assert [step for step in range(1, 8) if plan.validation_due(step)] == validated
    assert [step for step in range(1, 8) if plan.checkpoint_due(step)] == saved


def test_a_group_that_is_too_old_ends_the_run_before_any_model_sees_it() -> None:
    schedule = AsyncSchedule(max_num_steps=4)
    run = fake_run(schedule)
    groups = ScriptedGroups(run, 3, [*groups_for(3, 3, count=1), *groups_for(3, 1, 2, count=1)])
    with pytest.raises(StaleGroupError, match=r"ordinal 0 has age 2 versions at step 3; .* allows 1"):
        train(loop_settings(schedule), schedule, run.but(groups=groups).parts)
    assert run.events[-1] == "take"
    assert len(run.telemetry.rows) == 3


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        (groups_for(1, 1, count=1), "step 2 took 2 sequences, expected exactly 4"),
        (groups_for(1, 1, count=3), "step 2 took 6 sequences, expected exactly 4"),
        (groups_for(1, 1, num_generations=3), "step 2 took 6 sequences, expected exactly 4"),
        (groups_for(2, 1), "ordinal 0 was reserved for step 2, taken at step 1"),
        (
            groups_for(1, 1, 2),
            "ordinal 0 was sampled by version 2, but the learner at step 1 holds version 1",
        ),
    ],
)
def test_groups_that_do_not_fit_the_step_end_the_run(groups: list[PromptGroup], message: str) -> None:
    """P5, and bookkeeping of the buffer that the loop does not take on trust."""
    schedule = AsyncSchedule(max_num_steps=4)
    run = fake_run(schedule)
    with pytest.raises(GroupMismatchError, match=message):
        train(loop_settings(schedule), schedule, run.but(groups=ScriptedGroups(run, 1, groups)).parts)
    assert run.events[-1] == "take"


class BrokenPolicy(FakePolicy):
    """Meets a NaN in its `broken_epoch`-th update, before the optimizer step."""

    def __init__(self, order: StepOrder, *, broken_epoch: int) -> None:
        super().__init__(order)
        self._epochs_left = broken_epoch

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        self._epochs_left -= 1
        if self._epochs_left == 0:
            raise NonFiniteError("the loss is NaN", (4, 5))
        return super().update(minibatches)


class BrokenCritic(FakeCritic):
    def values(self, batch: TrainBatch) -> torch.Tensor:
        values_BT = super().values(batch)
        if self.num_optimizer_steps:
            values_BT[batch.ordinal_B == 3] = torch.nan
        return values_BT


class DistantPolicy(FakePolicy):
    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> torch.Tensor:
        logprobs_BT = super().logprobs(batch, temperature=temperature)
        if self.num_optimizer_steps:
            logprobs_BT[batch.ordinal_B == 2] = -torch.inf
        return logprobs_BT


@pytest.mark.parametrize(
    ("broken", "ordinals", "last_event"),
    [
        (lambda run: {"policy": BrokenPolicy(run.order, broken_epoch=3)}, (4, 5), "critic_update"),
        (lambda run: {"critic": BrokenCritic(run.order)}, (3,), "logprobs"),
        (lambda run: {"policy": DistantPolicy(run.order)}, (2,), "logprobs"),
        (
            lambda run: {"groups": ScriptedGroups(run, 1, groups_for(1, 1, reward=float("nan")))},
            (0, 1),
            "take",
        ),
    ],
    ids=["loss", "value", "log-prob", "reward"],
)
def test_a_number_that_is_not_finite_ends_the_run_with_step_and_ordinals_and_without_a_publish(
    broken: Callable[[FakeRun], dict[str, Any]], ordinals: tuple[int, ...], last_event: str
) -> None:
    schedule = AsyncSchedule(max_num_steps=5)
    run = fake_run(schedule, epochs=2)
    run = run.but(**broken(run))
    with pytest.raises(NonFiniteError, match=r"^step 2: ") as caught:
        train(loop_settings(schedule, ppo_epochs=2, checkpoint_period=2), schedule, run.parts)
    assert caught.value.ordinals == ordinals
    assert all(str(ordinal) in str(caught.value) for ordinal in ordinals) or last_event == "critic_update"
    assert run.events[-1] == last_event
    assert run.order.version == 1
    assert len(run.telemetry.rows) == 1
    assert "save" not in run.events


@pytest.mark.parametrize("part", ["refit", "groups", "validator"])
def test_the_error_of_a_part_ends_the_run_as_it_is_and_nothing_is_saved(part: str) -> None:
    schedule = AsyncSchedule(max_num_steps=5)
    run = fake_run(schedule)
    errors = {
        "refit": WeightMismatchError("engine 1 computes something else"),
        "groups": WaitTimeoutError("step 2 has 1 of 2 groups"),
        "validator": GroupMismatchError("sampled by weight versions [0, 1]"),
    }

    class Fails:
        def push(self, *, version: int) -> Mapping[str, float]:
            if version == 1:
                raise errors[part]
            return run.parts.refit.push(version=version)

        def take(self, *, target_step: int) -> list[PromptGroup]:
            raise errors[part]

        def open(self, *, step: int, frontier: int) -> None:
            run.parts.groups.open(step=step, frontier=frontier)

        def run(self, *, step: int) -> Mapping[str, float]:
            raise errors[part]

    plan = loop_settings(schedule, validation_period=1, checkpoint_period=1)
    with pytest.raises(type(errors[part])) as caught:
        train(plan, schedule, run.but(**{part: Fails()}).parts)
    assert caught.value is errors[part]
    assert "save" not in run.events and run.telemetry.rows == []


def test_truncated_responses_are_excluded_before_advantages_when_asked() -> None:
    schedule = AsyncSchedule(max_num_steps=1)
    ended = groups_for(0, 0, 0)[1]
    ended = replace(
        ended,
        trajectories=tuple(
            replace(t, completion=replace(t.completion, finish_reason="stop")) for t in ended.trajectories
        ),
    )
    masks = {}
    for overlong_filtering in (False, True):
        run = fake_run(schedule)
        groups = ScriptedGroups(run, 0, [groups_for(0, 0, 0)[0], ended])
        seen: list[TrainBatch] = []

        class Watched(FakeCritic):
            def update(self, minibatches: Sequence[TrainBatch], seen: list[TrainBatch] = seen) -> Any:
                seen.extend(minibatches)
                return super().update(minibatches)

        parts = run.but(groups=groups, critic=Watched(run.order)).parts
        train(loop_settings(schedule, overlong_filtering=overlong_filtering), schedule, parts)
        masks[overlong_filtering] = {
            ordinal: bool(kept)
            for minibatch in seen
            for ordinal, kept in zip(minibatch.ordinal_B.tolist(), minibatch.sample_mask_B, strict=True)
        }
    assert masks == {False: {0: True, 1: True}, True: {0: False, 1: True}}


def test_sequences_above_the_mismatch_threshold_are_masked_and_counted() -> None:
    schedule = AsyncSchedule(max_num_steps=1)
    run = fake_run(schedule)
    odd = groups_for(0, 0, 0)
    trajectory = odd[0].trajectories[0]
    far = replace(
        trajectory.completion,
        logprobs=trajectory.completion.logprobs[:1] + type(trajectory.completion.logprobs)("f", [-9.0]),
    )
    odd[0] = replace(odd[0], trajectories=(replace(trajectory, completion=far), trajectory))
    parts = run.but(groups=ScriptedGroups(run, 0, odd)).parts
    train(loop_settings(schedule, seq_logprob_error_threshold=2.0), schedule, parts)
    (row,) = run.telemetry.rows
    assert row["train/num_masked_seqs_by_logprob_error"] == 1.0
    # Of the whole step, not of a minibatch: 4 responses of 2 tokens, less the masked one.
    assert row["train/total_valid_tokens"] == 6.0


def test_metrics_of_the_last_epoch_are_the_steps() -> None:
    schedule = AsyncSchedule(max_num_steps=1)
    run = fake_run(schedule, epochs=3)
    train(loop_settings(schedule, ppo_epochs=3), schedule, run.parts)
    (row,) = run.telemetry.rows
    assert row["train/loss"] == row["train/critic/loss"] == 1 / 6  # after 3 epochs of 2 minibatches


class Killed(BaseException):
    """The process is gone: nothing of the package may catch it."""


def dying(after: int) -> Callable[..., StepOrder]:
    """Orders that let `after` calls happen and kill the process in the next."""

    class DyingOrder(StepOrder):
        def _record(self, event: str, argument: int) -> None:
            if len(self.events) == after:
                raise Killed
            super()._record(event, argument)

    return DyingOrder


def newest_checkpoint(folder: Path) -> int:
    return max((int(path.name.removeprefix("step_")) for path in folder.glob("step_*")), default=0)


def life(
    schedule: AsyncSchedule,
    plan: LoopSettings,
    folder: Path,
    work: WorkLog,
    *,
    dies_after: int | None = None,
    load_replay_buffer: bool = True,
    asynchronous: bool = False,
) -> FakeRun:
    """One process: resumes from `folder`, trains to the end or until it dies."""
    run = fake_run(
        schedule,
        epochs=plan.ppo_epochs,
        work=work,
        folder=folder,
        first_step=newest_checkpoint(folder),
        make_order=StepOrder if dies_after is None else dying(dies_after),
        load_replay_buffer=load_replay_buffer,
        asynchronous=asynchronous,
    )
    try:
        train(plan, schedule, run.parts)
    except Killed:
        assert dies_after is not None
    finally:
        run.collection.close()
    return run


small_schedules = schedules(max_age=3, max_start=4, max_lead=4, max_steps=6)


@settings(max_examples=15, deadline=None)
@given(schedule=small_schedules, epochs=st.integers(1, 2))
def test_a_resume_at_any_step_makes_the_calls_and_trains_the_groups_of_the_uninterrupted_run(
    schedule: AsyncSchedule, epochs: int
) -> None:
    plan = loop_settings(schedule, ppo_epochs=epochs, validation_period=2, checkpoint_period=1)
    with TemporaryDirectory() as folder:
        whole = life(schedule, plan, Path(folder), WorkLog())
        rows = whole.telemetry.rows
        for step in range(schedule.max_num_steps - 1, 0, -1):
            # Newest first, so that `step` is always the newest checkpoint that is left.
            _delete(Path(folder) / f"step_{step + 1}")
            resumed = life(schedule, replace(plan, checkpoint_period=0), Path(folder), WorkLog())
            assert resumed.work.steps == {k: v for k, v in whole.work.steps.items() if k >= step}
            assert resumed.telemetry.rows == rows[step:]
            first = whole.order.events.index(("take", step))
            rest = [event for event in whole.order.events[first:] if event[0] != "save"]
            assert resumed.order.events[:2] == [("push", schedule.version_at(step)), ("open", step)]
            assert resumed.order.events[2:] == rest


def _delete(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()


@settings(max_examples=25, deadline=None)
@given(
    schedule=small_schedules,
    period=st.integers(1, 3),
    deaths=st.lists(st.integers(0, 40), max_size=4),
    asynchronous=st.booleans(),
)
def test_kills_between_any_two_calls_change_nothing(
    schedule: AsyncSchedule, period: int, deaths: list[int], asynchronous: bool
) -> None:
    plan = loop_settings(schedule, checkpoint_period=period)
    with TemporaryDirectory() as folder:
        whole = life(schedule, plan, Path(folder), WorkLog())
    work = WorkLog()
    with TemporaryDirectory() as folder:
        for dies_after in deaths:
            life(schedule, plan, Path(folder), work, dies_after=dies_after, asynchronous=asynchronous)
        last = life(schedule, plan, Path(folder), work, asynchronous=asynchronous)
        assert newest_checkpoint(Path(folder)) == schedule.max_num_steps
    assert work.steps == whole.work.steps
    models = [(run.policy.num_optimizer_steps, run.critic.num_optimizer_steps) for run in (last, whole)]
    assert models[0] == models[1]


@settings(max_examples=25, deadline=None)
@given(
    schedule=small_schedules,
    deaths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    loses_file=st.booleans(),
)
def test_no_prompt_is_lost_or_trained_twice_when_the_finished_groups_are_not_restored(
    schedule: AsyncSchedule, deaths: list[int], loses_file: bool
) -> None:
    """R13: by choice, or because the file is missing."""
    plan = loop_settings(schedule, checkpoint_period=1)
    work = WorkLog()
    with TemporaryDirectory() as folder:
        for dies_after in [*deaths, None]:
            if loses_file:
                for path in Path(folder).glob("step_*/replay_buffer.json"):
                    path.unlink()
            life(schedule, plan, Path(folder), work, dies_after=dies_after, load_replay_buffer=loses_file)
    assert sorted(work.trained_ordinals()) == list(range(PROMPTS * schedule.max_num_steps))
    assert all(len(work.groups(step)) == PROMPTS for step in range(schedule.max_num_steps))
    assert all(len(group.trajectories) == GENERATIONS for group in work.groups(0))
