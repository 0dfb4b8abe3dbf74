"""Moves of prompt ordinals: the words in which the ledger's history is written.

A move says that an ordinal reached a stage, when and why. Made by the replay buffer, kept by a `Journal`. The order of
stages that one ordinal may go through stands in `LedgerHistory`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from megatron_ppo.protocol.ledger import OrdinalStatus


class Stage(StrEnum):
    """What happened to an ordinal last. TRAINED and DROPPED are final unless they are rolled back."""

    DISPATCHED = "dispatched"
    GENERATED = "generated"
    SCORED = "scored"
    COMMITTED = "committed"
    TRAINED = "trained"
    DROPPED = "dropped"
    RELEASED = "released"
    ROLLED_BACK = "rolled_back"

    @property
    def status(self) -> OrdinalStatus:
        """Where the ledger has an ordinal at this stage."""
        return STATUS_OF_STAGE[self]


STATUS_OF_STAGE = {
    Stage.DISPATCHED: OrdinalStatus.RESERVED,
    Stage.GENERATED: OrdinalStatus.RESERVED,
    Stage.SCORED: OrdinalStatus.RESERVED,
    Stage.COMMITTED: OrdinalStatus.READY,
    Stage.TRAINED: OrdinalStatus.TRAINED,
    Stage.DROPPED: OrdinalStatus.DROPPED,
    Stage.RELEASED: OrdinalStatus.PENDING,
    Stage.ROLLED_BACK: OrdinalStatus.PENDING,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """An ordinal reaches a stage.

    Attributes:
        step: the learner's step at that moment; None before its first announcement.
        target_step: the step that its group is, or was, meant for.
        min_version, max_version: weight versions that sampled the group; None before it is complete.
        reason: why it was released, dropped or rolled back.
        restored: taken over from a checkpoint at the start of an attempt, rather than seen to happen.
    """

    ordinal: int
    stage: Stage
    step: int | None = None
    target_step: int | None = None
    min_version: int | None = None
    max_version: int | None = None
    reason: str | None = None
    restored: bool = False


class Journal(Protocol):
    """Keeps moves in the order in which they happened."""

    def record(self, move: Move) -> None:
        """Keep `move`. Raises: GroupMismatchError if the ordinal cannot come to that stage."""
        ...
