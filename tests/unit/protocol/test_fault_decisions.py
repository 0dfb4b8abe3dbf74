"""Faults are a function of the seed, the kind and the event, and of nothing else."""

from __future__ import annotations

from statistics import fmean

from megatron_ppo.protocol.faults import FaultKind, FaultPlan, faults_metric

EVENTS = [(ordinal, attempt) for ordinal in range(2000) for attempt in range(2)]


def plan(seed: int = 7, rate: float = 0.1, **changes: float) -> FaultPlan:
    return FaultPlan(seed=seed, rates=dict.fromkeys(FaultKind, rate), **changes)


def struck(made: FaultPlan, kind: FaultKind) -> set[tuple[int, int]]:
    return {event for event in EVENTS if made.strikes(kind, *event)}


def test_the_same_plan_strikes_the_same_events_and_another_seed_strikes_others() -> None:
    assert struck(plan(), FaultKind.RAISE_REWARD) == struck(plan(), FaultKind.RAISE_REWARD)
    assert struck(plan(), FaultKind.RAISE_REWARD) != struck(plan(seed=8), FaultKind.RAISE_REWARD)


def test_kinds_strike_independently_and_at_their_rate() -> None:
    sets = [struck(plan(), kind) for kind in FaultKind]
    for found in sets:
        assert 0.08 < len(found) / len(EVENTS) < 0.12  # three standard deviations are 0.014
    both = len(sets[0] & sets[1]) / len(EVENTS)
    assert 0.004 < both < 0.017  # 0.01 if independent, its standard deviation is 0.0016


def test_a_further_attempt_of_what_was_struck_can_succeed() -> None:
    found = struck(plan(), FaultKind.FAIL_GENERATION)
    first = {ordinal for ordinal, attempt in found if attempt == 0}
    again = {ordinal for ordinal, attempt in found if attempt == 1}
    assert len(first & again) < len(first) / 4


def test_a_higher_rate_strikes_what_a_lower_one_does_and_more() -> None:
    assert struck(plan(rate=0.1), FaultKind.HANG_REWARD) < struck(plan(rate=0.2), FaultKind.HANG_REWARD)
    assert struck(plan(rate=0.0), FaultKind.HANG_REWARD) == set()
    assert struck(plan(rate=1.0), FaultKind.HANG_REWARD) == set(EVENTS)


def test_delays_are_spread_from_none_to_the_longest() -> None:
    made = plan(max_refit_delay_s=2.0)
    delays = [made.refit_delay_s(*event) for event in EVENTS]
    assert 0.0 <= min(delays) < 0.01 and 1.99 < max(delays) < 2.0
    assert abs(fmean(delays) - 1.0) < 0.05


def test_a_plan_knows_which_kinds_are_on() -> None:
    made = FaultPlan(seed=0, rates={FaultKind.FAIL_REFIT: 0.1, FaultKind.KILL_ENGINE: 0.0})
    assert made.kinds == (FaultKind.FAIL_REFIT,)
    assert not made.strikes(FaultKind.RAISE_REWARD, 1)


def test_every_kind_has_a_metric_of_its_own() -> None:
    assert len({faults_metric(kind) for kind in FaultKind}) == len(FaultKind)
