"""Rank 0's side of the actors with real Ray: the watch over them, its calls, and the learner's group source."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ppo.loop.async_ppo import train
from megatron_ppo.protocol.errors import GroupMismatchError, PartDiedError, WaitTimeoutError
from megatron_ppo.testing.fakes import make_group
from tests.contract import group_source
from tests.contract.group_source import GENERATIONS, PROMPTS, SCHEDULE
from tests.unit.loop.fake_run import fake_run, loop_settings

if TYPE_CHECKING:
    from megatron_ppo.ray_actors.rank0 import RayGroupSource, Supervisor

pytestmark = [pytest.mark.ray]

CALL_S = 60.0  # starting an actor takes seconds of CPU time, more on a loaded machine
NOTICE_S = 15.0  # the promise: from a death to the end of the run


def dummy_process() -> type:
    """A process with one call that never ends. Defined in a function, so that it travels by value."""

    class Dummy:
        def __init__(self) -> None:
            self._end = asyncio.Event()
            self._error: Exception | None = None

        async def watch(self) -> None:
            await self._end.wait()
            if self._error is not None:
                raise self._error

        async def sleep(self, seconds: float) -> str:
            await asyncio.sleep(seconds)
            return "slept"

        async def fail(self, error: Exception) -> None:
            raise error

        async def end_watch(self, error: Exception | None) -> None:
            self._error = error
            self._end.set()

        async def pause(self) -> None:
            """As the collector has it."""

        async def resume(self) -> None:
            """As the collector has it."""

    return Dummy


@pytest.fixture(scope="module")
def bystander(cluster: Path) -> Any:
    """A process that stays alive."""
    return start_dummy()


def start_dummy() -> Any:
    import ray

    return ray.remote(num_cpus=0, max_concurrency=100)(dummy_process()).remote()


def pid_of(actor: Any) -> int:
    import ray

    return int(ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=CALL_S))


@pytest.fixture
def supervisor(cluster: Path) -> Iterator[Supervisor]:
    from megatron_ppo.ray_actors.rank0 import Supervisor

    running = Supervisor()
    yield running
    running.stop()


def test_a_killed_actor_is_raised_in_whatever_the_main_thread_waits_for(
    supervisor: Supervisor, bystander: Any
) -> None:
    victim = start_dummy()
    pid = pid_of(victim)
    supervisor.watch({victim.watch.remote(): "engine 1", bystander.watch.remote(): "the collector"})
    supervisor.raise_if_failed()
    waiting = bystander.sleep.remote(300)
    os.kill(pid, signal.SIGKILL)
    killed = time.monotonic()
    with pytest.raises(PartDiedError, match=r"^engine 1 died: "):
        supervisor.call(waiting, what="the groups of step 3", timeout_s=CALL_S)
    assert time.monotonic() - killed < NOTICE_S
    with pytest.raises(PartDiedError, match=r"^engine 1 died: "):
        supervisor.raise_if_failed()


def test_after_a_death_the_step_goes_on_until_somebody_asks_and_the_first_death_is_the_cause(
    supervisor: Supervisor, bystander: Any
) -> None:
    first, second = start_dummy(), start_dummy()
    pids = [pid_of(first), pid_of(second)]
    supervisor.watch({first.watch.remote(): "the replay buffer", second.watch.remote(): "the collector"})
    os.kill(pids[0], signal.SIGKILL)
    with pytest.raises(PartDiedError, match=r"^the replay buffer died: "):
        supervisor.call(bystander.sleep.remote(300), what="the window to open", timeout_s=CALL_S)
    os.kill(pids[1], signal.SIGKILL)
    waiting = bystander.sleep.remote(1.5)
    assert supervisor.call(waiting, what="a nap", timeout_s=CALL_S, despite_failure=True) == "slept"
    with pytest.raises(PartDiedError, match=r"^the replay buffer died: "):
        supervisor.raise_if_failed()


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no such prompt"), "^the collector died: ValueError: no such prompt$"),
        (None, "^the collector died: it ended by itself$"),
    ],
)
def test_a_watched_call_that_ends_is_a_death_with_its_cause(
    supervisor: Supervisor, bystander: Any, error: Exception | None, message: str
) -> None:
    subject = start_dummy()
    supervisor.watch({subject.watch.remote(): "the collector"})
    subject.end_watch.remote(error)
    with pytest.raises(PartDiedError, match=message):
        supervisor.call(bystander.sleep.remote(300), what="the window to open", timeout_s=CALL_S)


def test_a_call_to_a_dead_process_says_what_was_asked_of_it(supervisor: Supervisor, cluster: Path) -> None:
    victim = start_dummy()
    pid = pid_of(victim)
    waiting = victim.sleep.remote(300)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(PartDiedError, match="the replay snapshot: the process behind it died"):
        supervisor.call(waiting, what="the replay snapshot", timeout_s=CALL_S)


def test_a_call_returns_its_result_raises_its_own_error_or_names_what_was_waited_for(
    supervisor: Supervisor, bystander: Any
) -> None:
    import ray

    call = supervisor.call
    assert call(bystander.sleep.remote(0.0), what="a nap", timeout_s=CALL_S) == "slept"
    with pytest.raises(GroupMismatchError, match=r"^step 3 was taken already$"):
        error = GroupMismatchError("step 3 was taken already")
        call(bystander.fail.remote(error), what="the groups", timeout_s=CALL_S)
    with pytest.raises(ray.exceptions.RayTaskError, match="KeyError"):
        call(bystander.fail.remote(KeyError("x")), what="the groups", timeout_s=CALL_S)
    started = time.monotonic()
    with pytest.raises(WaitTimeoutError, match=r"^waited 1 s for the window to open$"):
        call(bystander.sleep.remote(300), what="the window to open", timeout_s=1)
    assert 1.0 <= time.monotonic() - started < NOTICE_S


def test_processes_that_are_ended_on_purpose_are_no_failure(supervisor: Supervisor, cluster: Path) -> None:
    victim = start_dummy()
    pid = pid_of(victim)
    supervisor.watch({victim.watch.remote(): "engine 0"})
    supervisor.stop()
    os.kill(pid, signal.SIGKILL)
    time.sleep(2.5)  # twice the period of the watch
    supervisor.raise_if_failed()


# The learner's group source over a real replay actor


@pytest.fixture
def replay(cluster: Path) -> Iterator[Any]:
    import ray

    from megatron_ppo.ray_actors.replay_actor import ReplayActor
    from megatron_ppo.telemetry.run_dir import RunDirectory

    directory = RunDirectory(path=cluster)
    actor = ReplayActor.remote(
        schedule=SCHEDULE,
        num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=GENERATIONS,
        log_path=str(cluster / "replay.log"),
        ledger_path=str(directory.ledger_path),
        heartbeat_path=str(directory.heartbeat_path("replay_buffer")),
    )
    yield actor
    ray.kill(actor)
    directory.ledger_path.unlink()  # the next buffer begins a run of its own


def source_over(replay: Any, supervisor: Supervisor, *, groups_timeout_s: float = CALL_S) -> RayGroupSource:
    from megatron_ppo.ray_actors.rank0 import RankZero, RayGroupSource

    return RayGroupSource(
        rank_zero=RankZero(rank=0, world_size=1, group=None),
        supervisor=supervisor,
        replay=replay,
        groups_timeout_s=groups_timeout_s,
    )


def fill(replay: Any, version: int, *, limit: int = 1000, finished: int | None = None) -> None:
    """What a collector does, at once; of the groups that it begins it finishes the first `finished`, or all."""
    import ray

    slots = ray.get(replay.reserve.remote(limit=limit, timeout_s=0.0), timeout=CALL_S)
    for slot in slots[:finished]:
        group = make_group(
            ordinal=slot.ordinal,
            target_step=slot.target_step,
            opened_at_step=slot.opened_at_step,
            versions=(version, version),
            num_generations=GENERATIONS,
        )
        ray.get(replay.commit.remote(group), timeout=CALL_S)


@pytest.mark.parametrize("check", group_source.CHECKS)
def test_the_source_over_ray_keeps_the_contract_of_group_sources(
    replay: Any, supervisor: Supervisor, check: Callable[[group_source.Subject], None]
) -> None:
    subject = group_source.Subject(
        source=source_over(replay, supervisor),
        fill=lambda version: fill(replay, version),
        learn=lambda step: None,
    )
    check(subject)


def test_a_take_that_waits_too_long_says_what_is_missing_who_lives_and_where_it_waited(
    replay: Any, supervisor: Supervisor, cluster: Path
) -> None:
    """As a run ends that gets no groups: the real loop, source, buffer, ledger and signs of life."""
    from megatron_ppo.app.diagnosis import explain
    from megatron_ppo.telemetry.run_dir import RunDirectory

    source = source_over(replay, supervisor, groups_timeout_s=3.0)

    class OneGroupOnly:
        take = source.take

        def open(self, *, step: int, frontier: int) -> None:
            source.open(step=step, frontier=frontier)
            fill(replay, 0, limit=PROMPTS, finished=1)

    supervisor.watch({replay.watch.remote(): "the replay buffer"})
    directory = RunDirectory(path=cluster)
    parts = (
        fake_run(SCHEDULE).but(groups=OneGroupOnly(), explain=lambda error: explain(error, directory)).parts
    )
    with pytest.raises(WaitTimeoutError) as caught:
        train(loop_settings(SCHEDULE), SCHEDULE, parts)
    assert "step 1 has no complete set of groups after" in str(caught.value)
    assert "cluster.groups_timeout_s is 3" in str(caught.value)
    assert f"step 0 has 1 of {PROMPTS} groups" in str(caught.value)
    [note] = caught.value.__notes__
    assert "replay_buffer: process" in note
    prompts = [line for line in note.splitlines() if line.startswith("  ordinal ")]
    assert len(prompts) == PROMPTS and "committed" in prompts[0] and "dispatched" in prompts[1]
    assert "in take" in note and "in _poll" in note.partition("stack of the wait:")[2]


def test_a_collector_that_reported_its_death_ends_a_waiting_take(replay: Any, supervisor: Supervisor) -> None:
    source = source_over(replay, supervisor)
    source.open(step=0, frontier=SCHEDULE.frontier(0))
    threading.Timer(0.5, lambda: replay.fail.remote("reward of ordinal 3 is NaN")).start()
    with pytest.raises(PartDiedError, match="the collector stopped: reward of ordinal 3 is NaN"):
        source.take(target_step=0)


def test_groups_that_come_although_the_collector_has_died_are_handed_out(
    replay: Any, supervisor: Supervisor
) -> None:
    """They count as trained, so they must be: the run ends after their step."""
    victim = start_dummy()
    pid = pid_of(victim)
    supervisor.watch({victim.watch.remote(): "the collector"})
    source = source_over(replay, supervisor)
    source.open(step=0, frontier=SCHEDULE.frontier(0))
    asked = threading.Thread(target=lambda: (time.sleep(0.3), os.kill(pid, signal.SIGKILL), fill(replay, 0)))
    asked.start()
    assert len(source.take(target_step=0)) == PROMPTS
    asked.join()
    with pytest.raises(PartDiedError, match=r"^the collector died: "):
        deadline = time.monotonic() + NOTICE_S
        while time.monotonic() < deadline:
            supervisor.raise_if_failed()


def test_the_snapshot_of_a_dead_buffer_is_the_position_of_the_last_take(
    replay: Any, supervisor: Supervisor, cluster: Path
) -> None:
    import ray

    from megatron_ppo.ray_actors.rank0 import KnownPosition, RankZero, RayGroupSource, RayReplaySnapshots
    from megatron_ppo.replay.state import from_json

    collector, position = start_dummy(), KnownPosition()
    snapshots = RayReplaySnapshots(
        supervisor=supervisor, replay=replay, collector=collector, position=position
    )
    source = RayGroupSource(
        rank_zero=RankZero(rank=0, world_size=1, group=None),
        supervisor=supervisor,
        replay=replay,
        groups_timeout_s=CALL_S,
        position=position,
    )
    source.open(step=0, frontier=SCHEDULE.frontier(0))
    fill(replay, 0)
    groups = source.take(target_step=0)
    ray.kill(collector)
    whole = from_json(snapshots.snapshot())  # without a collector that could be held still
    assert whole.lowest_unfinished == 1 and len(whole.groups) > 0
    ray.kill(replay)
    left = from_json(snapshots.snapshot())
    assert (left.lowest_unfinished, left.groups, left.ledger) == (1, (), whole.ledger)
    with pytest.raises(PartDiedError, match="groups of step 1"):
        source.take(target_step=1)
    assert {group.ordinal for group in groups} == set(range(PROMPTS))


def recorder() -> Any:
    """Collector and replay buffer in one process, which therefore knows in what order it was asked."""
    import ray

    @ray.remote(num_cpus=0, max_concurrency=10)
    class Recorder:
        def __init__(self) -> None:
            self.events: list[str] = []
            self.refuses = False

        async def pause(self) -> None:
            self.events.append("asked to pause")
            await asyncio.sleep(0.3)  # a collector may still be dispatching when it is asked
            if self.refuses:
                raise WaitTimeoutError("waited 25 s for the collector to pause")
            self.events.append("holds still")

        async def resume(self) -> None:
            self.events.append("goes on")

        async def snapshot(self) -> str:
            self.events.append("snapshot")
            return "{}"

        async def refuse(self) -> None:
            self.refuses = True

        async def seen(self) -> list[str]:
            events, self.events = self.events, []
            return events

    return Recorder.remote()


def test_the_collector_holds_still_from_its_acknowledgement_to_the_end_of_the_snapshot(
    supervisor: Supervisor, cluster: Path
) -> None:
    import ray

    from megatron_ppo.ray_actors.rank0 import RayReplaySnapshots

    both = recorder()
    snapshots = RayReplaySnapshots(supervisor=supervisor, replay=both, collector=both)
    try:
        for _ in range(2):
            assert snapshots.snapshot() == "{}"
            assert ray.get(both.seen.remote(), timeout=CALL_S) == [
                "asked to pause",
                "holds still",
                "snapshot",
                "goes on",
            ]
        # One that does not acknowledge is not waited for any longer: the buffer's snapshot is of one instant anyway.
        ray.get(both.refuse.remote(), timeout=CALL_S)
        assert snapshots.snapshot() == "{}"
        deadline, seen = time.monotonic() + NOTICE_S, []
        while "goes on" not in seen and time.monotonic() < deadline:
            seen += ray.get(both.seen.remote(), timeout=CALL_S)
        assert seen == ["asked to pause", "snapshot", "goes on"]
    finally:
        ray.kill(both)


def test_groups_of_a_late_answer_are_not_lost(
    cluster: Path, supervisor: Supervisor, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    from megatron_ppo.ray_actors import rank0

    @ray.remote(num_cpus=0, max_concurrency=10)
    class LateReplay:
        """Takes the groups at once and answers late, as on a machine that swaps; a second `take` is an error."""

        def __init__(self) -> None:
            self.calls = 0

        def take_with_position(self, *, target_step: int, timeout_s: float) -> tuple[list[str], str]:
            self.calls += 1
            if self.calls > 1:
                raise GroupMismatchError(f"target step {target_step} cannot be consumed again")
            time.sleep(2.0)
            return ["group"], "{}"

    monkeypatch.setattr(rank0, "ANSWER_GRACE_S", 0.5 - rank0.POLL_S)
    replay = LateReplay.remote()
    try:
        assert source_over(replay, supervisor).take(target_step=3) == ["group"]
    finally:
        ray.kill(replay)
