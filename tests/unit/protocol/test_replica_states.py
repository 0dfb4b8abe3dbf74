"""The table of engine replicas: who may serve, and that old news changes nothing."""

from __future__ import annotations

import random
import threading
import time

import pytest

from megatron_ppo.protocol.replicas import Member, ReplicaState, ReplicaTable

DEAD, STALE, HEALTHY = ReplicaState.DEAD, ReplicaState.STALE, ReplicaState.HEALTHY


def table_of(replicas: int, *, max_restarts: int = 3) -> ReplicaTable:
    """All built, and at version 0."""
    table = ReplicaTable(replicas=replicas, max_restarts=max_restarts)
    for replica in range(replicas):
        table.built(replica)
    table.serving(table.live(), version=0)
    return table


def states(table: ReplicaTable) -> list[ReplicaState]:
    return [status.state for status in table.statuses()]


def test_a_replica_serves_only_after_it_was_built_and_given_the_weights() -> None:
    table = ReplicaTable(replicas=2, max_restarts=0)
    assert states(table) == [DEAD, DEAD] and table.live() == ()
    table.built(1)
    assert states(table) == [DEAD, STALE]
    assert table.members(HEALTHY) == () and table.live() == (Member(replica=1, deaths=0),)
    table.serving(table.live(), version=4)
    assert states(table) == [DEAD, HEALTHY]
    assert [status.version for status in table.statuses()] == [None, 4]


def test_a_refit_pauses_who_serves_and_a_failed_one_leaves_them_stale() -> None:
    table = table_of(2)
    table.paused(table.live())
    assert states(table) == [STALE, STALE]
    table.serving(table.live(), version=1)
    assert states(table) == [HEALTHY, HEALTHY]


def test_an_engine_answers_unless_it_is_dead_or_in_a_transfer() -> None:
    table = table_of(3)
    refitted = table.live()
    answers = lambda: [table.answers(replica) for replica in range(3)]  # noqa: E731
    assert answers() == [True, True, True]
    table.in_transfer(refitted[:2])  # which form a group
    assert answers() == [False, False, True]
    table.paused(refitted)  # which finish their requests
    assert answers() == [True, True, True]
    table.in_transfer(refitted)
    table.died(refitted[0], "killed")
    table.built(0)
    table.in_transfer(refitted)  # news of its former life
    assert answers() == [True, False, False]
    table.serving(refitted, version=1)
    assert answers() == [True, True, True]
    table.died(refitted[1], "killed")
    assert answers() == [True, False, True]


def test_a_death_takes_the_version_away_and_is_counted() -> None:
    table = table_of(2)
    assert table.died(table.member(1), "its core was killed")
    assert states(table) == [HEALTHY, DEAD] and table.deaths == 1
    assert table.statuses()[1].version is None
    table.built(1)
    assert table.live() == (Member(replica=0, deaths=0), Member(replica=1, deaths=1))
    assert table.describe() == "0 HEALTHY v0, 1 STALE (died 1x)"


def test_who_was_left_out_is_addressed_by_no_refit_until_it_has_paused() -> None:
    table = table_of(3)
    table.paused(table.live())
    table.left_out([table.member(2)])
    table.in_transfer([table.member(0), table.member(1)])
    assert table.answers(2), "it finishes its requests, and would be found if it hung"
    table.serving([table.member(0), table.member(1)], version=1)
    assert states(table) == [HEALTHY, HEALTHY, STALE] and table.slow() == (table.member(2),)
    assert table.describe() == "0 HEALTHY v1, 1 HEALTHY v1, 2 STALE v0 slow"
    assert not table.lacks_weights
    assert table.lacking(2) == (table.member(0), table.member(1))
    table.has_paused(table.member(2))
    assert table.lacks_weights and table.slow() == ()
    assert table.lacking(1) == (table.member(2),), "the others serve that version already"
    assert table.lacking(2) == table.live()
    table.serving([table.member(2)], version=1)
    assert table.lacking(1) == table.live(), "all have it: all are given it again"


def test_being_slow_ends_with_the_life() -> None:
    table = table_of(2)
    table.paused(table.live())
    first = table.member(1)
    table.left_out([first])
    table.died(first, "killed")
    assert table.slow() == () and not table.statuses()[1].slow
    table.built(1)
    table.left_out([first])  # late news
    assert table.slow() == () and table.lacks_weights
    table.left_out([table.member(1)])
    table.has_paused(first)
    assert table.slow() == (table.member(1),)


