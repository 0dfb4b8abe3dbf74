"""PromptGroupBuffer: all bookkeeping between collector and learner in one synchronous object.

Owns the window, the table of targets, the prompt ledger and the finished groups; having them in one place
makes a snapshot atomic for free. Every move of an ordinal is told to a journal. Driven by `ReplayService`. No clock, no
I/O, no threads.

Invariants: every stored group has 0 <= age <= A at the step that it is reserved for; no step is trained on
more or fewer than N groups; no prompt is lost or trained twice; the window never moves back; occupancy never
exceeds capacity.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_ppo.protocol.errors import ConfigError, GroupMismatchError
from megatron_ppo.protocol.ledger import Ledger, OrdinalStatus
from megatron_ppo.protocol.moves import Journal, Move, Stage
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.targets import SlotState, TargetTable
from megatron_ppo.protocol.trajectory import PromptGroup, Reservation
from megatron_ppo.replay.checks import check_group, check_state, is_fresh
from megatron_ppo.replay.state import BufferState
from megatron_ppo.replay.status import BufferStatus, Counters, RejectReason, RestoreReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the learner announced last: its step, and the highest target that may be reserved."""

    step: int
    frontier: int


class PromptGroupBuffer:
    """Target-addressed, staleness-gated buffer of prompt groups.

    Args:
        schedule: which targets may be filled when, and how old their groups may be.
        num_prompts_per_step: N, groups that one training step consumes.
        num_generations_per_prompt: G, trajectories that a group must have.
        journal: is told every move of an ordinal; None keeps no history.
        takes_in_ordinal_order: `take` sorts the groups by ordinal instead of by the time at which they finished.

    Raises: ConfigError if N or G is below 1.
    """

    def __init__(
        self,
        *,
        schedule: AsyncSchedule,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        journal: Journal | None = None,
        takes_in_ordinal_order: bool = False,
    ) -> None:
        for key, value in (
            ("num_prompts_per_step", num_prompts_per_step),
            ("num_generations_per_prompt", num_generations_per_prompt),
        ):
            if value < 1:
                raise ConfigError(f"algorithm.{key} must be >= 1, got {value}")
        self._schedule = schedule
        self._num_prompts = num_prompts_per_step
        self._num_generations = num_generations_per_prompt
        self._window: Window | None = None
        self._targets = TargetTable(slots_per_target=num_prompts_per_step)
        self._ledger = Ledger()
        self._reservations: dict[int, Reservation] = {}
        self._groups: dict[int, PromptGroup] = {}
        self._release_reasons: dict[int, str] = {}
        self._failures: dict[int, int] = {}
        self._passed_over: set[int] = set()
        self._counters = Counters()
        self._journal = journal
        self._takes_in_ordinal_order = takes_in_ordinal_order

    @property
    def capacity(self) -> int:
        """Most groups, reserved and ready, that the window can ever ask for."""
        return self._schedule.capacity(self._num_prompts)

    @property
    def window(self) -> Window | None:
        """The open window; None before the first `open`."""
        return self._window

    @property
    def lowest_unfinished(self) -> int:
        """Lowest target step that was not taken yet."""
        return self._targets.lowest_unfinished

    @property
    def ledger(self) -> Ledger:
        """The prompt ledger, for reading."""
        return self._ledger

    def __len__(self) -> int:
        """Stored groups."""
        return len(self._groups)

    def open(self, step: int, frontier: int) -> None:
        """Announce the learner's step and let targets up to `frontier` be reserved.

        Groups of targets below `step` can no longer be trained on: they are released, and counted.

        Raises: GroupMismatchError if the window would move back or exceed the schedule's frontier.
        """
        if frontier > self._schedule.frontier(step):
            raise GroupMismatchError(
                f"frontier {frontier} at step {step} would let groups grow too old; "
                f"the schedule allows {self._schedule.frontier(step)}"
            )
        if self._window is not None and (step < self._window.step or frontier < self._window.frontier):
            raise GroupMismatchError(
                f"the window must not move back from {self._window} to {step=}, {frontier=}"
            )
        self._skip_targets_below(step)
        self._window = Window(step=step, frontier=frontier)

    def reserve(self, limit: int) -> list[Reservation]:
        """Up to `limit` free slots: lowest unfinished target first, lowest pending ordinal first.

        Ordinals that were released with `others_first` are passed over until a group was committed.

        Raises: ValueError for a limit below 1.
        """
        if limit < 1:
            raise ValueError(f"limit must be >= 1, got {limit}")
        if self._window is None:
            return []
        reservations: list[Reservation] = []
        while len(reservations) < limit:
            target = self._targets.next_to_reserve(self._window.frontier)
            if target is None:
                break
            ordinal = self._ledger.reserve_next(passing_over=self._passed_over)
            self._targets.reserve(target, ordinal)
            self._release_reasons.pop(ordinal, None)
            reservation = Reservation(
                ordinal=ordinal,
                target_step=target,
                opened_at_step=self._window.step,
                failures=self._failures.get(ordinal, 0),
            )
            self._reservations[ordinal] = reservation
            reservations.append(reservation)
            self._record(ordinal, Stage.DISPATCHED, target_step=target)
        return reservations

    def commit(self, group: PromptGroup) -> None:
        """Store a finished group under its reservation.

        A group that is too old for its target is released and counted instead, as is one whose target was
        skipped.

        Raises: GroupMismatchError for a group without reservation, of the wrong size, over different prompts,
            or sampled by weights that are newer than its target step's.
        """
        if group.target_step < self.lowest_unfinished and self._ledger.is_open(group.ordinal):
            self._counters.late_commits += 1
            logger.warning("group of ordinal %d came after its step %d", group.ordinal, group.target_step)
            return
        self._check_reservation(group)
        check_group(group, schedule=self._schedule, num_generations=self._num_generations)
        if not is_fresh(group, self._schedule):
            self._counters.stale_commits += 1
            self._release(
                group.target_step, group.ordinal, f"too old at commit (version {group.min_version})"
            )
            return
        self._targets.make_ready(group.target_step, group.ordinal)
        self._ledger.make_ready(group.ordinal)
        del self._reservations[group.ordinal]
        self._failures.pop(group.ordinal, None)
        self._passed_over.clear()
        self._groups[group.ordinal] = group
        self._counters.committed += 1
        self._record_group(group, Stage.COMMITTED)

    def note(self, reservation: Reservation, stage: Stage) -> bool:
        """Tell the journal that a group in flight was generated or scored; whether its reservation is still held."""
        if self._reservations.get(reservation.ordinal) != reservation:
            return False
        self._record(reservation.ordinal, stage, target_step=reservation.target_step)
        return True

    def release(
        self, reservation: Reservation, *, reason: str, failed: bool = False, others_first: bool = False
    ) -> bool:
        """Give a slot back; its ordinal becomes pending. Returns whether the reservation was still held.

        Args:
            failed: count a failure of the prompt, until a group of it is committed.
            others_first: reserve it only after a group of another prompt was committed. Not part of a snapshot.
        """
        if self._reservations.get(reservation.ordinal) != reservation:
            return False
        self._counters.released += 1
        if failed:
            self._failures[reservation.ordinal] = self._failures.get(reservation.ordinal, 0) + 1
        if others_first:
            self._passed_over.add(reservation.ordinal)
        self._release(reservation.target_step, reservation.ordinal, reason)
        return True

    def drop(self, reservation: Reservation, *, reason: str) -> bool:
        """Give a slot back and never try its ordinal again; whether the reservation was still held."""
        if not self.release(reservation, reason=reason):
            return False
        self._ledger.drop(reservation.ordinal, reason=reason)
        self._failures.pop(reservation.ordinal, None)
        self._release_reasons.pop(reservation.ordinal, None)
        self._record(reservation.ordinal, Stage.DROPPED, target_step=reservation.target_step, reason=reason)
        return True

    def take(self, target: int) -> list[PromptGroup] | None:
        """The N groups of `target`, first finished (or lowest ordinal) first; None while one is missing.

        They count as trained.

        Raises: GroupMismatchError if `target` is not the lowest unfinished step, or lies beyond the open
            window.
        """
        if self._window is not None and target > self._window.frontier:
            raise GroupMismatchError(
                f"step {target} cannot be taken, it lies beyond the frontier {self._window.frontier}; "
                "nothing would ever be generated for it"
            )
        ordinals = self._targets.consume(target)
        if ordinals is None:
            return None
        if self._takes_in_ordinal_order:
            ordinals = tuple(sorted(ordinals))
        for ordinal in ordinals:
            self._ledger.mark_trained(ordinal)
            self._record_group(self._groups[ordinal], Stage.TRAINED)
        self._ledger.check()
        self._counters.trained += len(ordinals)
        return [self._groups.pop(ordinal) for ordinal in ordinals]

    def trained_ordinals(self) -> tuple[int, ...]:
        """Every ordinal trained so far, ascending."""
        return self._ledger.trained_ordinals()

    def state(self) -> BufferState:
        """A consistent snapshot; its size follows the work in progress, not the length of the run."""
        return BufferState(
            num_prompts_per_step=self._num_prompts,
            num_generations_per_prompt=self._num_generations,
            lowest_unfinished=self.lowest_unfinished,
            ledger=self._ledger.state(),
            groups=tuple(self._groups.values()),
            failures=dict(self._failures),
        )

    def restore(self, state: BufferState, *, resume_step: int) -> RestoreReport:
        """Continue at `resume_step` completed steps from `state`, into a buffer that was not used yet.

        Groups that cannot be used under the current settings, and everything that was in flight, become
        pending: no prompt is lost and none is trained twice. The window stays closed until `open`.

        Raises: CheckpointError for another number of generations per prompt, for a snapshot of a later step
            than `resume_step`, or for one that contradicts itself. GroupMismatchError if the buffer is in
            use.
        """
        if self._window is not None or self._ledger.next_ordinal:
            raise GroupMismatchError("only a new buffer can be restored; this one is in use")
        check_state(
            state,
            resume_step=resume_step,
            num_prompts=self._num_prompts,
            num_generations=self._num_generations,
        )
        self._ledger = Ledger(state.ledger)
        self._failures = {q: count for q, count in state.failures.items() if self._ledger.is_open(q)}
        self._targets = TargetTable(slots_per_target=self._num_prompts, lowest_unfinished=resume_step)
        report = RestoreReport(resume_step=resume_step, num_pending_before=self._ledger.counts().pending)
        frontier = self._schedule.frontier(resume_step)
        for group in state.groups:
            rejected_as = self._reason_to_reject(group, resume_step, frontier)
            if rejected_as is not None:
                report = report.rejecting(rejected_as)
                self._release_reasons[group.ordinal] = f"restored group was {rejected_as}"
                continue
            self._ledger.reserve(group.ordinal)
            self._targets.reserve(group.target_step, group.ordinal)
            self._ledger.make_ready(group.ordinal)
            self._targets.make_ready(group.target_step, group.ordinal)
            self._groups[group.ordinal] = group
        self._counters.evicted += report.num_rejected
        self._ledger.check()
        return report.keeping(len(self._groups))

    def status(self) -> BufferStatus:
        """Where everything is, for metrics and for the message of a stalled wait."""
        return BufferStatus(
            step=self._window.step if self._window else None,
            frontier=self._window.frontier if self._window else None,
            lowest_unfinished=self.lowest_unfinished,
            num_prompts_per_step=self._num_prompts,
            size=len(self._groups),
            capacity=self.capacity,
            ready={t: len(self._targets.ready(t)) for t in self._targets if self._targets.ready(t)},
            reserved={t: self._targets.reserved(t) for t in self._targets if self._targets.reserved(t)},
            pending={
                q: self._release_reasons.get(q, "in flight at the last save")
                for q in self._ledger.ordinals(OrdinalStatus.PENDING)
            },
            next_ordinal=self._ledger.next_ordinal,
            cut=self._ledger.cut,
            trained_frontier=self._ledger.trained_frontier,
            counters=self._counters.copy(),
        )

    def groups(self) -> tuple[PromptGroup, ...]:
        """The stored groups, oldest commit first; for diagnostics."""
        return tuple(self._groups.values())

    def _release(self, target: int, ordinal: int, reason: str) -> None:
        self._targets.release(target, ordinal)
        self._to_pending((ordinal,), reason)

    def _to_pending(self, ordinals: Iterable[int], reason: str) -> None:
        for ordinal in ordinals:
            self._ledger.release(ordinal)
            held = self._reservations.pop(ordinal, None) or self._groups.get(ordinal)
            self._groups.pop(ordinal, None)
            self._release_reasons[ordinal] = reason
            target = None if held is None else held.target_step
            self._record(ordinal, Stage.RELEASED, target_step=target, reason=reason)

    def _record(
        self, ordinal: int, stage: Stage, *, target_step: int | None, reason: str | None = None
    ) -> None:
        if self._journal is not None:
            step = None if self._window is None else self._window.step
            self._journal.record(
                Move(ordinal=ordinal, stage=stage, step=step, target_step=target_step, reason=reason)
            )

    def _record_group(self, group: PromptGroup, stage: Stage) -> None:
        if self._journal is not None:
            self._journal.record(
                Move(
                    ordinal=group.ordinal,
                    stage=stage,
                    step=None if self._window is None else self._window.step,
                    target_step=group.target_step,
                    min_version=group.min_version,
                    max_version=group.max_version,
                )
            )

    def _skip_targets_below(self, step: int) -> None:
        lost = self._targets.skip_to(step)
        if lost:
            logger.warning("step %d was announced while ordinals %s waited for earlier steps", step, lost)
            self._counters.evicted += len(lost)
            self._to_pending(lost, f"its target step was skipped when step {step} was announced")

    def _check_reservation(self, group: PromptGroup) -> None:
        held = self._reservations.get(group.ordinal)
        slot = Reservation(
            ordinal=group.ordinal, target_step=group.target_step, opened_at_step=group.opened_at_step
        )
        if held != slot or self._targets.state_of(group.target_step, group.ordinal) is not SlotState.RESERVED:
            raise GroupMismatchError(
                f"group of ordinal {group.ordinal} for step {group.target_step} holds no reservation: "
                f"the ordinal is {self._ledger.status(group.ordinal).name.lower()}, held reservation: {held}"
            )

    def _reason_to_reject(self, group: PromptGroup, resume_step: int, frontier: int) -> RejectReason | None:
        # Age comes first, so that a target cannot look complete and then shrink.
        if not is_fresh(group, self._schedule):
            return "stale"
        if group.target_step < resume_step:
            return "past"
        if group.target_step > frontier:
            return "beyond_window"
        return None if self._targets.missing(group.target_step) else "surplus"
