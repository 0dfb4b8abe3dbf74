"""The buffer as a state machine: any interleaving of learner, collector, failures, saves and crashes.

Checked at every point: nothing lost, nothing trained twice, the age bound on every take, FIFO, conservation.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from megatron_ppo.protocol.ledger import OrdinalStatus
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Reservation
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.state import from_json, to_json
from megatron_ppo.testing.fakes import make_group
from megatron_ppo.testing.strategies import schedules


class BufferMachine(RuleBasedStateMachine):
    """Learner and collector in one thread, with the weights published before the window opens."""

    @initialize(schedule=schedules(max_steps=10), prompts=st.integers(1, 3))
    def start(self, schedule: AsyncSchedule, prompts: int) -> None:
        self.schedule, self.prompts, self.step = schedule, prompts, 0
        self.flying: dict[Reservation, int] = {}  # reservation -> version at its start
        self.trained: list[int] = []
        self.dropped: set[int] = set()
        self.passed_over: set[int] = set()
        self.commits: list[int] = []
        self.buffer = self._new_buffer()
        self.saved = (to_json(self.buffer.state()), 0, 0)
        self._open()

    def _new_buffer(self) -> PromptGroupBuffer:
        return PromptGroupBuffer(
            schedule=self.schedule, num_prompts_per_step=self.prompts, num_generations_per_prompt=2
        )

    def _open(self) -> None:
        self.buffer.open(self.step, self.schedule.frontier(self.step))

    def _is_over(self) -> bool:
        return self.step >= self.schedule.max_num_steps

    @rule(limit=st.integers(1, 5))
    def reserve(self, limit: int) -> None:
        pending = self.buffer.ledger.ordinals(OrdinalStatus.PENDING)
        before = tuple(q for q in pending if q not in self.passed_over)
        reservations = self.buffer.reserve(limit)
        version = self.schedule.version_at(self.step)
        for reservation in reservations:
            assert (
                self.buffer.lowest_unfinished <= reservation.target_step <= self.schedule.frontier(self.step)
            )
            assert reservation.target_step < self.schedule.max_num_steps
            self.flying[reservation] = version
        handed_out = [reservation.ordinal for reservation in reservations]
        assert handed_out == sorted(handed_out)
        assert tuple(handed_out[: len(before)]) == before[: len(handed_out)]
        assert not self.passed_over & set(handed_out)

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def commit(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.flying, key=lambda r: r.ordinal)))
        started = self.flying.pop(reservation)
        now = self.schedule.version_at(self.step)
        versions = sorted(data.draw(st.lists(st.integers(started, now), min_size=1, max_size=4)))
        self.buffer.commit(
            make_group(
                ordinal=reservation.ordinal,
                target_step=reservation.target_step,
                opened_at_step=reservation.opened_at_step,
                versions=versions,
            )
        )
        self.commits.append(reservation.ordinal)
        if reservation.ordinal in {group.ordinal for group in self.buffer.groups()}:  # neither late nor stale
            self.passed_over.clear()

    @precondition(lambda self: self.flying)
    @rule(data=st.data(), others_first=st.booleans())
    def release(self, data: st.DataObject, others_first: bool) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.flying, key=lambda r: r.ordinal)))
        del self.flying[reservation]
        assert self.buffer.release(reservation, reason="failed", others_first=others_first)
        if others_first:
            self.passed_over.add(reservation.ordinal)
        assert not self.buffer.release(reservation, reason="failed")

    @precondition(lambda self: self.flying)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        reservation = data.draw(st.sampled_from(sorted(self.flying, key=lambda r: r.ordinal)))
        del self.flying[reservation]
        assert self.buffer.drop(reservation, reason="filtered")
        self.dropped.add(reservation.ordinal)

    @precondition(lambda self: not self._is_over())
    @rule()
    def take(self) -> None:
        ready = self.buffer.status().ready.get(self.step) == self.prompts
        groups = self.buffer.take(self.step)
        assert (groups is not None) == ready
        if groups is None:
            return
        assert len(groups) == self.prompts
        ordinals = [group.ordinal for group in groups]
        assert ordinals == [q for q in self.commits if q in ordinals]  # first finished first
        for group in groups:
            assert group.target_step == self.step
            age = self.schedule.age(generation_version=group.min_version, target_step=self.step)
            assert 0 <= age <= self.schedule.max_trajectory_age_steps
        self.trained.extend(ordinals)
        self.step += 1
        self._open()

    @rule()
    def save(self) -> None:
        self.saved = (to_json(self.buffer.state()), self.step, len(self.trained))

    @rule(
        prompts=st.none() | st.integers(1, 3),
        age=st.none() | st.integers(0, 4),
        without_groups=st.booleans(),
    )
    def crash_and_resume(self, prompts: int | None, age: int | None, without_groups: bool) -> None:
        """Kill everything and continue from the last save, perhaps under other settings."""
        text, self.step, num_trained = self.saved
        del self.trained[num_trained:]
        self.prompts = prompts or self.prompts
        if age is not None:
            self.schedule = AsyncSchedule(
                max_num_steps=self.schedule.max_num_steps,
                max_trajectory_age_steps=age,
                policy_training_start_step=self.schedule.policy_training_start_step,
            )
        state = from_json(text)
        if without_groups:
            text = text[: text.index('"groups"')] + '"groups": []}'
            state = from_json(text)
        self.buffer = self._new_buffer()
        report = self.buffer.restore(state, resume_step=self.step)
        assert report.kept + report.num_rejected == len(state.groups)
        assert report.past == 0
        self.dropped = set(state.ledger.dropped)
        self.flying.clear()
        self.passed_over.clear()
        self.commits = [group.ordinal for group in self.buffer.groups()]
        for group in self.buffer.groups():
            age = self.schedule.age(generation_version=group.min_version, target_step=group.target_step)
            assert 0 <= age <= self.schedule.max_trajectory_age_steps
        self._open()
        self.saved = (to_json(self.buffer.state()), self.step, len(self.trained))

    @invariant()
    def nothing_is_lost_or_doubled(self) -> None:
        ledger = self.buffer.ledger
        ledger.check()
        assert len(set(self.trained)) == len(self.trained)
        assert ledger.trained_ordinals() == tuple(sorted(self.trained))
        assert set(ledger.ordinals(OrdinalStatus.RESERVED)) == {r.ordinal for r in self.flying}
        stored = {group.ordinal for group in self.buffer.groups()}
        assert set(ledger.ordinals(OrdinalStatus.READY)) == stored
        accounted = stored | set(self.trained) | self.dropped | {r.ordinal for r in self.flying}
        assert accounted | set(ledger.ordinals(OrdinalStatus.PENDING)) == set(range(ledger.next_ordinal))

    @invariant()
    def occupancy_stays_within_capacity(self) -> None:
        assert len(self.buffer) + len(self.flying) <= self.buffer.capacity

    @invariant()
    def snapshot_size_follows_the_work_in_progress(self) -> None:
        state = self.buffer.state()
        assert len(state.ledger.trained) <= state.ledger.next_ordinal - state.ledger.cut

    def teardown(self) -> None:
        """Whatever happened, the run can be finished, and then no prompt before the last one is missing."""
        if not hasattr(self, "buffer"):
            return
        for reservation in list(self.flying):
            self.buffer.release(reservation, reason="end")
        self.flying.clear()
        while not self._is_over():
            self.reserve(1000)
            for reservation in list(self.flying):
                version = self.schedule.version_at(self.step)
                self.commits.append(reservation.ordinal)
                self.buffer.commit(
                    make_group(
                        ordinal=reservation.ordinal,
                        target_step=reservation.target_step,
                        opened_at_step=reservation.opened_at_step,
                        versions=(version,),
                    )
                )
                self.passed_over.clear()
                del self.flying[reservation]
            before = self.step
            self.take()
            assert self.step == before + 1, self.buffer.status().describe(before)
        pending = set(self.buffer.ledger.ordinals(OrdinalStatus.PENDING))
        everything = set(range(self.buffer.ledger.next_ordinal))
        assert set(self.trained) == everything - self.dropped - pending


TestBufferMachine = BufferMachine.TestCase
TestBufferMachine.settings = settings(max_examples=120, stateful_step_count=50, deadline=None)
