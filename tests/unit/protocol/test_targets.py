"""The table of targets: slots, their order, and the refusals."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.errors import GroupMismatchError
from megatron_ppo.protocol.targets import SlotState, TargetTable

no_deadline = settings(deadline=None)  # the machine may be busy; time is not what these tests check


def filled(target: int, ordinals: list[int], *, slots: int = 2) -> TargetTable:
    table = TargetTable(slots_per_target=slots, lowest_unfinished=target)
    for ordinal in ordinals:
        table.reserve(target, ordinal)
        table.make_ready(target, ordinal)
    return table


def test_new_table_has_no_targets_and_misses_everything() -> None:
    table = TargetTable(slots_per_target=3)
    assert list(table) == []
    assert table.lowest_unfinished == 0
    assert table.missing(5) == 3
    assert table.state_of(0, 0) is None


def test_slots_go_from_reserved_to_ready_to_consumed() -> None:
    table = TargetTable(slots_per_target=2)
    table.reserve(0, 7)
    table.reserve(0, 8)
    assert table.state_of(0, 7) is SlotState.RESERVED
    table.make_ready(0, 8)
    assert table.consume(0) is None
    table.make_ready(0, 7)
    assert table.state_of(0, 7) is SlotState.READY
    assert table.consume(0) == (8, 7)  # first finished first
    assert table.lowest_unfinished == 1
    assert table.missing(0) == 0
    assert list(table) == []


def test_released_slot_makes_its_target_the_next_to_reserve() -> None:
    table = TargetTable(slots_per_target=1)
    table.reserve(0, 0)
    table.reserve(1, 1)
    assert table.next_to_reserve(frontier=1) is None
    assert table.next_to_reserve(frontier=2) == 2
    table.release(0, 0)
    assert table.next_to_reserve(frontier=2) == 0


def test_a_finished_target_cannot_be_reserved() -> None:
    table = filled(0, [0, 1])
    table.consume(0)
    with pytest.raises(GroupMismatchError, match=r"target step 0 is finished; .* is 1"):
        table.reserve(0, 2)


def test_a_full_target_cannot_be_reserved() -> None:
    with pytest.raises(GroupMismatchError, match="all 2 are reserved or ready"):
        filled(0, [0, 1]).reserve(0, 2)


def test_targets_are_consumed_in_order_only() -> None:
    table = filled(1, [0, 1])
    with pytest.raises(
        GroupMismatchError, match="target step 2 cannot be consumed; the lowest unfinished is 1"
    ):
        table.consume(2)
    table.consume(1)
    with pytest.raises(GroupMismatchError, match="target step 1 cannot be consumed"):
        table.consume(1)


@pytest.mark.parametrize("move", ["make_ready", "release"])
def test_a_slot_that_is_not_held_cannot_move(move: str) -> None:
    table = TargetTable(slots_per_target=1)
    table.reserve(0, 0)
    with pytest.raises(GroupMismatchError, match="ordinal 9 holds no"):
        getattr(table, move)(0, 9)


def test_skipping_gives_back_ready_and_reserved_ordinals() -> None:
    table = filled(0, [4])
    table.reserve(0, 5)
    table.reserve(1, 6)
    assert table.skip_to(1) == (4, 5)
    assert table.skip_to(0) == ()
    assert table.lowest_unfinished == 1
    assert table.reserved(1) == (6,)


@no_deadline
@given(st.integers(1, 4), st.lists(st.integers(0, 5), max_size=40))
def test_no_target_ever_gets_more_slots_than_it_has(slots: int, targets: list[int]) -> None:
    table = TargetTable(slots_per_target=slots)
    for ordinal, target in enumerate(targets):
        if table.missing(target):
            table.reserve(target, ordinal)
        else:
            with pytest.raises(GroupMismatchError):
                table.reserve(target, ordinal)
    assert all(len(table.reserved(target)) + table.missing(target) == slots for target in range(6))
