"""The ledger's history: which moves follow which, where every ordinal is after them, and how its file is read.

`LedgerHistory` is the one judge of a sequence of moves: the writer applies each before it is written, and
`scripts/ledger.py` and the tests apply them again from the file. It shares no code with `protocol.ledger.Ledger`, so
each checks the other.
Invariant: exactly-once. An ordinal is trained at most once unless the training was rolled back in between.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import LedgerCounts, OrdinalStatus
from megatron_ppo.protocol.moves import Move, Stage

_STAGES = tuple(Stage)
_CODE = {stage: code for code, stage in enumerate(_STAGES, start=1)}
_IN_FLIGHT = frozenset({Stage.DISPATCHED, Stage.GENERATED, Stage.SCORED})
_AFTER: dict[Stage, frozenset[Stage | None]] = {
    Stage.DISPATCHED: frozenset({None, Stage.RELEASED, Stage.ROLLED_BACK}),
    Stage.GENERATED: frozenset({Stage.DISPATCHED}),
    Stage.SCORED: frozenset({Stage.GENERATED}),
    Stage.COMMITTED: _IN_FLIGHT,
    Stage.TRAINED: frozenset({Stage.COMMITTED}),
    Stage.DROPPED: _IN_FLIGHT | {Stage.COMMITTED, Stage.RELEASED, Stage.ROLLED_BACK},
    Stage.RELEASED: _IN_FLIGHT | {Stage.COMMITTED},
    Stage.ROLLED_BACK: frozenset(_STAGES) - {Stage.ROLLED_BACK},
}
_FINAL = (Stage.TRAINED, Stage.DROPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of the file: a move, or the start of an attempt (`move` is None, `step` is what it resumes from)."""

    time_unix_s: float
    attempt: int
    step: int | None
    move: Move | None


class LedgerHistory:
    """Where every ordinal is after the moves so far; one byte per ordinal.

    Attributes:
        attempt: number of the running attempt, from 1; 0 before the first.
    """

    def __init__(self) -> None:
        self.attempt = 0
        self._codes = bytearray()
        self._counts = dict.fromkeys(_STAGES, 0)

    def __len__(self) -> int:
        """1 + the highest ordinal that ever moved."""
        return len(self._codes)

    def stage(self, ordinal: int) -> Stage | None:
        """What happened to `ordinal` last; None if nothing did."""
        code = self._codes[ordinal] if ordinal < len(self._codes) else 0
        return _STAGES[code - 1] if code else None

    def count(self, stage: Stage) -> int:
        """Ordinals whose last move led to `stage`."""
        return self._counts[stage]

    def ordinals(self, *stages: Stage) -> list[int]:
        """Ordinals whose last move led to one of `stages`, ascending."""
        codes = {_CODE[stage] for stage in stages}
        return [ordinal for ordinal, code in enumerate(self._codes) if code in codes]

    def pending(self) -> list[int]:
        """Ordinals that moved and are neither trained nor dropped, ascending."""
        return self.ordinals(*(stage for stage in Stage if stage not in _FINAL))

    def apply(self, move: Move) -> None:
        """Move an ordinal. Raises: GroupMismatchError if it cannot come to that stage from where it is."""
        seen = self.stage(move.ordinal)
        if seen not in _AFTER[move.stage] and not (move.restored and seen not in _FINAL):
            allowed = sorted(stage or "unseen" for stage in _AFTER[move.stage])
            raise GroupMismatchError(
                f"prompt ledger: ordinal {move.ordinal} cannot become {move.stage}, it is {seen or 'unseen'}, "
                f"must be {' or '.join(allowed)}"
            )
        if move.ordinal >= len(self._codes):
            self._codes.extend(bytes(move.ordinal + 1 - len(self._codes)))
        if seen is not None:
            self._counts[seen] -= 1
        self._counts[move.stage] += 1
        self._codes[move.ordinal] = _CODE[move.stage]

    def check(self, counts: LedgerCounts) -> None:
        """Assert that the moves lead to what the ledger holds. Raises: GroupMismatchError with both counts.

        Pending ones are not compared: an ordinal that was rolled back may be one that the ledger has not handed
        out again yet.
        """
        seen = {
            "reserved": sum(self._counts[stage] for stage in _IN_FLIGHT),
            "ready": self._counts[Stage.COMMITTED],
            "trained": self._counts[Stage.TRAINED],
            "dropped": self._counts[Stage.DROPPED],
        }
        held = {name: getattr(counts, name) for name in seen}
        if seen != held:
            raise GroupMismatchError(
                f"prompt ledger is out of balance: its history leads to {seen}, the replay buffer holds {held}"
            )


