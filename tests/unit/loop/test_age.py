"""Ages of the taken groups, and the assertion that must never fire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.loop.age import age_metrics
from megatron_ppo.protocol.errors import GroupMismatchError, StaleGroupError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.fakes import make_group
from megatron_ppo.testing.strategies import schedules

SCHEDULE = AsyncSchedule(max_num_steps=20, max_trajectory_age_steps=2, policy_training_start_step=3)


def test_ages_in_versions_and_in_steps_are_measured_separately() -> None:
    """Step 6 holds version 3. Versions do not advance in warm-up, announced steps do."""
    groups = [
        make_group(ordinal=0, target_step=6, opened_at_step=4, versions=(1, 1)),
        make_group(ordinal=1, target_step=6, opened_at_step=5, versions=(2, 3)),
        make_group(ordinal=2, target_step=6, opened_at_step=6, versions=(3,), num_generations=4),
    ]
    assert age_metrics(groups, schedule=SCHEDULE, step=6) == {
        "age/max_versions": 2.0,
        "age/mean_versions": (2 + 2 + 1 + 1 + 4 * 0) / 8,
        "age/mixed_versions_rate": 2 / 8,
        "train/avg_trajectory_age": (2 + 1 + 0) / 3,
    }


def test_banked_groups_of_warm_up_are_old_in_steps_and_fresh_in_versions() -> None:
    banked = make_group(ordinal=0, target_step=3, opened_at_step=0, versions=(0,))
    metrics = age_metrics([banked], schedule=SCHEDULE, step=3)
    assert (metrics["age/max_versions"], metrics["train/avg_trajectory_age"]) == (0.0, 3.0)


@pytest.mark.parametrize(
    ("versions", "error", "message"),
    [
        (
            (1,),
            StaleGroupError,
            "ordinal 9 has age 3 versions at step 7; .*max_trajectory_age_steps allows 2",
        ),
        ((1, 4, 4), StaleGroupError, "age 3 versions"),
        ((5,), GroupMismatchError, "sampled by version 5, but the learner at step 7 holds version 4"),
        ((3, 5), GroupMismatchError, "sampled by version 5, but the learner at step 7 holds version 4"),
    ],
)
def test_one_token_of_a_wrong_version_is_enough(
    versions: tuple[int, ...], error: type[Exception], message: str
) -> None:
    groups = [
        make_group(ordinal=8, target_step=7, versions=(4,)),
        make_group(ordinal=9, target_step=7, versions=versions),
    ]
    with pytest.raises(error, match=message):
        age_metrics(groups, schedule=SCHEDULE, step=7)


def test_a_group_of_another_step_is_refused() -> None:
    with pytest.raises(GroupMismatchError, match="ordinal 3 was reserved for step 8, taken at step 7"):
        age_metrics([make_group(ordinal=3, target_step=8, versions=(4,))], schedule=SCHEDULE, step=7)


@given(schedule=schedules(), data=st.data())
def test_exactly_the_versions_that_the_schedule_allows_are_accepted(
    schedule: AsyncSchedule, data: st.DataObject
) -> None:
    step = data.draw(st.integers(0, schedule.max_num_steps - 1))
    newest, oldest = schedule.version_at(step), schedule.oldest_version_for(step)
    for version in range(oldest, newest + 1):
        metrics = age_metrics(
            [make_group(ordinal=0, target_step=step, versions=(version,))], schedule=schedule, step=step
        )
        assert metrics["age/max_versions"] == newest - version <= schedule.max_trajectory_age_steps
    with pytest.raises(GroupMismatchError):
        age_metrics(
            [make_group(ordinal=0, target_step=step, versions=(newest + 1,))], schedule=schedule, step=step
        )
    if oldest > 0:
        with pytest.raises(StaleGroupError):
            age_metrics(
                [make_group(ordinal=0, target_step=step, versions=(oldest - 1,))],
                schedule=schedule,
                step=step,
            )
