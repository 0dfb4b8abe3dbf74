"""The buffer's rules one by one, with numbers. Names of cases are those of the list of properties."""

from __future__ import annotations

import pytest

from megatron_ppo.protocol.errors import ConfigError, GroupMismatchError
from megatron_ppo.protocol.ledger import OrdinalStatus
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup, Reservation
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.status import diagnose, distribution
from megatron_ppo.testing.fakes import make_group


def new_buffer(
    *,
    age: int = 1,
    start: int = 0,
    lead: int | None = None,
    prompts: int = 2,
    steps: int = 100,
    takes_in_ordinal_order: bool = False,
) -> PromptGroupBuffer:
    schedule = AsyncSchedule(
        max_num_steps=steps,
        max_trajectory_age_steps=age,
        policy_training_start_step=start,
        warmup_generation_lead_steps=lead,
    )
    return PromptGroupBuffer(
        schedule=schedule,
        num_prompts_per_step=prompts,
        num_generations_per_prompt=2,
        takes_in_ordinal_order=takes_in_ordinal_order,
    )


def group_for(reservation: Reservation, *, version: int = 0, generations: int = 2) -> PromptGroup:
    return make_group(
        ordinal=reservation.ordinal,
        target_step=reservation.target_step,
        opened_at_step=reservation.opened_at_step,
        versions=(version, version),
        num_generations=generations,
    )


def fill(buffer: PromptGroupBuffer, *, version: int = 0) -> list[Reservation]:
    """Fill the whole open window."""
    reservations = buffer.reserve(1000)
    for reservation in reservations:
        buffer.commit(group_for(reservation, version=version))
    return reservations


def ordinals(groups: list[PromptGroup] | None) -> list[int] | None:
    return None if groups is None else [group.ordinal for group in groups]


@pytest.mark.parametrize("key", ["num_prompts_per_step", "num_generations_per_prompt"])
@pytest.mark.parametrize("value", [0, -1])
def test_impossible_sizes_are_refused(key: str, value: int) -> None:
    """B1, construction."""
    sizes = {"num_prompts_per_step": 1, "num_generations_per_prompt": 1, key: value}
    with pytest.raises(ConfigError, match=f"algorithm.{key} must be >= 1, got {value}"):
        PromptGroupBuffer(schedule=AsyncSchedule(max_num_steps=1), **sizes)


def test_new_buffer_is_empty_closed_and_starts_at_target_zero() -> None:
    """B1."""
    buffer = new_buffer()
    assert len(buffer) == 0
    assert buffer.window is None
    assert buffer.lowest_unfinished == 0
    assert buffer.reserve(1) == []
    assert buffer.take(0) is None


def test_a_window_offers_exactly_its_slots_and_then_none() -> None:
    """B2: what the reference answers with "full" cannot happen here; there is no reservation to commit."""
    buffer = new_buffer(age=1, prompts=2)
    buffer.open(0, 1)
    assert [r.target_step for r in buffer.reserve(10)] == [0, 0, 1, 1]
    assert buffer.reserve(10) == []


def test_take_returns_only_groups_of_its_own_target() -> None:
    """B3 and B7: nothing is borrowed from another target, which stays as it is."""
    buffer = new_buffer(age=2)
    buffer.open(0, 2)
    fill(buffer)
    assert ordinals(buffer.take(0)) == [0, 1]
    assert buffer.lowest_unfinished == 1
    assert buffer.status().ready == {1: 2, 2: 2}


def test_an_incomplete_target_gives_nothing_and_changes_nothing() -> None:
    """B4 and B5: the learner never trains short, and committing does not finish a target."""
    buffer = new_buffer()
    buffer.open(0, 1)
    first, second = buffer.reserve(2)
    buffer.commit(group_for(first))
    assert buffer.take(0) is None
    assert (len(buffer), buffer.lowest_unfinished) == (1, 0)
    buffer.commit(group_for(second))
    assert ordinals(buffer.take(0)) == [0, 1]
    assert buffer.lowest_unfinished == 1


def test_groups_of_skipped_targets_are_released_and_their_prompts_come_again() -> None:
    """B6: nothing of a past target lingers."""
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    fill(buffer)
    buffer.open(2, 3)
    assert len(buffer) == 0
    assert buffer.status().counters.evicted == 4
    assert [(r.ordinal, r.target_step) for r in buffer.reserve(5)] == [(0, 2), (1, 2), (2, 3), (3, 3)]


