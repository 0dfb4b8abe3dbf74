"""The prompt ledger: a state machine that loses and doubles nothing, and its snapshot."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import Ledger, LedgerState, OrdinalStatus

MOVES = {
    "make_ready": {OrdinalStatus.RESERVED},
    "release": {OrdinalStatus.RESERVED, OrdinalStatus.READY},
    "mark_trained": {OrdinalStatus.READY},
    "reserve": {OrdinalStatus.PENDING},
}
AFTER = {
    "make_ready": OrdinalStatus.READY,
    "release": OrdinalStatus.PENDING,
    "mark_trained": OrdinalStatus.TRAINED,
    "reserve": OrdinalStatus.RESERVED,
}
FINAL = {OrdinalStatus.TRAINED, OrdinalStatus.DROPPED}


class LedgerMachine(RuleBasedStateMachine):
    """Any sequence of moves and restarts against a plain dictionary of states."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.model: dict[int, OrdinalStatus] = {}
        self.lowest_seen_cut = 0

    @rule()
    def hand_out(self) -> None:
        pending = [q for q, status in self.model.items() if status is OrdinalStatus.PENDING]
        expected = min(pending, default=len(self.model))
        assert self.ledger.reserve_next() == expected
        self.model[expected] = OrdinalStatus.RESERVED

    @precondition(lambda self: self.model)
    @rule(data=st.data(), move=st.sampled_from(sorted(MOVES)))
    def move(self, data: st.DataObject, move: str) -> None:
        ordinal = data.draw(st.sampled_from(sorted(self.model)))
        if self.model[ordinal] in MOVES[move]:
            getattr(self.ledger, move)(ordinal)
            self.model[ordinal] = AFTER[move]
        else:
            with pytest.raises(GroupMismatchError, match=f"ordinal {ordinal} is"):
                getattr(self.ledger, move)(ordinal)

    @precondition(lambda self: any(status not in FINAL for status in self.model.values()))
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        ordinal = data.draw(st.sampled_from([q for q, status in self.model.items() if status not in FINAL]))
        self.ledger.drop(ordinal, reason="filtered")
        self.model[ordinal] = OrdinalStatus.DROPPED
        assert self.ledger.drop_reason(ordinal) == "filtered"

    @rule()
    def restart(self) -> None:
        self.ledger = Ledger(self.ledger.state())
        for ordinal, status in self.model.items():
            if status not in FINAL:
                self.model[ordinal] = OrdinalStatus.PENDING

    @invariant()
    def every_ordinal_is_where_the_model_says(self) -> None:
        assert {q: self.ledger.status(q) for q in self.model} == self.model
        assert self.ledger.status(len(self.model)) is OrdinalStatus.FRESH
        self.ledger.check()
        trained = tuple(q for q, status in self.model.items() if status is OrdinalStatus.TRAINED)
        assert self.ledger.trained_ordinals() == tuple(sorted(trained))
        assert self.ledger.counts().trained == len(trained)
        assert self.ledger.trained_frontier == max(trained, default=-1) + 1

    @invariant()
    def the_cut_is_the_lowest_ordinal_that_is_not_final_and_never_moves_back(self) -> None:
        still_open = [q for q, status in self.model.items() if status not in FINAL]
        assert self.ledger.cut == min(still_open, default=len(self.model))
        assert self.ledger.cut >= self.lowest_seen_cut
        self.lowest_seen_cut = self.ledger.cut


TestLedgerMachine = LedgerMachine.TestCase
TestLedgerMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def train_in_order(ledger: Ledger, count: int) -> None:
    for _ in range(count):
        ordinal = ledger.reserve_next()
        ledger.make_ready(ordinal)
        ledger.mark_trained(ordinal)


def test_snapshot_stays_small_however_long_the_run() -> None:
    ledger = Ledger()
    train_in_order(ledger, 10_000)
    assert ledger.state() == LedgerState(next_ordinal=10_000, cut=10_000)
    assert len(ledger.trained_ordinals()) == 10_000


def test_resume_hands_out_exactly_what_was_neither_trained_nor_kept() -> None:
    """R11, R12: trained 0-4, buffered 6, 7, 10, in flight 5, 8, 9, 11; a live cursor would lose these."""
    ledger = Ledger()
    train_in_order(ledger, 5)
    assert [ledger.reserve_next() for _ in range(7)] == [5, 6, 7, 8, 9, 10, 11]
    for ordinal in (6, 7, 10):
        ledger.make_ready(ordinal)
    assert ledger.state() == LedgerState(next_ordinal=12, cut=5)

    resumed = Ledger(ledger.state())
    for ordinal in (6, 7, 10):
        resumed.reserve(ordinal)
        resumed.make_ready(ordinal)
    assert [resumed.reserve_next() for _ in range(8)] == [5, 8, 9, 11, 12, 13, 14, 15]


def test_cut_lies_below_the_trained_frontier_when_a_hole_was_filled_out_of_order() -> None:
    """Target 0 lost 3-7 and was refilled with 16-20, while 8-15 are still being generated."""
    ledger = Ledger()
    ordinals = [ledger.reserve_next() for _ in range(21)]
    for ordinal in [*ordinals[:3], *ordinals[16:]]:
        ledger.make_ready(ordinal)
        ledger.mark_trained(ordinal)
    for ordinal in ordinals[3:8]:
        ledger.drop(ordinal, reason="generation failed")
    assert ledger.cut == 8
    assert ledger.trained_frontier == 21
    assert ledger.state().trained == (16, 17, 18, 19, 20)
    resumed = Ledger(ledger.state())
    assert [resumed.reserve_next() for _ in range(9)] == [8, 9, 10, 11, 12, 13, 14, 15, 21]
    assert Ledger(resumed.state()).state().trained == (16, 17, 18, 19, 20)  # carried on until the cut passes


def test_next_ordinal_counts_discarded_ordinals_too() -> None:
    """R8: saved 7 (kept) and 41 (stale) -> the next fresh one is 42."""
    ledger = Ledger(LedgerState(next_ordinal=42, cut=42))
    assert ledger.reserve_next() == 42


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (LedgerState(next_ordinal=3, cut=4), "cut 4 must lie in"),
        (LedgerState(next_ordinal=3, cut=1, trained=(0,)), r"trained ordinals \[0\] lie outside \[1, 3\)"),
        (LedgerState(next_ordinal=3, cut=1, trained=(3,)), r"trained ordinals \[3\] lie outside"),
        (LedgerState(next_ordinal=3, cut=1, dropped={5: "x"}), r"dropped ordinals \[5\] lie outside"),
        (
            LedgerState(next_ordinal=3, cut=1, trained=(2,), dropped={2: "x"}),
            r"both trained and dropped: \[2\]",
        ),
        (LedgerState(next_ordinal=3, cut=1, trained=(2, 2)), "recorded twice"),
    ],
)
def test_a_snapshot_that_contradicts_itself_is_refused(state: LedgerState, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Ledger(state)


def test_an_ordinal_that_vanished_is_noticed() -> None:
    ledger = Ledger()
    ledger.reserve_next()
    ledger._active.clear()  # what a bug would do
    with pytest.raises(GroupMismatchError, match="out of balance"):
        ledger.check()


def test_only_open_states_can_be_listed_and_negative_ordinals_are_refused() -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match="only open states"):
        ledger.ordinals(OrdinalStatus.TRAINED)
    with pytest.raises(ValueError, match="got -1"):
        ledger.status(-1)
