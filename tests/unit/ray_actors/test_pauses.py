"""Whom a refit waits for: all within the patience, then whoever is ready, and one at least."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from megatron_ppo.protocol.errors import EngineDeadError, RefitError, WaitTimeoutError
from megatron_ppo.protocol.replicas import Member, PauseMode, ReplicaState, ReplicaTable
from megatron_ppo.ray_actors.pauses import GRACE_S, Pauses

DEAD, STALE, HEALTHY = ReplicaState.DEAD, ReplicaState.STALE, ReplicaState.HEALTHY
PATIENCE_S, TIMEOUT_S = 10.0, 100.0
NEVER_S = 1e9


class Call:
    """Answers at `done_at` on the scene's clock; with `error` if there is one."""

    def __init__(self, scene: Scene, done_at: float, error: Exception | None = None) -> None:
        self.scene, self.done_at, self.error = scene, done_at, error

    def done(self) -> bool:
        return self.scene.now >= self.done_at

    def result(self) -> None:
        assert self.done(), "asked for a result that is not there"
        if self.error is not None:
            raise self.error


class Scene:
    """Engines that take `takes_s[replica]` to pause, give up after the limit unless they hang, and a clock.

    Attributes:
        hanging: replicas that answer nothing.   asked: who was asked to pause, in order.
        events: (time, replica) of deaths to come.
    """

    def __init__(self, replicas: int = 2) -> None:
        self.now = 1000.0
        self.table = ReplicaTable(replicas=replicas, max_restarts=10**6)
        self.takes_s = [0.0] * replicas
        self.hanging: set[int] = set()
        self.asked: list[int] = []
        self.aside: list[int] = []
        self.events: list[tuple[float, int]] = []
        self._calls: dict[Member, Call] = {}
        self.pauses = Pauses(self, clock=lambda: self.now)
        for replica in range(replicas):
            self.table.built(replica)
        self.table.serving(self.table.live(), version=0)

    def ask_to_pause(self, member: Member, *, mode: PauseMode, timeout_s: float) -> Call:
        assert mode == "drain" and timeout_s == TIMEOUT_S
        replica = member.replica
        before = self._calls.get(member)
        assert before is None or before.done(), f"replica {replica} is asked while it is being asked"
        self.asked.append(replica)
        takes_s, error = self.takes_s[replica], None
        if takes_s > timeout_s:
            takes_s, error = timeout_s, RefitError("waited 100 s for 3 running requests to finish")
        if replica in self.hanging:
            takes_s = NEVER_S
        self._calls[member] = Call(self, self.now + takes_s, error)
        return self._calls[member]

    def stand_aside(self, member: Member) -> None:
        self.aside.append(member.replica)

    def wait_for_any(self, calls: Sequence[Call], *, timeout_s: float) -> None:
        assert timeout_s > 0 and not any(call.done() for call in calls)
        until = min([self.now + timeout_s, *(call.done_at for call in calls)])
        if self.events and self.events[0][0] <= until:
            until, replica = self.events.pop(0)
            self.die(replica, at=until)
        self.now = max(self.now, until)

    def die(self, replica: int, *, at: float | None = None) -> None:
        member = self.table.member(replica)
        error = EngineDeadError("its core was killed")
        if (call := self._calls.get(member)) is not None and not call.done():
            call.done_at, call.error = self.now if at is None else at, error
        self.table.died(member, "its core was killed")

    def gather(self, version: int, *, patience_s: float | None = PATIENCE_S) -> list[int]:
        """Pause for `version` whom the muster addresses; the replicas that are ready."""
        members = self.table.lacking(version)
        self.table.paused(members)
        ready = self.pauses.gather(members, mode="drain", patience_s=patience_s, timeout_s=TIMEOUT_S)
        return [member.replica for member in ready]

    def push(self, version: int, *, patience_s: float | None = PATIENCE_S) -> list[int]:
        """A whole refit; the replicas that took part."""
        ready = self.gather(version, patience_s=patience_s)
        assert ready, "a refit without an engine"
        self.table.serving([self.table.member(replica) for replica in ready], version=version)
        return ready

    def look(self) -> None:
        """What the keeper's threads do."""
        for replica, status in enumerate(self.table.statuses()):
            if status.state is not DEAD:
                member = self.table.member(replica)
                if (cause := self.pauses.look(member)) is not None:
                    self.table.died(member, cause)

    def slow(self) -> list[int]:
        return [member.replica for member in self.table.slow()]

    def states(self) -> list[ReplicaState]:
        return [status.state for status in self.table.statuses()]