def test_a_group_that_finishes_after_its_target_was_skipped_is_counted_and_not_stored() -> None:
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    late = buffer.reserve(1)[0]
    buffer.open(2, 3)
    buffer.commit(group_for(late))
    assert (len(buffer), buffer.status().counters.late_commits) == (0, 1)
    assert buffer.ledger.status(late.ordinal) is OrdinalStatus.PENDING


def test_targets_that_hold_groups_are_listed() -> None:
    """B8."""
    buffer = new_buffer(age=3, prompts=1)
    buffer.open(0, 3)
    reservations = buffer.reserve(4)
    for reservation in (reservations[1], reservations[3]):
        buffer.commit(group_for(reservation))
    assert buffer.status().ready == {1: 1, 3: 1}
    assert buffer.status().reserved == {0: (0,), 2: (2,)}


def test_groups_leave_in_the_order_in_which_they_were_finished() -> None:
    """B9."""
    buffer = new_buffer(prompts=3)
    buffer.open(0, 1)
    reservations = buffer.reserve(3)
    for reservation in (reservations[2], reservations[0], reservations[1]):
        buffer.commit(group_for(reservation))
    assert ordinals(buffer.take(0)) == [2, 0, 1]


def test_groups_of_a_deterministic_run_leave_in_ordinal_order() -> None:
    buffer = new_buffer(prompts=3, takes_in_ordinal_order=True)
    buffer.open(0, 1)
    reservations = buffer.reserve(3)
    for reservation in (reservations[2], reservations[0], reservations[1]):
        buffer.commit(group_for(reservation))
    assert ordinals(buffer.take(0)) == [0, 1, 2]
    assert buffer.trained_ordinals() == (0, 1, 2)


def test_content_is_summarised_by_mean_median_maximum_and_percentile() -> None:
    """B12."""
    groups = [
        make_group(ordinal=0, target_step=1, versions=(0,) * 100, duration_s=10.0, num_generations=1),
        make_group(ordinal=1, target_step=3, versions=(1,) * 200, duration_s=20.0, num_generations=1),
    ]
    report = diagnose(groups)
    duration, tokens = report.group_duration_s, report.response_tokens
    assert duration is not None and tokens is not None
    assert (duration.mean, duration.median, duration.max, duration.p95) == (15.0, 15.0, 20.0, 20.0)
    assert (tokens.mean, tokens.p95) == (150.0, 200.0)
    assert (report.size, report.versions, report.targets) == (2, (0, 1), (1, 3))
    assert diagnose([]).group_duration_s is None
    hundred = distribution([float(value) for value in range(1, 101)])
    assert hundred is not None and hundred.p95 == 95.0


@pytest.mark.parametrize("age", [0, 1, 2, 3, 4])
def test_occupancy_never_exceeds_one_step_more_than_the_age(age: int) -> None:
    """B13: an infinitely fast generator, no warm-up."""
    buffer = new_buffer(age=age, prompts=3, steps=30)
    most = 0
    for step in range(30):
        buffer.open(step, min(step + age, 29))
        fill(buffer, version=step)
        most = max(most, len(buffer))
        groups = buffer.take(step)
        assert groups is not None
        assert {step - group.min_version for group in groups} == {min(age, step)}
    assert most == 3 * (age + 1) <= buffer.capacity


@pytest.mark.parametrize(
    ("start", "age", "lead", "steps", "generation_versions"),
    [
        pytest.param(0, 1, None, 4, [0, 0, 1, 2], id="table 2.1"),
        pytest.param(0, 2, None, 4, [0, 0, 0, 1], id="table 2.2"),
        # In weight versions, which do not count frozen steps: step 7 trains on version 2, one behind.
        pytest.param(4, 1, 4, 8, [0, 0, 0, 0, 0, 0, 1, 2], id="table 2.3"),
        pytest.param(4, 2, 6, 9, [0, 0, 0, 0, 0, 0, 0, 1, 2], id="table 2.4"),
    ],
)
def test_windows_of_the_worked_examples(
    start: int, age: int, lead: int | None, steps: int, generation_versions: list[int]
) -> None:
    buffer = new_buffer(age=age, start=start, lead=lead, prompts=1)
    schedule = AsyncSchedule(
        max_num_steps=100,
        max_trajectory_age_steps=age,
        policy_training_start_step=start,
        warmup_generation_lead_steps=lead,
    )
    seen = []
    for step in range(steps):
        buffer.open(step, schedule.frontier(step))
        fill(buffer, version=schedule.version_at(step))
        groups = buffer.take(step)
        assert groups is not None
        seen.append(groups[0].min_version)
    assert seen == generation_versions


