"""The staleness rule against the reference's lead, and its age bound for every admissible window."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.strategies import schedules

no_deadline = settings(deadline=None)  # the machine may be busy; time is not what these tests check

FAR = 10_000  # a run that is long enough to never clamp a window


def schedule(*, age: int, start: int = 0, lead: int | None = None, steps: int = FAR) -> AsyncSchedule:
    return AsyncSchedule(
        max_num_steps=steps,
        max_trajectory_age_steps=age,
        policy_training_start_step=start,
        warmup_generation_lead_steps=lead,
    )


def reference_lead(*, age: int, start: int, lead: int | None, step: int) -> int:
    """The reference's generation lead, in steps, restated: its version counts every step."""
    banked = age if lead is None else lead
    return age if step >= start else max(age, min(banked, start + age - step))


@no_deadline
@given(schedules(max_steps=40), st.integers(0, 60))
def test_frontier_equals_the_reference_lead_clamped_to_the_last_step(plan: AsyncSchedule, step: int) -> None:
    lead = reference_lead(
        age=plan.max_trajectory_age_steps,
        start=plan.policy_training_start_step,
        lead=plan.warmup_generation_lead_steps,
        step=step,
    )
    assert plan.frontier(step) == min(step + lead, plan.max_num_steps - 1)


@no_deadline
@given(schedules(), st.data())
def test_every_target_in_the_window_is_within_the_age_bound(plan: AsyncSchedule, data: st.DataObject) -> None:
    step = data.draw(st.integers(0, plan.max_num_steps - 1))
    target = data.draw(st.integers(step, plan.frontier(step)))
    age = plan.age(generation_version=plan.version_at(step), target_step=target)
    assert 0 <= age <= plan.max_trajectory_age_steps
    assert plan.oldest_version_for(target) <= plan.version_at(step)


@no_deadline
@given(schedules())
def test_frontier_never_moves_back_and_never_jumps_over_a_target(plan: AsyncSchedule) -> None:
    frontiers = [plan.frontier(step) for step in range(plan.max_num_steps)]
    assert frontiers[-1] == plan.max_num_steps - 1
    for before, after in itertools.pairwise(frontiers):
        assert before <= after <= before + 1
    assert all(frontier >= step for step, frontier in enumerate(frontiers))


@no_deadline
@given(schedules())
def test_the_widest_window_fits_twice_into_the_capacity(plan: AsyncSchedule) -> None:
    widest = max(plan.frontier(step) - step + 1 for step in range(plan.max_num_steps))
    assert 3 * widest <= plan.capacity(3) <= 6 * max(widest, plan.lead, plan.max_trajectory_age_steps, 1)


@no_deadline
@given(schedules(), st.integers(0, 30))
def test_version_counts_trained_steps_only(plan: AsyncSchedule, step: int) -> None:
    assert plan.version_at(step) == sum(plan.trains_policy(earlier) for earlier in range(step))


@pytest.mark.parametrize(
    ("age", "start", "lead", "expected"),
    [
        pytest.param(1, 4, 4, [4, 4, 3, 2, 1, 1, 1], id="W1"),
        pytest.param(1, 0, None, [1, 1, 1], id="W2 without warm-up the lead is the age"),
        pytest.param(1, 1, 2, [2, 1, 1, 1], id="W3"),
        pytest.param(1, 2, 20, [3, 2, 1, 1], id="W4 a huge lead is capped at the frontier"),
        pytest.param(2, 4, 6, [6, 5, 4, 3, 2, 2, 2], id="table 2.4"),
        pytest.param(1, 4, 2, [2, 2, 2, 2, 1, 1], id="a smaller lead banks less"),
        pytest.param(0, 3, 2, [2, 2, 1, 0, 0], id="age 0 may bank in warm-up, because no weights move"),
    ],
)
def test_lead_by_step(age: int, start: int, lead: int | None, expected: list[int]) -> None:
    plan = schedule(age=age, start=start, lead=lead)
    assert [plan.frontier(step) - step for step in range(len(expected))] == expected


def test_warm_up_never_reserves_beyond_the_safe_frontier() -> None:
    plan = schedule(age=1, start=4, lead=4)
    assert max(plan.frontier(step) for step in range(5)) == 5


def test_window_edges_of_age_two() -> None:
    """C1: upper edges; the lower edge is the lowest unfinished target, which the buffer knows."""
    plan = schedule(age=2)
    assert plan.frontier(0) == 2
    assert plan.frontier(5) == 7


def test_a_fresh_process_at_step_seven_may_fill_two_targets() -> None:
    """C3."""
    plan = schedule(age=1)
    assert [plan.frontier(7), plan.frontier(8)] == [8, 9]


def test_oldest_step_age_is_bounded_by_lead_or_safe_frontier() -> None:
    plan = schedule(age=1, start=4, lead=20)
    oldest = max(plan.frontier(step) - step for step in range(20))
    assert oldest == min(20, 4 + 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"age": -1}, "max_trajectory_age_steps must be >= 0, got -1"),
        ({"age": 2, "start": 1, "lead": 1}, "warmup_generation_lead_steps must be >= 2 .* got 1"),
        (
            {"age": 1, "lead": 2},
            "warmup_generation_lead_steps=2 needs .*policy_training_start_step > 0, got 0",
        ),
        ({"age": 0, "start": 1, "lead": 0}, "warmup_generation_lead_steps must be >= 1 .* got 0"),
        ({"age": 1, "start": -1}, "policy_training_start_step must be >= 0, got -1"),
        ({"age": 1, "steps": 0}, "max_num_steps must be >= 1, got 0"),
    ],
)
def test_impossible_schedules_are_refused(settings: dict[str, int], message: str) -> None:
    """F2 and C2."""
    with pytest.raises(ConfigError, match=message):
        schedule(**settings)


@pytest.mark.parametrize(("age", "capacity"), [(0, 8), (1, 8), (2, 16), (4, 32)])
def test_capacity_is_twice_the_groups_of_the_longest_lead(age: int, capacity: int) -> None:
    assert schedule(age=age).capacity(4) == capacity
    assert schedule(age=age, start=5, lead=6).capacity(4) == 48
