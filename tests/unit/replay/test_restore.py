"""Restore: the order of its filters, changed settings, and that nothing is lost through it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import LedgerState, OrdinalStatus
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.state import BufferState, from_json, to_json
from megatron_ppo.testing.fakes import make_group
from megatron_ppo.testing.strategies import prompt_groups

no_deadline = settings(deadline=None)  # the machine may be busy; time is not what these tests check

Row = tuple[int, int]  # generation version, target step


def new_buffer(*, age: int = 1, prompts: int = 2, generations: int = 2, start: int = 0) -> PromptGroupBuffer:
    schedule = AsyncSchedule(
        max_num_steps=100, max_trajectory_age_steps=age, policy_training_start_step=start
    )
    return PromptGroupBuffer(
        schedule=schedule, num_prompts_per_step=prompts, num_generations_per_prompt=generations
    )


def saved(
    *rows: Row, lowest_unfinished: int, next_ordinal: int | None = None, prompts: int = 2
) -> BufferState:
    """A snapshot whose row i is the group of ordinal i; no ordinal was trained."""
    return BufferState(
        num_prompts_per_step=prompts,
        num_generations_per_prompt=2,
        lowest_unfinished=lowest_unfinished,
        ledger=LedgerState(next_ordinal=len(rows) if next_ordinal is None else next_ordinal, cut=0),
        groups=tuple(
            make_group(ordinal=i, target_step=target, versions=(version,))
            for i, (version, target) in enumerate(rows)
        ),
    )


def targets(buffer: PromptGroupBuffer) -> list[int]:
    return [group.target_step for group in buffer.groups()]


def slots_offered(buffer: PromptGroupBuffer, step: int, frontier: int) -> list[Row]:
    buffer.open(step, frontier)
    return [(r.ordinal, r.target_step) for r in buffer.reserve(1000)]


def test_past_targets_go_and_incomplete_ones_are_kept_to_be_filled() -> None:
    """R1 and R2: N = 2, resume at 2."""
    buffer = new_buffer()
    report = buffer.restore(saved((0, 1), (1, 2), (1, 2), (2, 3), lowest_unfinished=1), resume_step=2)
    assert targets(buffer) == [2, 2, 3]
    assert buffer.lowest_unfinished == 2
    assert (report.kept, report.past) == (3, 1)
    assert buffer.status().ready[2] == 2
    # The prompt of the past group comes first, and only the missing slot of target 3 is offered.
    assert slots_offered(buffer, 2, 3) == [(0, 3)]


def test_an_empty_snapshot_starts_at_the_resume_step() -> None:
    """R3."""
    buffer = new_buffer()
    buffer.restore(saved(lowest_unfinished=5), resume_step=5)
    assert buffer.lowest_unfinished == 5
    assert slots_offered(buffer, 5, 5) == [(0, 5), (1, 5)]


def test_age_is_filtered_before_completeness() -> None:
    """R4: versions 0, 1 and 4 for target 5 at age 1; only the last is young enough."""
    buffer = new_buffer()
    report = buffer.restore(saved((0, 5), (1, 5), (4, 5), lowest_unfinished=5), resume_step=5)
    assert [group.min_version for group in buffer.groups()] == [4]
    assert report.stale == 2
    assert buffer.status().ready[5] == 1
    assert slots_offered(buffer, 5, 5) == [(0, 5)]


def test_a_smaller_age_evicts_what_became_too_old() -> None:
    buffer = new_buffer(age=0)
    report = buffer.restore(saved((4, 5), (4, 5), (5, 6), lowest_unfinished=5), resume_step=5)
    assert (report.kept, report.stale) == (0, 3)
    assert sorted(buffer.status().pending) == [0, 1, 2]


def test_a_later_policy_start_evicts_groups_that_would_come_from_the_future() -> None:
    buffer = new_buffer(age=1, start=4)
    report = buffer.restore(saved((4, 5), (1, 5), lowest_unfinished=5), resume_step=5)
    assert (report.kept, report.stale) == (1, 1)


def test_targets_beyond_the_window_of_the_current_schedule_are_generated_again() -> None:
    buffer = new_buffer(age=1, start=10)
    report = buffer.restore(saved((0, 2), (0, 3), (0, 5), lowest_unfinished=2), resume_step=2)
    assert targets(buffer) == [2, 3]
    assert report.beyond_window == 1


def test_surplus_of_a_smaller_step_is_released_oldest_groups_stay() -> None:
    buffer = new_buffer(prompts=1)
    report = buffer.restore(saved((4, 5), (4, 5), (5, 6), lowest_unfinished=5), resume_step=5)
    assert [group.ordinal for group in buffer.groups()] == [0, 2]
    assert report.surplus == 1
    assert buffer.status().pending == {1: "restored group was surplus"}


def test_a_larger_step_is_filled_up() -> None:
    buffer = new_buffer(prompts=3)
    buffer.restore(saved((4, 5), (5, 5), lowest_unfinished=5, next_ordinal=2), resume_step=5)
    assert slots_offered(buffer, 5, 5) == [(2, 5)]


def test_changed_group_size_is_refused_with_the_way_out() -> None:
    with pytest.raises(
        CheckpointError, match=r"have 2 trajectories, the run has 4; .*load_replay_buffer=false"
    ):
        new_buffer(generations=4).restore(saved((5, 5), lowest_unfinished=5), resume_step=5)


def test_changed_group_size_is_fine_when_the_groups_are_generated_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """R13: the window is regenerated from the cut and no prompt is lost."""
    text = json.loads(to_json(saved((5, 5), (5, 5), (5, 6), lowest_unfinished=5)))
    text["groups"] = []
    buffer = new_buffer(generations=4)
    buffer.restore(from_json(json.dumps(text)), resume_step=5)
    assert "num_generations_per_prompt was 2 when saved, is 4 now" in caplog.text
    assert slots_offered(buffer, 5, 6) == [(0, 5), (1, 5), (2, 6), (3, 6)]


def test_snapshot_of_a_later_step_than_the_weights_is_refused() -> None:
    with pytest.raises(
        CheckpointError, match="has trained step 5 already, the weights have 5 completed steps"
    ):
        new_buffer().restore(saved(lowest_unfinished=6), resume_step=5)


def test_only_a_new_buffer_can_be_restored() -> None:
    buffer = new_buffer()
    buffer.open(0, 1)
    with pytest.raises(GroupMismatchError, match="in use"):
        buffer.restore(saved(lowest_unfinished=0), resume_step=0)


def test_ordinals_in_flight_at_the_save_are_generated_again() -> None:
    """R11 and R12: trained 0-4, buffered 6, 7, 10, in flight 5, 8, 9, 11."""
    state = BufferState(
        num_prompts_per_step=4,
        num_generations_per_prompt=2,
        lowest_unfinished=1,
        ledger=LedgerState(next_ordinal=12, cut=5),
        groups=tuple(make_group(ordinal=q, target_step=1 + (q > 7), versions=(0,)) for q in (6, 7, 10)),
    )
    buffer = new_buffer(age=2, prompts=4)
    buffer.restore(state, resume_step=1)
    offered = slots_offered(buffer, 1, 3)
    assert [ordinal for ordinal, _ in offered] == [5, 8, 9, 11, 12, 13, 14, 15, 16]
    assert [target for _, target in offered] == [1, 1, 2, 2, 2, 3, 3, 3, 3]
    assert buffer.status().pending == {}


def test_next_ordinal_after_a_restore_counts_discarded_groups() -> None:
    """R8: saved 7 (kept) and 41 (stale)."""
    state = BufferState(
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        lowest_unfinished=5,
        ledger=LedgerState(next_ordinal=42, cut=7, trained=tuple(range(8, 41))),
        groups=(
            make_group(ordinal=7, target_step=5, versions=(4,)),
            make_group(ordinal=41, target_step=5, versions=(0,)),
        ),
    )
    buffer = new_buffer()
    buffer.restore(state, resume_step=5)
    assert [group.ordinal for group in buffer.groups()] == [7]
    assert slots_offered(buffer, 5, 6) == [(41, 5), (42, 6), (43, 6)]


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((make_group(ordinal=0, target_step=5), make_group(ordinal=0, target_step=6)), "an ordinal twice"),
        ((make_group(ordinal=1, target_step=5),), r"ordinals that are not open: \[1\]"),
        ((make_group(ordinal=9, target_step=5),), r"ordinals that are not open: \[9\]"),
        ((make_group(ordinal=0, target_step=5, num_generations=3),), "has 3 trajectories, expected 2"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(groups: tuple[PromptGroup, ...], message: str) -> None:
    state = BufferState(
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        lowest_unfinished=5,
        ledger=LedgerState(next_ordinal=3, cut=0, trained=(1,)),
        groups=groups,
    )
    buffer = new_buffer()
    with pytest.raises(CheckpointError, match=message):
        buffer.restore(state, resume_step=5)
    assert len(buffer) == 0 and buffer.ledger.next_ordinal == 0  # a refusal leaves nothing half-restored


@no_deadline
@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(3, 9)), max_size=20),
    age=st.integers(0, 3),
    prompts=st.integers(1, 4),
)
def test_every_saved_prompt_is_kept_or_pending_after_any_restore(
    rows: list[Row], age: int, prompts: int
) -> None:
    buffer = new_buffer(age=age, prompts=prompts)
    report = buffer.restore(saved(*rows, lowest_unfinished=3), resume_step=4)
    kept = {group.ordinal for group in buffer.groups()}
    pending = set(buffer.ledger.ordinals(OrdinalStatus.PENDING))
    assert kept | pending == set(range(len(rows))) and not kept & pending
    assert report.kept == len(kept) and report.num_rejected == len(pending)
    assert all(0 <= group.target_step - group.min_version <= age for group in buffer.groups())
    assert all(targets(buffer).count(target) <= prompts for target in range(4, 10))
    assert len(buffer) <= buffer.capacity


@settings(no_deadline, max_examples=40)
@given(st.data())
def test_snapshot_round_trip_is_exact(data: st.DataObject) -> None:
    """R6: every token, log-prob bit, version, reward and time survives; so do ledger and order."""
    groups = tuple(
        data.draw(prompt_groups(ordinal=q, target_step=q % 3, num_generations=2)) for q in range(3)
    )
    state = BufferState(
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        lowest_unfinished=0,
        ledger=LedgerState(next_ordinal=9, cut=0, trained=(4, 6), dropped={5: "filtered"}),
        groups=groups,
        failures={3: 2},
    )
    assert from_json(to_json(state)) == state


def test_failures_of_a_prompt_are_kept_until_a_group_of_it_succeeds() -> None:
    first = new_buffer()
    first.open(0, 0)
    slots = first.reserve(2)
    assert first.release(slots[0], reason="deadline", failed=True)
    assert first.release(slots[1], reason="the collector stopped")
    second = new_buffer()
    second.restore(from_json(to_json(first.state())), resume_step=0)
    second.open(0, 0)
    again = second.reserve(2)
    assert [slot.failures for slot in again] == [1, 0]
    assert again == slots  # the count is no part of what a reservation is
    second.release(again[0], reason="deadline", failed=True)
    (third,) = second.reserve(1)
    assert (third.ordinal, third.failures) == (0, 2)
    second.commit(make_group(ordinal=0, target_step=0, opened_at_step=0, versions=[0]))
    assert second.state().failures == {}


def test_a_snapshot_from_before_failures_were_saved_is_read() -> None:
    data = json.loads(to_json(saved((4, 5), lowest_unfinished=5)))
    del data["failures"]
    assert from_json(json.dumps(data)).failures == {}


def test_taking_works_after_a_round_trip() -> None:
    """R6."""
    buffer = new_buffer()
    buffer.restore(from_json(to_json(saved((4, 5), (5, 5), lowest_unfinished=5))), resume_step=5)
    buffer.open(5, 6)
    groups = buffer.take(5)
    assert groups is not None and [group.ordinal for group in groups] == [0, 1]


@pytest.mark.parametrize(
    "key",
    ["next_ordinal", "cut", "trained", "dropped", "groups", "lowest_unfinished", "num_prompts_per_step"],
)
def test_a_missing_key_is_named(key: str) -> None:
    """R5."""
    data = json.loads(to_json(saved((5, 5), lowest_unfinished=5)))
    del data[key]
    with pytest.raises(CheckpointError, match=f"key '{key}' is missing"):
        from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{", '{"format_version": 1, "groups": ['])
def test_a_torn_snapshot_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="not JSON"):
        from_json(text)


def test_another_format_is_refused() -> None:
    for text in ("[]", '{"format_version": 2}'):
        with pytest.raises(CheckpointError, match="this version reads 1"):
            from_json(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tokens", "AAA"),
        ("tokens", ""),
        ("logprobs", "AAAA"),
        ("finish_reason", "abort"),
        ("spans", [[0, 0, 9]]),
    ],
)
def test_damaged_content_is_refused(field: str, value: object) -> None:
    data = json.loads(to_json(saved((5, 5), lowest_unfinished=5)))
    data["groups"][0]["trajectories"][0][field] = value
    with pytest.raises(CheckpointError, match="damaged content"):
        from_json(json.dumps(data))


def test_a_snapshot_costs_a_few_bytes_per_token() -> None:
    group = make_group(ordinal=0, target_step=0, versions=(0,) * 1000, num_generations=4)
    state = BufferState(
        num_prompts_per_step=1,
        num_generations_per_prompt=4,
        lowest_unfinished=0,
        ledger=LedgerState(next_ordinal=1),
        groups=(group,),
    )
    # 4 bytes of id and 4 of log-prob, times 4/3 for base64, plus some keys.
    assert len(to_json(state)) < 4000 * 11 + 2000
