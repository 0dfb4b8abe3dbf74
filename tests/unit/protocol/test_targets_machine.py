"""The table of targets and the schedule as one state machine, against a model of plain lists.

A learner and a collector do whatever they may, in any order, and now and then what they may not. Checked at every
point: the table holds what the model holds, a refused move changes nothing, targets end in increasing order with their
groups in the order of completion, and what is reserved inside the schedule's window will be within the age bound when
its step comes.
"""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_ppo.protocol.errors import GroupMismatchError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.targets import SlotState, TargetTable
from megatron_ppo.testing.strategies import schedules


class TargetMachine(RuleBasedStateMachine):
    """`reserved` and `ready` are the model: ordinals per target, in the order in which they came."""

    @initialize(schedule=schedules(max_age=2, max_start=2, max_lead=4, max_steps=8), slots=st.integers(1, 3))
    def start(self, schedule: AsyncSchedule, slots: int) -> None:
        self.schedule, self.slots, self.step = schedule, slots, 0
        self.table = TargetTable(slots_per_target=slots)
        self.reserved: dict[int, list[int]] = {}
        self.ready: dict[int, list[int]] = {}
        self.num_ordinals = 0
        self.finished: list[int] = []  # consumed ordinals

    def _window(self) -> range:
        return range(self.step, self.schedule.frontier(self.step) + 1)

    def _held(self, target: int) -> int:
        return len(self.reserved.get(target, ())) + len(self.ready.get(target, ()))

    def _is_over(self) -> bool:
        return self.step >= self.schedule.max_num_steps

    def _reserve(self, target: int) -> None:
        # Sampled now at the earliest, trained on at `target`.
        age = self.schedule.age(generation_version=self.schedule.version_at(self.step), target_step=target)
        assert 0 <= age <= self.schedule.max_trajectory_age_steps
        self.table.reserve(target, self.num_ordinals)
        self.reserved.setdefault(target, []).append(self.num_ordinals)
        self.num_ordinals += 1

    @precondition(lambda self: not self._is_over())
    @rule(limit=st.integers(1, 12))
    def reserve_the_next(self, limit: int) -> None:
        """As the buffer does, up to the end of the window."""
        for _ in range(limit):
            target = self.table.next_to_reserve(self.schedule.frontier(self.step))
            assert target == next((t for t in self._window() if self._held(t) < self.slots), None)
            if target is not None:
                self._reserve(target)

    @precondition(lambda self: not self._is_over())
    @rule(data=st.data())
    def reserve_anywhere(self, data: st.DataObject) -> None:
        target = data.draw(st.integers(0, self.schedule.frontier(self.step)))
        if target < self.step or self._held(target) == self.slots:
            with pytest.raises(GroupMismatchError):
                self.table.reserve(target, 10**6)
        else:
            self._reserve(target)

    @rule(data=st.data(), move=st.sampled_from(["make_ready", "release"]))
    def move(self, data: st.DataObject, move: str) -> None:
        """A slot that the table holds, or one that it does not hold there."""
        target = data.draw(st.integers(0, self.schedule.max_num_steps))
        ordinal = data.draw(st.integers(0, self.num_ordinals))
        here = {
            SlotState.RESERVED: self.reserved.get(target, []),
            SlotState.READY: self.ready.get(target, []),
        }
        state = next((state for state, ordinals in here.items() if ordinal in ordinals), None)
        if state is None or (move == "make_ready" and state is SlotState.READY):
            with pytest.raises(GroupMismatchError):
                getattr(self.table, move)(target, ordinal)
            return
        getattr(self.table, move)(target, ordinal)
        here[state].remove(ordinal)
        if move == "make_ready":
            self.ready.setdefault(target, []).append(ordinal)

    @precondition(lambda self: self.reserved.get(self.step))
    @rule(data=st.data())
    def finish_the_step(self, data: st.DataObject) -> None:
        """In any order; so that steps become complete more often than `move` makes them."""
        for ordinal in data.draw(st.permutations(self.reserved.pop(self.step))):
            self.table.make_ready(self.step, ordinal)
            self.ready.setdefault(self.step, []).append(ordinal)

    @precondition(lambda self: not self._is_over())
    @rule()
    def consume(self) -> None:
        groups = self.ready.get(self.step, [])
        taken = self.table.consume(self.step)
        if len(groups) < self.slots:
            assert taken is None
            return
        assert taken == tuple(groups)
        self.finished += groups
        del self.ready[self.step]
        self.reserved.pop(self.step, None)
        self.step += 1

    @rule(other=st.integers(0, 9))
    def consume_out_of_order(self, other: int) -> None:
        if other != self.step:
            with pytest.raises(GroupMismatchError):
                self.table.consume(other)

    @precondition(lambda self: not self._is_over())
    @rule(ahead=st.integers(-1, 2))
    def skip(self, ahead: int) -> None:
        """A run continues from a checkpoint of a later step than the buffer's, or of an earlier one."""
        to = max(0, min(self.step + ahead, self.schedule.max_num_steps))
        below = sorted(t for t in {*self.reserved, *self.ready} if t < to)
        lost = tuple(
            ordinal for t in below for ordinal in (*self.ready.pop(t, ()), *self.reserved.pop(t, ()))
        )
        assert self.table.skip_to(to) == lost
        self.step = max(self.step, to)

    @invariant()
    def the_table_holds_what_the_model_holds(self) -> None:
        targets = range(self.schedule.max_num_steps + 1)
        assert list(self.table) == [t for t in targets if self._held(t)]
        assert self.table.lowest_unfinished == self.step
        for target in targets:
            assert list(self.table.reserved(target)) == self.reserved.get(target, [])
            assert list(self.table.ready(target)) == self.ready.get(target, [])
            free = self.slots - self._held(target)
            assert self.table.missing(target) == (free if target >= self.step else 0)
            assert free >= 0

    @invariant()
    def every_ordinal_has_one_place_at_most(self) -> None:
        places = [q for held in (self.reserved, self.ready) for t in held for q in held[t]] + self.finished
        assert len(places) == len(set(places))
        for held, state in ((self.reserved, SlotState.RESERVED), (self.ready, SlotState.READY)):
            for target, ordinals in held.items():
                assert all(self.table.state_of(target, q) is state for q in ordinals)


TestTargetMachine = TargetMachine.TestCase
# The machine may be busy; time is not what this checks.
TestTargetMachine.settings = settings(deadline=None, max_examples=50, stateful_step_count=30)