def status_of(stage: Stage | None) -> OrdinalStatus:
    """Where the ledger has an ordinal whose last move led to `stage`."""
    return OrdinalStatus.FRESH if stage is None else stage.status


def to_line(entry: Entry) -> bytes:
    """One line of the file. The ordinal stands first, so that a reader can find its lines without parsing all."""
    move = entry.move
    if move is None:
        fields: dict[str, object] = {"stage": "started", "attempt": entry.attempt, "step": entry.step}
    else:
        versions = None if move.min_version is None else [move.min_version, move.max_version]
        fields = {
            "ordinal": move.ordinal,
            "stage": str(move.stage),
            "attempt": entry.attempt,
            "step": move.step,
            "target_step": move.target_step,
            "versions": versions,
            "reason": move.reason,
            "restored": move.restored or None,
        }
    fields["time"] = round(entry.time_unix_s, 3)
    present = {key: value for key, value in fields.items() if value is not None}
    return (json.dumps(present, separators=(",", ":")) + "\n").encode()


def read_entries(path: Path, *, ordinal: int | None = None) -> Iterator[Entry]:
    """The entries of a ledger file, in order; with `ordinal`, only its moves and the starts of attempts.

    A line that a kill cut off, and lines that a process of an earlier attempt wrote after a later one had begun, are
    left out. Works while the run is writing.

    Raises: CheckpointError, naming the line, for a line that is whole but not an entry.
    """
    attempt = 0
    wanted = None if ordinal is None else f'{{"ordinal":{ordinal},'.encode()
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            is_start = line.startswith(b'{"stage":"started"')
            if not line.endswith(b"}\n") or (wanted and not is_start and not line.startswith(wanted)):
                continue
            try:
                entry = _entry(json.loads(line))
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(f"{path}, line {number} is not a ledger entry: {error!r}") from error
            attempt = max(attempt, entry.attempt)
            if entry.attempt == attempt:
                yield entry


def read_history(path: Path) -> LedgerHistory:
    """Where every ordinal is by the file. Raises: CheckpointError if it contradicts itself or is damaged."""
    history = LedgerHistory()
    for entry in read_entries(path):
        history.attempt = entry.attempt
        if entry.move is None:
            continue
        try:
            history.apply(entry.move)
        except GroupMismatchError as error:
            raise CheckpointError(f"{path} contradicts itself in attempt {entry.attempt}: {error}") from error
    return history


def _entry(fields: dict[str, Any]) -> Entry:
    attempt, time_unix_s, step = int(fields["attempt"]), float(fields["time"]), _optional_int(fields, "step")
    if fields["stage"] == "started":
        return Entry(time_unix_s=time_unix_s, attempt=attempt, step=step, move=None)
    low, high = fields.get("versions", (None, None))
    move = Move(
        ordinal=int(fields["ordinal"]),
        stage=Stage(fields["stage"]),
        step=step,
        target_step=_optional_int(fields, "target_step"),
        min_version=low,
        max_version=high,
        reason=fields.get("reason"),
        restored=bool(fields.get("restored")),
    )
    return Entry(time_unix_s=time_unix_s, attempt=attempt, step=step, move=move)


def _optional_int(fields: dict[str, Any], key: str) -> int | None:
    return int(fields[key]) if key in fields else None
