"""What a publication does about engines that die and transfers that fail: again, but not for ever."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from megatron_ppo.protocol.errors import (
    EngineDeadError,
    GroupMismatchError,
    PartDiedError,
    RefitError,
    WeightMismatchError,
)
from megatron_ppo.protocol.replicas import ReplicaState, ReplicaTable
from megatron_ppo.refit import recovery
from megatron_ppo.refit.recovery import RecoveringRefit, RecoveringValidator, sharing_deaths

HEALTHY, STALE = ReplicaState.HEALTHY, ReplicaState.STALE


def on_one_rank(what: str, function: Callable[[], Any]) -> Any:
    return function()


class World:
    """A refit whose attempts do what `attempts` say, and the engines that it addresses."""

    def __init__(self, *attempts: Callable[[World], None], max_restarts: int = 3) -> None:
        self.table = ReplicaTable(replicas=2, max_restarts=max_restarts)
        for replica in range(2):
            self.table.built(replica)
        self.attempts = list(attempts)
        self.pushed: list[int] = []
        self.phases: list[str] = []

    def push(self, *, version: int) -> Mapping[str, float]:
        self.pushed.append(version)
        if not (members := self.table.live()):
            raise EngineDeadError("no engine replica came up")
        self.table.paused(members)
        if self.attempts:
            self.attempts.pop(0)(self)
        self.table.serving(members, version=version)
        return {"refit/total_s": 1.0}

    def raise_if_lost(self) -> None:
        if self.table.exhausted is not None:
            raise PartDiedError(self.table.exhausted)

    @contextmanager
    def publishing(self) -> Iterator[None]:
        self.phases.append("begin")
        yield
        self.phases.append("end")

    def recovering(self, *, max_retries: int = 1, **changes: Any) -> RecoveringRefit:
        settings: dict[str, Any] = {
            "refit": self,
            "engines": self.table,
            "raise_if_lost": self.raise_if_lost,
            "max_retries": max_retries,
            "on_rank_zero": on_one_rank,
            "publishing": self.publishing,
        }
        return RecoveringRefit(**{**settings, **changes})


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "NEWS_S", 0.01)


def times_out(world: World) -> None:
    raise RefitError("waited 120 s for all receivers to join")


def dies(world: World) -> None:
    world.table.died(world.table.member(1), "its core was killed")
    raise RefitError("connection closed by peer")


def dies_unseen(world: World) -> None:
    """The broken connection is seen at once, the death a moment later."""
    threading.Timer(0.05, lambda: world.table.died(world.table.member(1), "its core was killed")).start()
    raise RefitError("connection closed by peer")


def dies_in_the_probe(world: World) -> None:
    world.table.died(world.table.member(0), "its core was killed")
    raise EngineDeadError("engine replica 0: its core was killed")


def test_a_refit_that_fails_once_is_tried_again_and_the_row_says_so() -> None:
    world = World(times_out)
    assert world.recovering().push(version=5) == {"refit/total_s": 1.0, "refit/failed_attempts": 1.0}
    assert world.pushed == [5, 5] and len(world.table.members(HEALTHY)) == 2


@pytest.mark.parametrize("max_retries", [0, 1, 3])
def test_after_the_last_retry_the_error_is_raised_and_the_engines_stay_paused(max_retries: int) -> None:
    world = World(*[times_out] * 9)
    with pytest.raises(RefitError, match="waited 120 s for all receivers to join"):
        world.recovering(max_retries=max_retries).push(version=5)
    assert len(world.pushed) == 1 + max_retries
    assert world.table.members(HEALTHY) == ()


def test_every_publication_has_its_own_retries() -> None:
    world = World(times_out)
    refit = world.recovering()
    refit.push(version=1)
    world.attempts = [times_out]
    refit.push(version=2)
    assert world.pushed == [1, 1, 2, 2]


@pytest.mark.parametrize("attempt", [dies, dies_in_the_probe])
def test_a_death_during_the_refit_costs_no_retry_and_the_others_get_the_weights(
    attempt: Callable[[World], None],
) -> None:
    world = World(attempt)
    assert world.recovering(max_retries=0).push(version=5)["refit/failed_attempts"] == 1.0
    assert len(world.table.members(HEALTHY)) == 1


def test_a_death_that_is_noticed_after_the_broken_transfer_costs_no_retry(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "NEWS_S", 30.0)
    world = World(dies_unseen)
    world.recovering(max_retries=0).push(version=5)
    assert world.pushed == [5, 5]


def test_an_engine_that_hangs_in_a_refit_is_ended_and_costs_no_retry() -> None:
    world = World(times_out, times_out)
    hanging = [0]

    def end_silent() -> None:
        if hanging:
            world.table.died(world.table.member(hanging.pop()), "it hangs")

    metrics = world.recovering(max_retries=1, end_silent=end_silent).push(version=5)
    assert metrics["refit/failed_attempts"] == 2.0 and world.pushed == [5, 5, 5]
    assert [status.deaths for status in world.table.statuses()] == [1, 0]
    assert [member.replica for member in world.table.members(HEALTHY)] == [1]


def test_a_failure_that_a_death_explains_is_not_looked_into() -> None:
    world = World(dies)
    looks: list[int] = []
    world.recovering(end_silent=lambda: looks.append(1)).push(version=5)
    assert looks == [] and world.pushed == [5, 5]


def test_an_engine_that_hangs_once_too_often_ends_the_publication_with_its_cause() -> None:
    world = World(times_out, max_restarts=0)
    refit = world.recovering(
        max_retries=9, end_silent=lambda: world.table.died(world.table.member(1), "it hangs")
    )
    with pytest.raises(PartDiedError, match=r"^engine replica 1 died: it hangs$"):
        refit.push(version=5)


def test_an_engine_error_after_the_last_retry_is_an_error_of_the_publication() -> None:
    def fails_alone(world: World) -> None:
        raise EngineDeadError("no engine replica serves")

    world = World(*[fails_alone] * 2)
    with pytest.raises(RefitError, match="version 5 could not be published: no engine replica serves"):
        world.recovering(max_retries=1).push(version=5)


def test_a_death_without_a_restart_ends_the_publication_with_its_cause() -> None:
    world = World(dies, max_restarts=0)
    with pytest.raises(PartDiedError, match=r"^engine replica 1 died: its core was killed$"):
        world.recovering(max_retries=9).push(version=5)
    assert world.pushed == [5]


def test_the_wait_for_an_engine_that_will_never_come_ends_with_what_else_has_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # With its raylet gone, no process of a machine is started again, and Ray does not say so.
    monkeypatch.setattr(recovery, "LOOK_S", 0.01)
    world = World()
    for replica in range(2):
        world.table.died(world.table.member(replica), "the actor died unexpectedly")
    looks = 0

    def raise_if_lost() -> None:
        nonlocal looks
        looks += 1
        if looks > 3:
            raise PartDiedError("the replay buffer died")

    with pytest.raises(PartDiedError, match=r"^the replay buffer died$"):
        world.recovering(raise_if_lost=raise_if_lost).push(version=5)
    assert world.pushed == [], "nobody was there to publish to"


def test_a_publication_waits_for_the_engine_that_is_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LOOK_S", 0.01)
    world = World()
    for replica in range(2):
        world.table.died(world.table.member(replica), "killed")
    threading.Timer(0.1, lambda: world.table.built(1)).start()
    world.recovering(max_retries=0).push(version=5)
    assert world.pushed == [5] and len(world.table.members(HEALTHY)) == 1


def test_the_other_ranks_hear_that_a_long_wait_for_an_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    # They lose rank 0 after a limit that covers one start of an engine, and several may be needed.
    monkeypatch.setattr(recovery, "LOOK_S", 0.01)
    monkeypatch.setattr(recovery, "_LOOKS_A_TURN", 2)
    world = World()
    for replica in range(2):
        world.table.died(world.table.member(replica), "killed")
    answers: list[Any] = []

    def on_rank_zero(what: str, function: Callable[[], Any]) -> Any:
        answers.append(function())
        if len(answers) == 3:
            world.table.built(1)
        return answers[-1]

    world.recovering(on_rank_zero=on_rank_zero).push(version=5)
    assert answers == [None, None, None, 2] and world.pushed == [5]


def test_engines_that_compute_something_else_are_not_sent_the_same_weights_again() -> None:
    def differs(world: World) -> None:
        raise WeightMismatchError("weights of version 5 differ")

    world = World(differs)
    with pytest.raises(WeightMismatchError):
        world.recovering(max_retries=9).push(version=5)
    assert world.pushed == [5]


def test_what_is_no_failure_of_the_refit_is_not_tried_again() -> None:
    def breaks(world: World) -> None:
        raise GroupMismatchError("a bug")

    world = World(breaks)
    with pytest.raises(GroupMismatchError):
        world.recovering(max_retries=9).push(version=5)
    assert world.pushed == [5]


def test_an_engine_that_came_back_is_given_the_last_version_without_a_new_one() -> None:
    world = World()
    refit = world.recovering()
    assert not refit.refresh(), "nothing was published yet"
    refit.push(version=3)
    assert not refit.refresh() and world.phases == []
    world.table.died(world.table.member(1), "its core was killed")
    assert not refit.refresh(), "it is not built yet"
    world.table.built(1)
    assert refit.refresh()
    assert world.pushed == [3, 3] and world.phases == ["begin", "end"]
    assert [status.version for status in world.table.statuses()] == [3, 3]
    assert not refit.refresh()


def test_a_validation_whose_last_engine_dies_is_repeated_after_the_weights_were_sent_again() -> None:
    world = World()
    refit = world.recovering()
    refit.push(version=3)
    runs: list[int] = []

    class Validator:
        def run(self, *, step: int) -> Mapping[str, float]:
            runs.append(step)
            if len(runs) == 1:
                for replica in range(2):
                    world.table.died(world.table.member(replica), "killed")
                world.table.built(1)
                raise EngineDeadError("no engine replica serves")
            return {"validation/accuracy": 0.5}

    validator = RecoveringValidator(validator=Validator(), repeat=refit.repeat)
    assert validator.run(step=7) == {"validation/accuracy": 0.5}
    assert runs == [7, 7] and world.pushed == [3, 3]


class Ranks:
    """`RankZero.run` between two threads: the function runs on rank 0, the other one is handed the outcome."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2)
        self._outcome: tuple[bool, Any] = (False, None)

    def of(self, rank: int) -> Callable[[str, Callable[[], Any]], Any]:
        def run(what: str, function: Callable[[], Any]) -> Any:
            if rank == 0:
                try:
                    self._outcome = (True, function())
                except Exception as error:
                    self._outcome = (False, error)
            self._barrier.wait(30)
            succeeded, value = self._outcome
            self._barrier.wait(30)
            if succeeded:
                return value
            raise value if rank == 0 else PartDiedError(f"rank 0 failed during {what}: {value}")

        return run


