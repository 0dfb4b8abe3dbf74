"""A run that ends between two steps is saved first: asked to by a signal, or because a part of it died."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.loop.async_ppo import train
from megatron_ppo.protocol.errors import (
    CheckpointError,
    PartDiedError,
    RankZeroFailedError,
    RefitError,
    StopRequested,
    WaitTimeoutError,
    WeightMismatchError,
)
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.testing.loop_fakes import FakeCheckpoints
from tests.unit.loop.fake_run import FakeRun, WorkLog, fake_run, loop_settings
from tests.unit.loop.recording_device import Device, on_device

STEPS = 6
SCHEDULE = AsyncSchedule(max_num_steps=STEPS, max_trajectory_age_steps=1, policy_training_start_step=1)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class AskedAt:
    """`Parts.check_interrupted` that raises `error` when it is asked for the n-th time, counted from 0."""

    def __init__(self, number: int, error: Exception) -> None:
        self._number = number
        self._error = error
        self.asked = 0

    def __call__(self) -> None:
        self.asked += 1
        if self.asked > self._number:
            raise self._error


class FailingGroups:
    """A `GroupSource` that fails at one call: ("take", 3) or ("open", 3)."""

    def __init__(self, run: FakeRun, at: tuple[str, int], error: Exception) -> None:
        self._source = run.parts.groups
        self._at = at
        self._error = error

    def take(self, *, target_step: int) -> list[PromptGroup]:
        if self._at == ("take", target_step):
            raise self._error
        return self._source.take(target_step=target_step)

    def open(self, *, step: int, frontier: int) -> None:
        if self._at == ("open", step):
            raise self._error
        self._source.open(step=step, frontier=frontier)


class FailingRefit:
    """A `Refit` that fails at one version."""

    def __init__(self, run: FakeRun, version: int, error: Exception) -> None:
        self._refit = run.parts.refit
        self._order = run.order
        self._version = version
        self._error = error

    def push(self, *, version: int) -> Mapping[str, float]:
        if version == self._version:
            self._order.not_pushed(version)
            raise self._error
        return self._refit.push(version=version)


UNPUBLISHED = [
    RefitError("refit to version 2 failed while sending weights: no engine answered"),
    PartDiedError("engine replica 0 died"),
    WaitTimeoutError("waited 630 s for the engines to score"),
]


def kept(run: FakeRun) -> FakeCheckpoints:
    checkpoints = run.parts.checkpoints
    assert isinstance(checkpoints, FakeCheckpoints)
    return checkpoints


def run_until_it_ends(run: FakeRun, expected: type[Exception], **settings: Any) -> None:
    settings = {"checkpoint_period": 100, **settings}
    with pytest.raises(expected):
        train(loop_settings(SCHEDULE, **settings), SCHEDULE, run.parts)


def test_a_stop_in_a_step_ends_it_without_validation_with_its_row_and_a_checkpoint() -> None:
    run = fake_run(SCHEDULE)
    # Asked before and after every step: 0, 2, 4, … before, 1, 3, 5, … after.
    run = run.but(check_interrupted=AskedAt(5, StopRequested("SIGTERM")))
    run_until_it_ends(run, StopRequested, validation_period=1)
    assert run.events[-2:] == ["push", "save"]
    assert (kept(run).published, len(run.telemetry.rows)) == ([3], 3)
    assert run.events.count("validate") == 2


def test_a_stop_before_the_next_step_saves_the_step_that_is_done() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(4, StopRequested("SIGTERM")))
    run_until_it_ends(run, StopRequested)
    assert run.events[-2:] == ["open", "save"]
    assert (kept(run).published, len(run.telemetry.rows)) == ([2], 2)


def test_a_stop_while_the_learner_waits_for_groups_saves_the_step_that_is_done() -> None:
    run = fake_run(SCHEDULE)
    run = run.but(groups=FailingGroups(run, ("take", 2), StopRequested("SIGUSR1")))
    run_until_it_ends(run, StopRequested)
    assert (kept(run).published, len(run.telemetry.rows)) == ([2], 2)
    assert run.telemetry.running == set()


@pytest.mark.parametrize("at", [("take", 2), ("open", 2)])
@pytest.mark.parametrize("error", [PartDiedError("the collector died"), WaitTimeoutError("waited 600 s")])
def test_a_dead_part_that_is_met_between_steps_leaves_a_checkpoint_and_its_cause(
    at: tuple[str, int], error: Exception
) -> None:
    run = fake_run(SCHEDULE)
    run = run.but(groups=FailingGroups(run, at, error))
    run_until_it_ends(run, type(error))
    assert (kept(run).published, len(run.telemetry.rows)) == ([2], 2)


def test_a_step_that_is_saved_already_is_not_saved_again() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(4, StopRequested("SIGTERM")))
    run_until_it_ends(run, StopRequested, checkpoint_period=2)
    assert (run.events.count("save"), kept(run).published) == (1, [2])


def test_a_new_run_that_is_stopped_before_its_first_step_saves_nothing() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(0, StopRequested("SIGTERM")))
    run_until_it_ends(run, StopRequested)
    assert run.events == ["push", "open"]


def test_a_run_without_checkpoints_stays_without() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(5, StopRequested("SIGTERM")))
    run_until_it_ends(run, StopRequested, checkpoint_period=0)
    assert ("save" in run.events, len(run.telemetry.rows)) == (False, 3)


def test_a_run_that_has_done_its_last_step_is_finished_not_stopped() -> None:
    asked = AskedAt(2 * STEPS - 1, StopRequested("SIGTERM"))
    run = fake_run(SCHEDULE).but(check_interrupted=asked)
    assert train(loop_settings(SCHEDULE, checkpoint_period=100), SCHEDULE, run.parts) == STEPS
    assert asked.asked == 2 * STEPS - 1


def test_nobody_saves_when_rank_zero_failed_for_a_reason_of_its_own() -> None:
    run = fake_run(SCHEDULE)
    run = run.but(groups=FailingGroups(run, ("take", 2), RankZeroFailedError("rank 0 failed during take")))
    run_until_it_ends(run, RankZeroFailedError)
    assert "save" not in run.events


class FullDisk(FakeCheckpoints):
    def save(self, *, step: int, metrics: Any) -> dict[str, float]:
        raise CheckpointError(f"checkpoint {step} could not be written: No space left on device")


def test_a_stop_that_could_not_be_saved_is_a_failure_and_a_dead_part_stays_the_cause() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(4, StopRequested("SIGTERM")))
    run_until_it_ends(run.but(checkpoints=FullDisk(run.order)), CheckpointError)
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(4, died := PartDiedError("the collector died")))
    run_until_it_ends(run.but(checkpoints=FullDisk(run.order)), PartDiedError)
    assert any("could not be saved" in note for note in died.__notes__)


class ReportedFullDisk(FakeCheckpoints):
    """With checkpoint.on_save_error=warn."""

    def save(self, *, step: int, metrics: Any) -> dict[str, float]:
        self.overdue = True
        return {"checkpoint/failed_saves": 1.0}


def test_a_save_that_is_only_reported_as_failed_makes_the_stop_a_failure() -> None:
    run = fake_run(SCHEDULE).but(check_interrupted=AskedAt(4, StopRequested("SIGTERM")))
    run_until_it_ends(run.but(checkpoints=ReportedFullDisk(run.order)), CheckpointError)


@pytest.mark.parametrize("error", UNPUBLISHED)
def test_a_step_whose_weights_reach_no_engine_is_saved_as_complete_and_nothing_comes_after(
    error: Exception,
) -> None:
    run = fake_run(SCHEDULE)
    run = run.but(refit=FailingRefit(run, 2, error))  # step 1 trains the critic only, so of step 3
    run_until_it_ends(run, type(error), validation_period=1)
    assert run.events[-3:] == ["critic_update", "policy_update", "save"]
    assert (kept(run).published, len(run.telemetry.rows)) == ([3], 3)
    assert run.telemetry.running == set()


@pytest.mark.parametrize(
    "error", [WeightMismatchError("log-probs differ by nan nats"), RankZeroFailedError("rank 0 failed")]
)
def test_weights_that_may_be_wrong_are_not_saved_and_nothing_is_that_rank_zero_cannot_save(
    error: Exception,
) -> None:
    run = fake_run(SCHEDULE)
    run = run.but(refit=FailingRefit(run, 2, error))
    run_until_it_ends(run, type(error))
    assert "save" not in run.events


def test_weights_that_an_engine_in_the_wait_for_groups_does_not_get_end_the_run_with_the_step_before() -> (
    None
):
    run = fake_run(SCHEDULE)
    run = run.but(groups=FailingGroups(run, ("take", 3), UNPUBLISHED[0]))
    run_until_it_ends(run, RefitError)
    assert (kept(run).published, len(run.telemetry.rows)) == ([3], 3)


def test_the_policy_leaves_the_device_with_all_ranks_before_a_step_without_publication_is_saved(
    tmp_path: Path,
) -> None:
    device = Device()
    run = on_device(device, lambda wrap: fake_run(SCHEDULE, folder=tmp_path, wrap_store=wrap))
    run_until_it_ends(run.but(refit=FailingRefit(run, 2, UNPUBLISHED[0])), RefitError)
    assert device.notes[-6:] == [
        "load policy: optimizer,parameters", "save policy", "offload policy: optimizer,parameters",
        "load critic: optimizer,parameters", "save critic", "offload critic: optimizer,parameters",
    ]  # fmt: skip
    assert device.on == {} and device.left_alone == set()


@pytest.mark.parametrize("version", [1, 2, 4])
def test_a_run_whose_publication_failed_goes_on_exactly_where_it_was(tmp_path: Path, version: int) -> None:
    settings = loop_settings(SCHEDULE, checkpoint_period=100)
    whole, parted = WorkLog(), WorkLog()
    train(settings, SCHEDULE, fake_run(SCHEDULE, folder=tmp_path / "whole", work=whole).parts)
    first = fake_run(SCHEDULE, folder=tmp_path / "parted", work=parted)
    with pytest.raises(RefitError):
        train(settings, SCHEDULE, first.but(refit=FailingRefit(first, version, UNPUBLISHED[0])).parts)
    done = version + 1
    second = fake_run(SCHEDULE, first_step=done, folder=tmp_path / "parted", work=parted)
    assert train(settings, SCHEDULE, second.parts) == STEPS
    assert second.order.events[0] == ("push", version), "the version that reached nobody comes first"
    assert parted.steps == whole.steps


@pytest.mark.parametrize("number", [2, 3, 5, 6, 9])
@pytest.mark.parametrize("end", [StopRequested("SIGTERM"), PartDiedError("the collector died")])
def test_a_stopped_run_goes_on_exactly_where_it_was(tmp_path: Path, number: int, end: Exception) -> None:
    """Same prompts, same groups, same updates as a run that was never stopped."""

    def begin(folder: Path, work: WorkLog, step: int, **parts: Callable[[], None]) -> FakeRun:
        return fake_run(SCHEDULE, first_step=step, folder=folder, work=work).but(**parts)

    settings = loop_settings(SCHEDULE, checkpoint_period=100)
    whole, parted = WorkLog(), WorkLog()
    train(settings, SCHEDULE, begin(tmp_path / "whole", whole, 0).parts)
    with pytest.raises(type(end)):
        train(
            settings,
            SCHEDULE,
            begin(tmp_path / "parted", parted, 0, check_interrupted=AskedAt(number, end)).parts,
        )
    done = (number + 1) // 2
    assert train(settings, SCHEDULE, begin(tmp_path / "parted", parted, done).parts) == STEPS
    assert parted.steps == whole.steps


class Late(FakeCheckpoints):
    """Whose replay buffer does not answer: at a save, or already when it is to restore."""

    def __init__(self, run: FakeRun, where: str) -> None:
        super().__init__(run.order)
        self._where = where

    def restore(self) -> int:
        if self._where == "restore":
            raise WaitTimeoutError("waited 60 s for the replay buffer to restore")
        return super().restore()

    def save(self, *, step: int, metrics: Any) -> dict[str, float]:
        raise WaitTimeoutError("waited 60 s for the replay snapshot")


def failing_at(run: FakeRun, where: str, error: Exception) -> FakeRun:
    if where in ("save", "restore"):
        return run.but(checkpoints=Late(run, where))
    if where.startswith("push"):
        return run.but(refit=FailingRefit(run, int(where[-1]), error))
    what, step = where.split()
    return run.but(groups=FailingGroups(run, (what, int(step)), error))


@pytest.mark.parametrize(
    "where", ["restore", "push 0", "open 0", "take 0", "take 2", "push 2", "open 2", "save"]
)
@pytest.mark.parametrize("error", [UNPUBLISHED[0], UNPUBLISHED[2]])
def test_a_wait_without_success_is_explained_once_before_anything_else_happens(
    where: str, error: Exception
) -> None:
    run = fake_run(SCHEDULE)
    if where == "push 0":  # before the first step: nothing was trained
        run.order.not_pushed = lambda version: None  # type: ignore[method-assign]
    explained: list[tuple[Exception, int]] = []
    events = run.order.events
    ended = failing_at(run, where, error).but(explain=lambda e: explained.append((e, len(events))))
    with pytest.raises((RefitError, WaitTimeoutError)) as caught:
        train(loop_settings(SCHEDULE, checkpoint_period=1), SCHEDULE, ended.parts)
    assert [e for e, _ in explained] == [caught.value]
    assert [event for event, _ in events[explained[0][1] :]] in ([], ["save"]), "something came before it"


@pytest.mark.parametrize(
    "error", [PartDiedError("the collector died"), StopRequested("SIGTERM"), WeightMismatchError("differ")]
)
def test_what_says_its_own_cause_needs_no_explanation(error: Exception) -> None:
    run = fake_run(SCHEDULE)
    explained: list[Exception] = []
    run = run.but(groups=FailingGroups(run, ("take", 2), error), explain=explained.append)
    run_until_it_ends(run, type(error))
    assert explained == []
