"""The table of targets: which prompt ordinal fills which slot of which training step.

Owns the slots of every unfinished target step. Driven by the replay buffer. A slot is RESERVED, then READY;
then it leaves the table, because its target is consumed or because it is released. Where an ordinal went is
the ledger's business.

Invariant: a target never has more than `slots_per_target` slots, targets are finished in increasing order,
and nothing is kept for a finished target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from megatron_ppo.protocol.errors import GroupMismatchError


class SlotState(Enum):
    """State of a slot that is in the table."""

    RESERVED = "reserved"
    READY = "ready"


@dataclass(slots=True)
class _Target:
    """Ordinals of one target step; `ready` keeps the order of completion."""

    reserved: list[int] = field(default_factory=list)
    ready: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.reserved) + len(self.ready)


class TargetTable:
    """Slots per target step.

    Args:
        slots_per_target: N, prompt groups that one training step consumes.
        lowest_unfinished: first target that is not finished yet.

    Raises: GroupMismatchError from every method that is asked for an impossible transition.
    """

    def __init__(self, *, slots_per_target: int, lowest_unfinished: int = 0) -> None:
        self._slots_per_target = slots_per_target
        self._lowest_unfinished = lowest_unfinished
        self._targets: dict[int, _Target] = {}

    @property
    def lowest_unfinished(self) -> int:
        """Lowest target step that still has to be consumed; all below it are finished."""
        return self._lowest_unfinished

    def __iter__(self) -> Iterator[int]:
        """Unfinished targets that hold at least one slot, lowest first."""
        return iter(sorted(self._targets))

    def reserved(self, target: int) -> tuple[int, ...]:
        """Ordinals reserved for `target`, in order of reservation."""
        return tuple(self._targets[target].reserved) if target in self._targets else ()

    def ready(self, target: int) -> tuple[int, ...]:
        """Ordinals ready for `target`, first finished first."""
        return tuple(self._targets[target].ready) if target in self._targets else ()

    def missing(self, target: int) -> int:
        """Slots of `target` that are neither reserved nor ready; 0 for a finished target."""
        if target < self._lowest_unfinished:
            return 0
        return self._slots_per_target - (len(self._targets[target]) if target in self._targets else 0)

    def state_of(self, target: int, ordinal: int) -> SlotState | None:
        """State of the slot that `ordinal` holds at `target`, or None if it holds none."""
        if ordinal in self.reserved(target):
            return SlotState.RESERVED
        return SlotState.READY if ordinal in self.ready(target) else None

    def next_to_reserve(self, frontier: int) -> int | None:
        """Lowest unfinished target up to `frontier` with a free slot.

        The lower edge is the lowest unfinished target itself, so a hole at or below the learner's step is
        refilled.
        """
        return next((t for t in range(self._lowest_unfinished, frontier + 1) if self.missing(t)), None)

    def reserve(self, target: int, ordinal: int) -> None:
        """Give a free slot of `target` to `ordinal`."""
        if target < self._lowest_unfinished:
            raise GroupMismatchError(
                f"target step {target} is finished; the lowest unfinished one is {self._lowest_unfinished}"
            )
        if not self.missing(target):
            raise GroupMismatchError(
                f"target step {target} has no free slot for ordinal {ordinal}: "
                f"all {self._slots_per_target} are reserved or ready"
            )
        self._targets.setdefault(target, _Target()).reserved.append(ordinal)

    def make_ready(self, target: int, ordinal: int) -> None:
        """RESERVED → READY."""
        if self.state_of(target, ordinal) is not SlotState.RESERVED:
            raise GroupMismatchError(f"ordinal {ordinal} holds no reservation of target step {target}")
        self._targets[target].reserved.remove(ordinal)
        self._targets[target].ready.append(ordinal)

    def release(self, target: int, ordinal: int) -> None:
        """RESERVED or READY → gone; the target needs one more group again."""
        state = self.state_of(target, ordinal)
        if state is None:
            raise GroupMismatchError(f"ordinal {ordinal} holds no slot of target step {target}")
        slots = self._targets[target]
        (slots.reserved if state is SlotState.RESERVED else slots.ready).remove(ordinal)
        if not slots:
            del self._targets[target]

    def consume(self, target: int) -> tuple[int, ...] | None:
        """All ordinals of `target`, first finished first, or None while one is missing; finishes `target`.

        Raises: GroupMismatchError if `target` is not the lowest unfinished one, because a step trained out of
        order would be trained twice or never.
        """
        if target != self._lowest_unfinished:
            raise GroupMismatchError(
                f"target step {target} cannot be consumed; the lowest unfinished is {self._lowest_unfinished}"
            )
        ordinals = self.ready(target)
        if len(ordinals) < self._slots_per_target:
            return None
        del self._targets[target]
        self._lowest_unfinished = target + 1
        return ordinals

    def skip_to(self, target: int) -> tuple[int, ...]:
        """Finish every target below `target` without consuming it; the ordinals that lose their slot."""
        skipped = [t for t in self if t < target]
        lost = tuple(q for t in skipped for q in (*self.ready(t), *self.reserved(t)))
        for t in skipped:
            del self._targets[t]
        self._lowest_unfinished = max(self._lowest_unfinished, target)
        return lost