def test_all_ranks_try_again_together_and_raise_together() -> None:
    ranks = Ranks()
    world = World(dies, times_out, times_out)
    shared = sharing_deaths(ranks.of(0))
    shared_on_1 = sharing_deaths(ranks.of(1))

    class OnRank1:
        """The same collective calls as rank 0 makes, without the engines."""

        def push(self, *, version: int) -> Mapping[str, float]:
            return push_together(shared_on_1, version)

    class OnRank0:
        def push(self, *, version: int) -> Mapping[str, float]:
            return push_together(shared, version)

    def push_together(run: Any, version: int) -> Mapping[str, float]:
        def act() -> str | None:
            try:
                world.push(version=version)
            except RefitError as error:
                return str(error)
            return None

        if (failure := run("the push", act)) is not None:
            raise RefitError(failure)
        return {}

    refits = [
        world.recovering(refit=OnRank0(), on_rank_zero=ranks.of(0)),
        world.recovering(refit=OnRank1(), on_rank_zero=ranks.of(1), engines=None, raise_if_lost=None),
    ]
    with ThreadPoolExecutor(2) as pool:
        outcomes = [pool.submit(refit.push, version=4) for refit in refits]
    for outcome in outcomes:
        with pytest.raises(RefitError, match="waited 120 s"):
            outcome.result()
    assert world.pushed == [4, 4, 4]


def test_a_death_is_one_on_every_rank_and_other_errors_stay_what_they_are() -> None:
    ranks = Ranks()

    def die() -> None:
        raise EngineDeadError("engine replica 1: killed")

    def fail() -> None:
        raise RefitError("something else")

    with ThreadPoolExecutor(2) as pool:
        for act, expected in ((die, [EngineDeadError] * 2), (fail, [RefitError, PartDiedError])):
            runs = [sharing_deaths(ranks.of(rank)) for rank in range(2)]
            outcomes = [pool.submit(run, "the look", act) for run in runs]
            assert [type(outcome.exception()) for outcome in outcomes] == expected