def test_who_pauses_within_the_patience_is_waited_for() -> None:
    scene = Scene()
    scene.takes_s = [1.0, PATIENCE_S - 0.1]
    assert scene.push(1) == [0, 1] and scene.now == 1000.0 + PATIENCE_S - 0.1
    assert scene.slow() == [] and scene.aside == []


def test_who_does_not_is_left_out_and_gets_the_version_of_the_time_when_it_has_paused() -> None:
    scene = Scene()
    scene.takes_s = [1.0, 35.0]
    assert scene.push(1) == [0] and scene.now == 1000.0 + PATIENCE_S
    assert scene.table.describe() == "0 HEALTHY v1, 1 STALE v0 slow"
    assert scene.aside == [1] and not scene.table.lacks_weights
    started = scene.now
    assert scene.push(2) == [0] and scene.push(3) == [0]
    assert scene.now == started + 2.0, "the others do not wait for it a second time"
    scene.look()
    assert scene.slow() == [1]
    scene.now = 1036.0
    scene.look()
    assert scene.slow() == [] and scene.table.lacks_weights
    scene.takes_s = [0.0, 0.0]
    assert scene.table.lacking(3) == (scene.table.member(1),), "who has the version goes on serving"
    assert scene.push(3) == [1]
    assert scene.table.describe() == "0 HEALTHY v3, 1 HEALTHY v3"
    assert scene.asked == [0, 1, 0, 0, 1]
    assert scene.push(4) == [0, 1]


def test_a_replica_that_has_paused_takes_part_in_the_next_publication_without_a_refit_of_its_own() -> None:
    scene = Scene()
    scene.takes_s = [1.0, 12.0]
    scene.push(1)
    scene.now += 5.0
    scene.look()
    scene.takes_s = [1.0, 0.0]
    assert scene.push(2) == [0, 1]


def test_one_that_becomes_ready_in_the_middle_of_the_next_publication_takes_part_in_it() -> None:
    scene = Scene()
    scene.takes_s = [1.0, PATIENCE_S + 3.0]
    scene.push(1)
    scene.takes_s = [5.0, 0.0]
    assert scene.push(2) == [0, 1] and scene.asked == [0, 1, 0]
    assert scene.table.describe() == "0 HEALTHY v2, 1 HEALTHY v2"


def test_one_that_becomes_ready_while_nobody_else_is_ends_the_wait() -> None:
    scene = Scene()
    scene.takes_s = [1.0, PATIENCE_S + 25.0]
    scene.push(1)
    scene.takes_s = [60.0, 0.0]
    assert scene.push(2) == [1] and scene.now == 1035.0
    assert scene.table.describe() == "0 STALE v1 slow, 1 HEALTHY v2"


def test_the_first_of_all_slow_ones_takes_the_version_alone() -> None:
    scene = Scene(3)
    scene.takes_s = [50.0, 30.0, 40.0]
    assert scene.push(1) == [1] and scene.now == 1030.0
    assert scene.slow() == [0, 2]


def test_if_none_is_ready_within_the_limit_the_publication_fails_as_without_patience() -> None:
    for patience_s in (PATIENCE_S, None):
        scene = Scene()
        scene.takes_s = [200.0, 300.0]
        with pytest.raises(RefitError, match="waited 100 s for 3 running requests"):
            scene.gather(1, patience_s=patience_s)
        assert scene.now == 1100.0 and scene.states() == [STALE, STALE] and scene.slow() == []
        scene = Scene()
        scene.hanging = {0, 1}
        with pytest.raises(WaitTimeoutError, match=r"waited 130 s .* replicas \[0, 1\] have not answered"):
            scene.gather(1, patience_s=patience_s)


