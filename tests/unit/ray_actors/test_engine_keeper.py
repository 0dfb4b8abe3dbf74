"""The keeper rebuilds what dies, as often as it may, and stops when it is told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from megatron_ppo.protocol.errors import WaitTimeoutError
from megatron_ppo.protocol.replicas import Member, ReplicaState, ReplicaTable
from megatron_ppo.ray_actors import engine_keeper
from megatron_ppo.ray_actors.engine_keeper import EngineKeeper
from megatron_ppo.ray_actors.liveness import LivenessLimits

LONG_S = 20.0


class Asked:
    def __init__(self, answered: bool) -> None:
        self.answered = answered


class Engines:
    """`Rebuildable` with engines that die when told to.

    Attributes:
        hanging: replicas that answer nothing until they are killed.   killed: what was killed, in order.
    """

    def __init__(self, *, replicas: int, max_restarts: int) -> None:
        self.table = ReplicaTable(replicas=replicas, max_restarts=max_restarts)
        for replica in range(replicas):
            self.table.built(replica)
        self.rebuilds: list[int] = []
        self.hanging: set[int] = set()
        self.asked: list[int] = []
        self.killed: list[Member] = []
        self.failing_rebuilds = 0
        self.may_finish = threading.Event()
        self.may_finish.set()
        self._deaths: dict[Member, str] = {}
        self._changed = threading.Condition()

    def kill(self, replica: int, cause: str) -> None:
        with self._changed:
            self._deaths[self.table.member(replica)] = cause
            self._changed.notify_all()

    def wait_for_death(self, member: Member, *, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: member in self._deaths, timeout_s)
            return self._deaths.get(member)

    def ask(self, member: Member) -> Asked:
        self.asked.append(member.replica)
        return Asked(answered=member.replica not in self.hanging)

    def kill_all(self, member: Member) -> None:
        assert self.table.deaths, "it is told before it is done"
        self.killed.append(member)
        self.hanging.discard(member.replica)

    def rebuild(self, replica: int, *, stopping: Callable[[], bool]) -> None:
        self.rebuilds.append(replica)
        while not self.may_finish.wait(0.01):
            if stopping():
                return
        if self.failing_rebuilds:
            self.failing_rebuilds -= 1
            raise WaitTimeoutError("no memory is left")


class Scene:
    def __init__(self, *, replicas: int = 2, max_restarts: int = 3, misses: int = 2) -> None:
        self.engines = Engines(replicas=replicas, max_restarts=max_restarts)
        self.given_up: list[str] = []
        self.keeper = EngineKeeper(
            engines=self.engines,
            give_up=self.given_up.append,
            liveness=LivenessLimits(deadline_s=0.05, misses=misses) if misses else None,
        )
        self.keeper.start()

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LONG_S
        while not condition():
            assert time.monotonic() < deadline, self.engines.table.describe()
            time.sleep(0.002)


@pytest.fixture
def scene(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Scene]]:
    monkeypatch.setattr(engine_keeper, "LOOK_S", 0.01)
    made: list[Scene] = []

    def make(**settings: int) -> Scene:
        made.append(Scene(**settings))
        return made[-1]

    yield make
    for each in made:
        each.keeper.stop()


def test_a_dead_replica_is_built_again_and_then_waits_for_weights(scene: Callable[..., Scene]) -> None:
    run = scene()
    table = run.engines.table
    run.engines.kill(1, "its core was killed")
    run.until(lambda: table.deaths == 1 and bool(table.statuses()[1].state is ReplicaState.STALE))
    assert run.engines.rebuilds == [1] and run.given_up == []
    assert table.statuses()[0].deaths == 0


def test_a_death_that_the_main_thread_noticed_is_repaired_as_well(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1)
    table = run.engines.table
    table.died(table.member(0), "a call has failed")
    run.until(lambda: table.statuses()[0].state is ReplicaState.STALE)
    assert run.engines.rebuilds == [0] and table.deaths == 1


def test_a_serving_replica_that_hangs_is_killed_and_goes_the_road_of_the_dead(
    scene: Callable[..., Scene],
) -> None:
    run = scene()
    table, engines = run.engines.table, run.engines
    table.serving(table.live(), version=4)
    run.until(lambda: set(engines.asked) == {0, 1})
    engines.hanging.add(1)
    run.until(lambda: table.statuses()[1].state is ReplicaState.STALE)
    assert (engines.rebuilds, engines.killed) == ([1], [Member(replica=1, deaths=0)])
    assert [status.deaths for status in table.statuses()] == [0, 1]
    assert table.statuses()[0].state is ReplicaState.HEALTHY
    table.serving(table.live(), version=4)
    engines.hanging.add(1)
    run.until(lambda: table.statuses()[1].deaths == 2)
    run.until(lambda: engines.killed[1:] == [Member(replica=1, deaths=1)])


def test_the_last_restart_is_not_given_to_a_replica_that_hangs_once_more(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1, max_restarts=0)
    run.engines.table.serving(run.engines.table.live(), version=4)
    run.engines.hanging.add(0)
    run.until(lambda: bool(run.given_up))
    assert run.given_up[0].startswith("engine replica 0 died: it hangs: its core has left 2 questions")
    assert run.engines.killed == [Member(replica=0, deaths=0)] and run.engines.rebuilds == []


def test_nobody_is_asked_who_takes_part_in_a_transfer(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1)
    table, engines = run.engines.table, run.engines
    run.until(lambda: len(engines.asked) == 1)
    table.in_transfer(table.live())
    engines.hanging.add(0)  # as far as anybody can tell
    time.sleep(0.3)
    assert table.deaths == 0 and len(engines.asked) <= 2
    engines.hanging.clear()
    table.serving(table.live(), version=4)
    asked = len(engines.asked)
    run.until(lambda: len(engines.asked) > asked)
    assert table.deaths == 0


def test_an_engine_that_hangs_while_a_refit_waits_for_its_requests_is_killed(
    scene: Callable[..., Scene],
) -> None:
    run = scene(replicas=2)
    table, engines = run.engines.table, run.engines
    table.serving(table.live(), version=4)
    # A group is formed anew; then the engines are asked to pause, which ends its first transfer.
    table.in_transfer(table.live())
    table.paused(table.live())
    engines.hanging.add(1)
    run.until(lambda: engines.killed == [Member(replica=1, deaths=0)])
    run.until(lambda: table.statuses()[1].state is ReplicaState.STALE)
    assert [status.deaths for status in table.statuses()] == [0, 1]


def test_an_engine_that_hangs_before_it_has_weights_is_killed(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1)
    run.engines.hanging.add(0)
    run.until(lambda: run.engines.killed == [Member(replica=0, deaths=0)])


def test_without_limits_nobody_is_asked(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1, misses=0)
    run.engines.table.serving(run.engines.table.live(), version=4)
    time.sleep(0.2)
    assert run.engines.asked == []


def test_replicas_are_built_side_by_side(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=3)
    run.engines.may_finish.clear()
    for replica in range(3):
        run.engines.kill(replica, "the host went away")
    run.until(lambda: sorted(run.engines.rebuilds) == [0, 1, 2])
    run.engines.may_finish.set()
    run.until(lambda: len(run.engines.table.live()) == 3)


def test_a_failed_rebuild_is_tried_again_and_counts(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1, max_restarts=3)
    run.engines.failing_rebuilds = 2
    run.engines.kill(0, "its core was killed")
    table = run.engines.table
    run.until(lambda: table.deaths == 3 and table.statuses()[0].state is ReplicaState.STALE)
    assert run.engines.rebuilds == [0, 0, 0] and run.given_up == []


def test_the_death_after_the_last_restart_is_given_up_with_its_cause(scene: Callable[..., Scene]) -> None:
    run = scene(max_restarts=1)
    for number in range(2):
        run.until(lambda: run.engines.table.statuses()[0].state is not ReplicaState.DEAD)
        run.engines.kill(0, f"death {number}")
        run.until(lambda number=number: run.engines.table.deaths == number + 1)  # type: ignore[misc]
    run.until(lambda: bool(run.given_up))
    assert run.given_up == ["engine replica 0 died: death 1 (inference.max_engine_restarts=1)"]
    assert run.engines.rebuilds == [0]


def test_a_keeper_that_fails_itself_does_not_stop_in_silence(
    scene: Callable[..., Scene], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = scene(replicas=1)

    def breaks(member: Member, *, timeout_s: float) -> str | None:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr(run.engines, "wait_for_death", breaks)
    run.until(lambda: bool(run.given_up))
    assert run.given_up == ["engine replica 0 is not watched any more: RuntimeError: nobody expected this"]


def test_without_restarts_nothing_is_rebuilt(scene: Callable[..., Scene]) -> None:
    run = scene(max_restarts=0)
    run.engines.kill(1, "its core was killed")
    run.until(lambda: bool(run.given_up))
    assert run.given_up == ["engine replica 1 died: its core was killed"] and run.engines.rebuilds == []


def test_a_stop_ends_a_rebuild_that_never_ends(scene: Callable[..., Scene]) -> None:
    run = scene(replicas=1)
    run.engines.may_finish.clear()
    run.engines.kill(0, "its core was killed")
    run.until(lambda: bool(run.engines.rebuilds))
    run.keeper.stop()
    assert not any(thread.name.startswith("engine-keeper") for thread in threading.enumerate())
    assert run.engines.table.statuses()[0].state is ReplicaState.DEAD, "a rebuild that was cut short is none"
    assert run.engines.table.deaths == 1 and run.given_up == []