def test_who_serves_again_or_is_dead_cannot_be_left_out() -> None:
    table = table_of(2)
    table.died(table.member(1), "killed")
    table.left_out([table.member(0), table.member(1)])
    assert table.slow() == () and states(table) == [HEALTHY, DEAD]


def test_news_of_an_earlier_life_is_ignored() -> None:
    table = table_of(1)
    first = table.member(0)
    assert table.died(first, "killed")
    assert not table.died(first, "the same death, seen by a second call")
    assert not table.died(table.member(0), "it is dead already")
    table.built(0)
    assert not table.died(first, "the same death, seen by a late call")
    table.serving([first], version=7)  # a refit that the death has cut short
    assert states(table) == [STALE] and table.deaths == 1


def test_the_death_after_the_last_restart_exhausts_the_table_with_its_cause() -> None:
    table = table_of(2, max_restarts=1)
    table.died(table.member(0), "the first")
    table.died(table.member(1), "of the other one")
    assert table.exhausted is None  # each replica has its own limit
    table.rebuild_failed(0, "out of memory")
    assert table.exhausted == (
        "engine replica 0 died: it could not be rebuilt: out of memory (inference.max_engine_restarts=1)"
    )
    table.built(1)
    table.died(table.member(1), "later")
    assert table.exhausted.startswith("engine replica 0"), "the first cause counts"


def test_without_restarts_the_first_death_is_the_last_and_the_message_is_its_cause() -> None:
    table = table_of(1, max_restarts=0)
    table.died(table.member(0), "EngineDeadError: the vLLM engine core died")
    assert table.exhausted == "engine replica 0 died: EngineDeadError: the vLLM engine core died"


def test_a_replica_that_did_not_take_part_and_serves_old_weights_is_an_error() -> None:
    table = table_of(2)
    with pytest.raises(ValueError, match="replica 1 serves version 0 after the refit to version 1 of"):
        table.serving([table.member(0)], version=1)


@pytest.mark.parametrize(
    ("act", "message"), [("built", "was built"), ("rebuild_failed", "failed to be rebuilt")]
)
def test_only_a_dead_replica_is_built(act: str, message: str) -> None:
    table = table_of(1)
    with pytest.raises(ValueError, match=f"{message} while it is HEALTHY; it must be DEAD"):
        getattr(table, act)(0, *(["cause"] if act == "rebuild_failed" else []))


def test_a_waiting_thread_wakes_up_when_its_condition_comes_true() -> None:
    table = ReplicaTable(replicas=1, max_restarts=0)
    builder = threading.Timer(0.05, lambda: table.built(0))
    started = time.monotonic()
    builder.start()
    assert table.wait_for(lambda: bool(table.live()), timeout_s=30)
    assert time.monotonic() - started < 20
    assert not table.wait_for(lambda: table.deaths > 0, timeout_s=0.01)


def test_in_random_histories_all_who_serve_serve_the_last_published_version() -> None:
    for seed in range(300):
        rng = random.Random(seed)
        table = ReplicaTable(replicas=rng.randint(1, 4), max_restarts=10**6)
        version, deaths = 0, 0
        lives = [[table.member(replica)] for replica in range(len(table.statuses()))]
        for _ in range(60):
            replica = rng.randrange(len(lives))
            state = table.statuses()[replica].state
            match rng.choice(("build", "die", "late news", "refit", "broken refit")):
                case "build" if state is DEAD:
                    table.built(replica)
                case "die":
                    if table.died(table.member(replica), "killed"):
                        deaths += 1
                        lives[replica].append(table.member(replica))
                case "late news" if len(lives[replica]) > 1:
                    assert not table.died(rng.choice(lives[replica][:-1]), "late")
                case "refit" | "broken refit" as kind:
                    members = table.live()
                    table.paused(members)
                    assert not table.members(HEALTHY)
                    if kind == "refit" and members:
                        version += 1
                        table.serving(members, version=version)
            assert {s.version for s in table.statuses() if s.state is HEALTHY} <= {version}
            assert table.deaths == deaths
