"""The prompt ledger: where every ordinal of the endless prompt stream is.

Owns the next ordinal and the fate of each one before it. Driven by the replay buffer.

Conservation law: every ordinal below `next_ordinal` is exactly one of pending, reserved, ready, trained or
dropped; no ordinal is ever trained twice. Hence a snapshot needs to list only what is final at or above the
cut: everything below the cut is trained unless it is listed as dropped, everything else above it is still to
be done.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from enum import Enum

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError


class OrdinalStatus(Enum):
    """Where an ordinal is. FRESH ones were never handed out; TRAINED and DROPPED are final."""

    FRESH = "fresh"
    PENDING = "pending"
    RESERVED = "reserved"
    READY = "ready"
    TRAINED = "trained"
    DROPPED = "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerCounts:
    """How many ordinals below `next_ordinal` are where."""

    pending: int
    reserved: int
    ready: int
    trained: int
    dropped: int

    @property
    def total(self) -> int:
        """Sum over all states; equals `next_ordinal`."""
        return self.pending + self.reserved + self.ready + self.trained + self.dropped


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerState:
    """A snapshot, as small as the work in progress.

    Attributes:
        next_ordinal: lowest ordinal that was never handed out.
        cut: lowest ordinal that a resume must look at; those below it are trained, unless dropped.
        trained: ordinals trained at or above the cut, ascending.
        dropped: reason per dropped ordinal, below the cut as well.
    """

    next_ordinal: int = 0
    cut: int = 0
    trained: tuple[int, ...] = ()
    dropped: dict[int, str] = field(default_factory=dict)


class Ledger:
    """Moves ordinals between states and refuses every move that would lose or double one.

    Args:
        state: a snapshot to continue from; ordinals in it that are not final start as pending.

    Raises: CheckpointError if the snapshot contradicts itself.
    """

    def __init__(self, state: LedgerState | None = None) -> None:
        state = state or LedgerState()
        _validate(state)
        self._next_ordinal = state.next_ordinal
        self._cut = state.cut
        self._trained_above_cut = set(state.trained)
        self._dropped = dict(state.dropped)
        # Counted for itself: an ordinal that got lost below the cut would pass for a trained one.
        self._num_trained = state.cut - sum(q < state.cut for q in state.dropped) + len(state.trained)
        final = self._trained_above_cut | self._dropped.keys()
        open_ordinals = [q for q in range(state.cut, state.next_ordinal) if q not in final]
        self._active = dict.fromkeys(open_ordinals, OrdinalStatus.PENDING)
        self._pending = list(open_ordinals)  # ascending, hence already a heap
        self._highest_trained = max(state.trained, default=self._highest_trained_below_cut())
        self._advance_cut()

    @property
    def next_ordinal(self) -> int:
        """Lowest ordinal that was never handed out."""
        return self._next_ordinal

    @property
    def cut(self) -> int:
        """Lowest ordinal that is not final; never moves back."""
        return self._cut

    @property
    def trained_frontier(self) -> int:
        """1 + the highest trained ordinal, 0 if none is; above the cut when ordinals finish out of order."""
        return 0 if self._highest_trained is None else self._highest_trained + 1

    def status(self, ordinal: int) -> OrdinalStatus:
        """Where `ordinal` is. Raises: ValueError for a negative one."""
        if ordinal < 0:
            raise ValueError(f"ordinals count from 0, got {ordinal}")
        if ordinal >= self._next_ordinal:
            return OrdinalStatus.FRESH
        if ordinal in self._active:
            return self._active[ordinal]
        return OrdinalStatus.DROPPED if ordinal in self._dropped else OrdinalStatus.TRAINED

    def is_open(self, ordinal: int) -> bool:
        """Whether `ordinal` was handed out and is neither trained nor dropped."""
        return ordinal in self._active

    def drop_reason(self, ordinal: int) -> str | None:
        """Why `ordinal` was dropped, or None if it was not."""
        return self._dropped.get(ordinal)

    def ordinals(self, status: OrdinalStatus) -> tuple[int, ...]:
        """Ordinals that are pending, reserved or ready, ascending. Raises: ValueError for another status."""
        if status not in (OrdinalStatus.PENDING, OrdinalStatus.RESERVED, OrdinalStatus.READY):
            raise ValueError(f"only open states can be listed, got {status.name}")
        return tuple(sorted(q for q, seen in self._active.items() if seen is status))

    def trained_ordinals(self) -> tuple[int, ...]:
        """Every trained ordinal, ascending; O(next_ordinal)."""
        return tuple(q for q in range(self._next_ordinal) if self.status(q) is OrdinalStatus.TRAINED)

    def reserve_next(self, *, passing_over: Collection[int] = ()) -> int:
        """Hand out the lowest pending ordinal, else a fresh one; it becomes reserved.

        Args:
            passing_over: ordinals that stay pending.
        """
        ordinal = self._pop_pending(passing_over)
        if ordinal is None:
            ordinal = self._next_ordinal
            self._next_ordinal += 1
        self._active[ordinal] = OrdinalStatus.RESERVED
        return ordinal

    def _pop_pending(self, passing_over: Collection[int]) -> int | None:
        passed_over = []
        found = None
        while found is None and self._pending:
            ordinal = heapq.heappop(self._pending)
            # `drop` and `reserve` leave heap entries behind, so an entry counts only while its ordinal is
            # pending.
            if self._active.get(ordinal) is not OrdinalStatus.PENDING:
                continue
            if ordinal in passing_over:
                passed_over.append(ordinal)
            else:
                found = ordinal
        for ordinal in passed_over:
            heapq.heappush(self._pending, ordinal)
        return found

    def reserve(self, ordinal: int) -> None:
        """PENDING → RESERVED for a certain ordinal, whose group is restored from a snapshot."""
        self._require(ordinal, OrdinalStatus.PENDING)
        self._active[ordinal] = OrdinalStatus.RESERVED

    def make_ready(self, ordinal: int) -> None:
        """RESERVED → READY."""
        self._require(ordinal, OrdinalStatus.RESERVED)
        self._active[ordinal] = OrdinalStatus.READY

    def release(self, ordinal: int) -> None:
        """RESERVED or READY → PENDING; it is handed out again before any fresh ordinal, unless passed over."""
        self._require(ordinal, OrdinalStatus.RESERVED, OrdinalStatus.READY)
        self._active[ordinal] = OrdinalStatus.PENDING
        heapq.heappush(self._pending, ordinal)

    def mark_trained(self, ordinal: int) -> None:
        """READY → TRAINED, for good."""
        self._require(ordinal, OrdinalStatus.READY)
        del self._active[ordinal]
        self._trained_above_cut.add(ordinal)
        self._num_trained += 1
        self._highest_trained = max(ordinal, self._highest_trained or 0)
        self._advance_cut()

    def drop(self, ordinal: int, *, reason: str) -> None:
        """PENDING, RESERVED or READY → DROPPED, for good, with the reason on record."""
        self._require(ordinal, OrdinalStatus.PENDING, OrdinalStatus.RESERVED, OrdinalStatus.READY)
        del self._active[ordinal]
        self._dropped[ordinal] = reason
        self._advance_cut()

    def counts(self) -> LedgerCounts:
        """Ordinals per state, each counted for itself and none by subtraction."""
        states = list(self._active.values())
        return LedgerCounts(
            pending=states.count(OrdinalStatus.PENDING),
            reserved=states.count(OrdinalStatus.RESERVED),
            ready=states.count(OrdinalStatus.READY),
            trained=self._num_trained,
            dropped=len(self._dropped),
        )

    def check(self) -> None:
        """Assert the conservation law. Raises: GroupMismatchError with the counts."""
        counts = self.counts()
        if counts.total != self._next_ordinal:
            raise GroupMismatchError(
                f"prompt ledger is out of balance: {counts} add up to {counts.total}, "
                f"but {self._next_ordinal} ordinals were handed out"
            )

    def state(self) -> LedgerState:
        """A snapshot; reserved and ready ordinals are implied, as all that is neither trained nor dropped."""
        return LedgerState(
            next_ordinal=self._next_ordinal,
            cut=self._cut,
            trained=tuple(sorted(self._trained_above_cut)),
            dropped=dict(self._dropped),
        )

    def _require(self, ordinal: int, *allowed: OrdinalStatus) -> None:
        seen = self.status(ordinal)
        if seen not in allowed:
            names = " or ".join(status.name.lower() for status in allowed)
            raise GroupMismatchError(f"ordinal {ordinal} is {seen.name.lower()}, must be {names}")

    def _advance_cut(self) -> None:
        while self._cut < self._next_ordinal and self._cut not in self._active:
            self._trained_above_cut.discard(self._cut)
            self._cut += 1

    def _highest_trained_below_cut(self) -> int | None:
        return next((q for q in range(self._cut - 1, -1, -1) if q not in self._dropped), None)


def _validate(state: LedgerState) -> None:
    """Raises: CheckpointError if `state` contradicts itself."""
    if not 0 <= state.cut <= state.next_ordinal:
        raise CheckpointError(
            f"prompt ledger: cut {state.cut} must lie in [0, next_ordinal {state.next_ordinal}]"
        )
    _require_in_range("trained", state.trained, low=state.cut, high=state.next_ordinal)
    _require_in_range("dropped", state.dropped, low=0, high=state.next_ordinal)
    both = sorted(set(state.trained) & state.dropped.keys())
    if both or len(set(state.trained)) != len(state.trained):
        raise CheckpointError(f"prompt ledger: ordinals recorded twice, both trained and dropped: {both}")


def _require_in_range(name: str, ordinals: Iterable[int], *, low: int, high: int) -> None:
    outside = sorted(q for q in ordinals if not low <= q < high)
    if outside:
        raise CheckpointError(f"prompt ledger: {name} ordinals {outside} lie outside [{low}, {high})")