def test_without_patience_all_are_waited_for() -> None:
    scene = Scene()
    scene.takes_s = [1.0, 90.0]
    assert scene.push(1, patience_s=None) == [0, 1] and scene.now == 1090.0
    scene.takes_s = [1.0, 200.0]
    with pytest.raises(RefitError, match="waited 100 s"):
        scene.gather(2, patience_s=None)


def test_a_death_within_the_patience_fails_the_attempt_at_once() -> None:
    scene = Scene()
    scene.takes_s = [1.0, 90.0]
    scene.events = [(1004.0, 1)]
    with pytest.raises(EngineDeadError):
        scene.gather(1)
    assert scene.now == 1004.0
    assert scene.push(1) == [0]


@pytest.mark.parametrize("sees", ["the keeper", "the next publication"])
def test_one_that_dies_while_it_is_slow_comes_back_like_every_dead_one(sees: str) -> None:
    scene = Scene()
    scene.takes_s = [1.0, 90.0]
    scene.push(1)
    scene.die(1)
    if sees == "the keeper":
        scene.look()
    assert scene.push(2) == [0] and scene.states() == [HEALTHY, DEAD] and scene.slow() == []
    scene.table.built(1)
    scene.takes_s = [1.0, 0.0]
    assert scene.table.lacks_weights and scene.push(2) == [1]
    assert scene.table.statuses()[1].deaths == 1


@pytest.mark.parametrize("hangs", [True, False])
def test_one_that_does_not_pause_within_the_limit_counts_as_dead(hangs: bool) -> None:
    scene = Scene()
    scene.takes_s = [1.0, 5000.0]
    scene.hanging = {1} if hangs else set()
    scene.push(1)
    overdue_at = 1000.0 + TIMEOUT_S + (GRACE_S if hangs else 0.0)
    scene.now = overdue_at - 1.0
    scene.look()
    assert scene.slow() == [1]
    scene.now = overdue_at
    if hangs:
        scene.look()
    else:  # a publication sees it as well
        assert scene.push(2) == [0]
    assert scene.states() == [HEALTHY, DEAD] and scene.table.deaths == 1
    scene.look()
    assert scene.table.deaths == 1


def test_in_random_runs_one_replica_has_each_version_at_once_and_nobody_is_left_behind_for_ever() -> None:
    skipped = deaths = 0
    for seed in range(200):
        rng = random.Random(seed)
        scene = Scene(rng.randint(1, 4))
        for version in range(1, 30):
            scene.takes_s = [rng.choice((0.0, 1.0, 9.0, 11.0, 40.0, 99.0, 150.0)) for _ in scene.takes_s]
            scene.hanging = {replica for replica in range(len(scene.takes_s)) if rng.random() < 0.05}
            started, before = scene.now, scene.table.deaths
            if not scene.table.lacking(version):
                scene.now += GRACE_S + TIMEOUT_S  # the muster waits for the keeper
                scene.look()
            for replica, state in enumerate(scene.states()):
                if state is DEAD:
                    scene.table.built(replica)
            try:
                took_part = scene.push(version)
            except (RefitError, WaitTimeoutError):
                for replica in range(len(scene.takes_s)):  # what hangs is found by others
                    scene.die(replica)
                continue
            versions = {s.version for s in scene.table.statuses() if s.state is HEALTHY}
            assert versions == {version} and took_part
            skipped += len(scene.slow())
            deaths += scene.table.deaths - before
            assert scene.now - started <= 2 * (TIMEOUT_S + GRACE_S)
            scene.now += rng.choice((1.0, 20.0))
            scene.look()
        scene.now += TIMEOUT_S + GRACE_S
        scene.look()
        assert scene.slow() == []
    assert skipped > 500 and deaths > 50, "or the test would test little"