def test_no_target_at_or_beyond_the_last_step_is_ever_reserved() -> None:
    """C18."""
    buffer = new_buffer(age=4, prompts=1, steps=3)
    buffer.open(0, 2)
    assert [r.target_step for r in buffer.reserve(100)] == [0, 1, 2]
    with pytest.raises(GroupMismatchError, match="the schedule allows 2"):
        buffer.open(1, 3)


def test_releasing_twice_is_harmless() -> None:
    """C4."""
    buffer = new_buffer()
    buffer.open(0, 1)
    reservation = buffer.reserve(1)[0]
    assert buffer.release(reservation, reason="first")
    assert not buffer.release(reservation, reason="again")
    assert buffer.status().pending == {0: "first"}


def test_releasing_an_old_reservation_does_not_touch_the_new_one_of_the_same_prompt() -> None:
    buffer = new_buffer(prompts=1)
    buffer.open(0, 0)
    old = buffer.reserve(1)[0]
    buffer.release(old, reason="failed")
    buffer.open(1, 1)
    renewed = buffer.reserve(1)[0]
    assert (renewed.ordinal, renewed.target_step) == (0, 1)
    assert not buffer.release(old, reason="late cancellation")
    buffer.commit(group_for(renewed))


def test_a_hole_at_the_learners_step_is_refilled_with_the_pending_prompt() -> None:
    """Reports 1 and 3: a failure after the version moved must not leave a hole for ever."""
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    fill(buffer)
    buffer.take(0)
    buffer.open(1, 2)
    failed = buffer.reserve(2)[0]
    buffer.release(failed, reason="engine died")
    assert [(r.ordinal, r.target_step) for r in buffer.reserve(1)] == [(failed.ordinal, failed.target_step)]


