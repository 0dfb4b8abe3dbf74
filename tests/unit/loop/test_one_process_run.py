"""The real loop, collector, buffer and checkpoints together, asynchronously, in one process."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.async_ppo import train
from megatron_ppo.loop.checkpoint_folder import Retention
from megatron_ppo.loop.checkpoints import RunCheckpoints
from megatron_ppo.protocol.errors import PartDiedError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.fakes import FakeEngine, prompt_ids
from megatron_ppo.testing.loop_fakes import FakeModelStore, FakePolicy, StepOrder
from tests.unit.loop.fake_run import (
    GENERATIONS,
    PROMPTS,
    FakeRun,
    WorkLog,
    fake_run,
    loop_settings,
    on_rank_zero,
)
from tests.unit.loop.one_process import LIMIT_S, LiveCollection, LiveRefit, live_collection

AGE_0 = AsyncSchedule(max_num_steps=6, max_trajectory_age_steps=0)
AGE_1 = AsyncSchedule(max_num_steps=8, max_trajectory_age_steps=1)
AGE_3 = AsyncSchedule(max_num_steps=8, max_trajectory_age_steps=3)
BANKED = AsyncSchedule(
    max_num_steps=10, max_trajectory_age_steps=1, policy_training_start_step=4, warmup_generation_lead_steps=3
)
SCHEDULES = {"age 0": AGE_0, "age 1": AGE_1, "age 3": AGE_3, "banked": BANKED}


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class WatchingPolicy(FakePolicy):
    """Does `look` in every update, while the learner is busy; `look` gets the step that is trained."""

    def __init__(self, order: StepOrder, look: Callable[[int], None]) -> None:
        super().__init__(order)
        self._look = look
        self.step = 0

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        self._look(self.step)
        self.step += 1
        return super().update(minibatches)


def live_run(collection: LiveCollection, run: FakeRun) -> FakeRun:
    return run.but(groups=collection, refit=LiveRefit(run.order, collection))


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {what}"
        time.sleep(0.001)


def bare_run(schedule: AsyncSchedule) -> FakeRun:
    run = fake_run(schedule)
    run.collection.close()  # replaced by a live one
    return run


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_every_prompt_is_trained_exactly_once_and_never_older_than_allowed(schedule: AsyncSchedule) -> None:
    run = bare_run(schedule)
    engine = FakeEngine(token_latency_s=0.0005)
    with live_collection(run.order, schedule=schedule, work=run.work, engine=engine) as collection:
        train(loop_settings(schedule), schedule, live_run(collection, run).parts)
        counters = collection.status().counters
    steps = schedule.max_num_steps
    assert sorted(run.work.trained_ordinals()) == list(range(steps * PROMPTS))
    for step in range(steps):
        groups = run.work.groups(step)
        assert len(groups) == PROMPTS
        for group in groups:
            assert schedule.oldest_version_for(step) <= group.min_version
            assert group.max_version <= schedule.version_at(step)
    # The gate is the reservation, not a sieve: nothing was generated in vain.
    assert (counters.stale_commits, counters.late_commits, counters.evicted) == (0, 0, 0)
    assert counters.committed == counters.trained == steps * PROMPTS
    assert len(engine.requests) == steps * PROMPTS


def test_at_age_one_the_next_step_is_generated_while_this_one_is_trained() -> None:
    """Each update waits until the groups of the next step are complete: without overlap it would wait for ever."""
    schedule = AGE_1
    run = bare_run(schedule)
    engine = FakeEngine(token_latency_s=0.0005)
    with live_collection(run.order, schedule=schedule, work=run.work, engine=engine) as collection:

        def look(step: int) -> None:
            if step + 1 < schedule.max_num_steps:
                wait_until(
                    lambda: collection.status().ready.get(step + 1) == PROMPTS,
                    f"the groups of step {step + 1}",
                )

        live = live_run(collection, run).but(policy=WatchingPolicy(run.order, look))
        train(loop_settings(schedule), schedule, live.parts)
    rows = run.telemetry.rows
    assert [row["age/max_versions"] for row in rows] == [0.0] + [1.0] * (schedule.max_num_steps - 1)
    assert all(row["age/mixed_versions_rate"] == 0.0 for row in rows)


def test_at_age_zero_nothing_is_generated_while_the_learner_trains() -> None:
    schedule = AGE_0
    run = bare_run(schedule)
    engine = FakeEngine()
    busy: list[object] = []
    with live_collection(run.order, schedule=schedule, work=run.work, engine=engine) as collection:

        def look(step: int) -> None:
            time.sleep(0.06)  # three times as long as one request for slots waits
            status = collection.status()
            busy.append((engine.num_running, status.reserved, status.ready))

        live = live_run(collection, run).but(policy=WatchingPolicy(run.order, look))
        train(loop_settings(schedule), schedule, live.parts)
    assert busy == [(0, {}, {})] * schedule.max_num_steps
    assert all(
        row["age/max_versions"] == row["train/avg_trajectory_age"] == 0.0 for row in run.telemetry.rows
    )


def test_warm_up_banks_as_far_ahead_as_its_lead_and_no_further() -> None:
    """W = 4, A = 1, L = 3: while step 0 is trained, steps 1 to 3 fill up; while step 4 is, step 5 only."""
    run = bare_run(BANKED)
    banked: dict[int, list[int]] = {}
    with live_collection(run.order, schedule=BANKED, work=run.work, engine=FakeEngine()) as collection:

        class Patient(type(run.critic)):  # type: ignore[misc]
            step = 0

            def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
                frontier = BANKED.frontier(self.step)
                ahead = dict.fromkeys(range(self.step + 1, frontier + 1), PROMPTS)
                wait_until(lambda: collection.status().ready == ahead, f"{ahead} at step {self.step}")
                banked[self.step] = sorted(ahead)
                self.step += 1
                metrics: Mapping[str, float] = super().update(minibatches)
                return metrics

        live = live_run(collection, run).but(critic=Patient(run.order, run.work))
        train(loop_settings(BANKED), BANKED, live.parts)
    assert banked[0] == [1, 2, 3]
    assert banked[2] == [3, 4, 5]
    assert banked[4] == [5]
    assert banked[9] == []
    ages = [row["train/avg_trajectory_age"] for row in run.telemetry.rows]
    assert ages == [0, 1, 2, 3, 3, 3, 1, 1, 1, 1]


def test_a_version_published_under_running_requests_is_seen_in_their_spans() -> None:
    """In-flight updates. Groups of the next step start when groups of this one have ended and run for 0.3 s; an update
    of 0.1 s ends in the middle of them, when they have sampled some of their tokens.
    """
    schedule = AsyncSchedule(max_num_steps=5, max_trajectory_age_steps=1)
    run = bare_run(schedule)

    class Slow(type(run.policy)):  # type: ignore[misc]
        def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
            time.sleep(0.1)
            metrics: Mapping[str, float] = super().update(minibatches)
            return metrics

    engine = FakeEngine(token_latency_s=0.05, length_of=lambda _, limit: limit)
    with live_collection(run.order, schedule=schedule, work=run.work, engine=engine) as collection:
        live = live_run(collection, run).but(policy=Slow(run.order, run.work))
        train(loop_settings(schedule), schedule, live.parts)
    assert max(row["age/mixed_versions_rate"] for row in run.telemetry.rows) > 0.0
    assert all(row["age/max_versions"] <= 1.0 for row in run.telemetry.rows)
    assert sorted(run.work.trained_ordinals()) == list(range(schedule.max_num_steps * PROMPTS))


class Killed(BaseException):
    """The process is gone: nothing of the package may catch it."""


class KilledAfterSave:
    """Real checkpoints of a process that dies as soon as the one of `step` has appeared."""

    def __init__(self, real: RunCheckpoints, step: int | None) -> None:
        self._real = real
        self._step = step
        self._saved = 0

    def restore(self) -> int:
        return self._real.restore()

    @property
    def overdue(self) -> bool:
        return self._real.overdue

    def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self._saved = step
        return self._real.save(step=step, metrics=metrics)

    def publish(self, *, wait: bool = False) -> None:
        self._real.publish(wait=wait)
        if self._saved == self._step:
            raise Killed


def one_life(
    schedule: AsyncSchedule,
    folder: Path,
    work: WorkLog,
    *,
    first_step: int,
    dies_after: int | None,
    engine: FakeEngine | None = None,
    limit: int = 0,
    policy: Callable[[StepOrder, FakeEngine], FakePolicy] | None = None,
    **changes: Any,
) -> LiveCollection:
    order = StepOrder(schedule=schedule, ppo_epochs=1, first_step=first_step)
    run = fake_run(schedule, work=work, make_order=lambda **_: order)
    run.collection.close()
    # A fresh engine serves version 0 until the first publish, as a real one does.
    engine = engine or FakeEngine(token_latency_s=0.0005)
    options = {"max_retries": 0, "max_generation_failures": limit}
    with live_collection(order, schedule=schedule, work=work, engine=engine, **options) as collection:
        real = RunCheckpoints(
            **{
                "folder": folder,
                "resume": True,
                "retention": Retention(keep=1, keep_best=1, metric=None, higher_is_better=True),
                "identity": {},
                "load_replay_buffer": True,
                "models": FakeModelStore(policy=run.policy, critic=run.critic),
                "replay": collection,
                "version_at": schedule.version_at,
                "on_rank_zero": on_rank_zero,
                **changes,
            }
        )
        live = live_run(collection, run).but(checkpoints=KilledAfterSave(real, dies_after))
        if policy is not None:
            live = live.but(policy=policy(order, engine))
        try:
            train(loop_settings(schedule, checkpoint_period=1), schedule, live.parts)
        except Killed:
            assert dies_after is not None
    return collection


@pytest.mark.parametrize("load_replay_buffer", [True, False], ids=["restored", "generated again"])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_run_killed_twice_trains_every_prompt_exactly_once(
    tmp_path: Path, schedule: AsyncSchedule, load_replay_buffer: bool
) -> None:
    work = WorkLog()
    first_step = 0
    for dies_after in (2, 5, None):
        one_life(
            schedule,
            tmp_path,
            work,
            first_step=first_step,
            dies_after=dies_after,
            load_replay_buffer=load_replay_buffer,
        )
        first_step = dies_after or 0
    assert sorted(work.steps) == list(range(schedule.max_num_steps))
    assert sorted(work.trained_ordinals()) == list(range(schedule.max_num_steps * PROMPTS))
    assert all(len(group.trajectories) == GENERATIONS for step in work.steps for group in work.groups(step))


@pytest.mark.parametrize("schedule", [AGE_0, AGE_1], ids=["age 0", "age 1"])
def test_a_prompt_that_never_works_is_dropped_also_if_nothing_else_is_left_to_do_for_its_step(
    tmp_path: Path, schedule: AsyncSchedule
) -> None:
    """Its step is filled from the next ordinal, and the run neither ends of it nor waits for it."""
    work = WorkLog()
    engine = FakeEngine(token_latency_s=0.0005)
    hopeless = PROMPTS - 1
    engine.failing.add(tuple(prompt_ids(hopeless)))
    one_life(schedule, tmp_path, work, first_step=0, dies_after=None, engine=engine, limit=2)
    expected = [q for q in range(schedule.max_num_steps * PROMPTS + 1) if q != hopeless]
    assert sorted(work.trained_ordinals()) == expected
    snapshot = json.loads(next(tmp_path.glob("step_*/replay_buffer.json")).read_text())
    assert list(snapshot["dropped"]) == [str(hopeless)]


def test_a_run_that_ended_of_failures_in_a_row_is_saved_and_goes_on_with_a_higher_limit(
    tmp_path: Path,
) -> None:
    """However often it was tried in between: no prompt is dropped because the processes do not work."""
    work = WorkLog()

    class Breaking(FakePolicy):
        """Breaks the engine in the update of the fourth step."""

        def __init__(self, order: StepOrder, engine: FakeEngine) -> None:
            super().__init__(order)
            self._engine = engine
            self._updates = 0

        def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
            self._updates += 1
            if self._updates == 4:
                self._engine.fail_next(10**6)
            return super().update(minibatches)

    ended = pytest.raises(
        PartDiedError, match=r"\d in a row, of ordinals \[8, 9, 10.*max_generation_failures=2.*told to fail"
    )
    with ended:
        one_life(AGE_0, tmp_path, work, first_step=0, dies_after=None, limit=2, policy=Breaking)
    assert (tmp_path / "latest").read_text() == "step_4"
    for _ in range(3):
        broken = FakeEngine()
        broken.fail_next(10**6)
        with ended:
            one_life(AGE_0, tmp_path, work, first_step=4, dies_after=None, limit=2, engine=broken)
    recovering = FakeEngine()
    recovering.fail_next(7)
    one_life(AGE_0, tmp_path, work, first_step=4, dies_after=None, limit=20, engine=recovering)
    assert sorted(work.trained_ordinals()) == list(range(AGE_0.max_num_steps * PROMPTS))


def test_a_dead_engine_ends_the_loop_with_ordinal_step_and_cause() -> None:
    schedule = AGE_1
    run = bare_run(schedule)
    engine = FakeEngine()
    with live_collection(run.order, schedule=schedule, work=run.work, engine=engine) as collection:

        def look(step: int) -> None:
            if step == 2:
                engine.die("engine core was killed")

        live = live_run(collection, run).but(policy=WatchingPolicy(run.order, look))
        with pytest.raises(
            PartDiedError, match=r"prompt ordinal \d+ for step \d: EngineDeadError: engine core"
        ):
            train(loop_settings(schedule), schedule, live.parts)