def test_late_failure_below_the_current_version_is_refilled() -> None:
    """#3938: the last slot of the step that the learner waits for fails after the window has moved."""
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    last = buffer.reserve(4)[3]
    for reservation in (Reservation(ordinal=q, target_step=q // 2, opened_at_step=0) for q in range(3)):
        buffer.commit(group_for(reservation))
    buffer.take(0)
    buffer.open(1, 2)
    buffer.release(last, reason="deadline")
    refill = buffer.reserve(1)[0]
    assert (refill.ordinal, refill.target_step) == (3, 1)
    buffer.commit(group_for(refill, version=1))
    assert ordinals(buffer.take(1)) == [2, 3]


def test_dropped_prompt_never_comes_back_and_its_slot_gets_another() -> None:
    buffer = new_buffer(prompts=1)
    buffer.open(0, 0)
    reservation = buffer.reserve(1)[0]
    assert buffer.drop(reservation, reason="always fails")
    assert not buffer.drop(reservation, reason="again")
    assert buffer.reserve(1)[0].ordinal == 1
    assert buffer.ledger.drop_reason(0) == "always fails"


def test_commit_without_reservation_is_refused() -> None:
    buffer = new_buffer()
    buffer.open(0, 1)
    with pytest.raises(GroupMismatchError, match="ordinal 5 for step 0 holds no reservation"):
        buffer.commit(make_group(ordinal=5, target_step=0))


def test_commit_to_another_target_or_twice_is_refused() -> None:
    """C10: never twice, never under another slot."""
    buffer = new_buffer()
    buffer.open(0, 1)
    reservation = buffer.reserve(1)[0]
    with pytest.raises(GroupMismatchError, match="holds no reservation"):
        buffer.commit(make_group(ordinal=0, target_step=1))
    buffer.commit(group_for(reservation))
    with pytest.raises(GroupMismatchError, match="the ordinal is ready"):
        buffer.commit(group_for(reservation))


def test_commit_after_training_is_refused() -> None:
    buffer = new_buffer(prompts=1)
    buffer.open(0, 0)
    reservation = fill(buffer)[0]
    buffer.take(0)
    with pytest.raises(GroupMismatchError, match="the ordinal is trained"):
        buffer.commit(group_for(reservation))


@pytest.mark.parametrize("generations", [1, 3])
def test_commit_of_the_wrong_number_of_trajectories_is_refused(generations: int) -> None:
    """C10."""
    buffer = new_buffer()
    buffer.open(0, 1)
    reservation = buffer.reserve(1)[0]
    with pytest.raises(GroupMismatchError, match=f"has {generations} trajectories, .* is 2"):
        buffer.commit(group_for(reservation, generations=generations))
    buffer.release(reservation, reason="wrong size")
    assert buffer.reserve(1)[0].ordinal == 0


def test_commit_of_mixed_prompts_is_refused() -> None:
    buffer = new_buffer()
    buffer.open(0, 1)
    reservation = buffer.reserve(1)[0]
    good = group_for(reservation)
    other = make_group(ordinal=77, target_step=0).trajectories[0]
    mixed = PromptGroup(
        ordinal=good.ordinal,
        target_step=good.target_step,
        opened_at_step=good.opened_at_step,
        trajectories=(good.trajectories[0], other),
        started_at=0.0,
        finished_at=1.0,
    )
    with pytest.raises(GroupMismatchError, match="mixes different prompts"):
        buffer.commit(mixed)


def test_commit_from_weights_newer_than_the_target_is_refused() -> None:
    buffer = new_buffer()
    buffer.open(0, 1)
    reservation = buffer.reserve(1)[0]
    with pytest.raises(GroupMismatchError, match=r"sampled by version 1, .* version 0 at most"):
        buffer.commit(group_for(reservation, version=1))


def test_a_group_too_old_for_its_target_is_released_and_counted() -> None:
    """An engine that did not get the announced weights must not feed the learner."""
    buffer = new_buffer(age=1, prompts=1)
    buffer.open(5, 6)
    reservation = buffer.reserve(1)[0]
    buffer.commit(group_for(reservation, version=3))
    assert len(buffer) == 0
    assert buffer.status().counters.stale_commits == 1
    assert buffer.status().pending == {0: "too old at commit (version 3)"}
    again = buffer.reserve(1)[0]
    buffer.commit(group_for(again, version=4))
    assert ordinals(buffer.take(5)) == [0]


def test_the_oldest_token_decides_the_age_of_a_mixed_group() -> None:
    buffer = new_buffer(age=1, prompts=1)
    buffer.open(5, 6)
    reservation = buffer.reserve(1)[0]
    mixed = make_group(ordinal=0, target_step=5, opened_at_step=5, versions=(3, 4, 5))
    buffer.commit(mixed)
    assert buffer.status().counters.stale_commits == 1
    assert buffer.reserve(1)[0] == reservation


def test_nothing_is_stale_in_normal_operation() -> None:
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    fill(buffer)
    counters = buffer.status().counters
    assert (counters.stale_commits, counters.evicted) == (0, 0)


def test_the_window_never_moves_back() -> None:
    buffer = new_buffer(age=2)
    buffer.open(3, 5)
    for step, frontier in ((2, 4), (3, 4)):
        with pytest.raises(GroupMismatchError, match="must not move back"):
            buffer.open(step, frontier)
    buffer.open(3, 5)


def test_a_step_that_can_never_be_taken_is_an_error_and_not_a_wait() -> None:
    buffer = new_buffer(age=1)
    buffer.open(0, 1)
    with pytest.raises(GroupMismatchError, match="step 2 cannot be taken, it lies beyond the frontier 1"):
        buffer.take(2)
    with pytest.raises(GroupMismatchError, match="target step 1 cannot be consumed"):
        buffer.take(1)


def test_a_reservation_needs_a_positive_limit() -> None:
    with pytest.raises(ValueError, match="limit must be >= 1, got 0"):
        new_buffer().reserve(0)


def test_status_names_what_a_stalled_step_waits_for() -> None:
    buffer = new_buffer(age=1, prompts=3)
    buffer.open(0, 1)
    reservations = buffer.reserve(3)
    buffer.commit(group_for(reservations[0]))
    buffer.release(reservations[2], reason="generation failed: deadline")
    text = buffer.status().describe(0)
    assert "step 0 has 1 of 3 groups; window 0..1" in text
    assert "ordinals [1]" in text
    assert "2 (generation failed: deadline)" in text
