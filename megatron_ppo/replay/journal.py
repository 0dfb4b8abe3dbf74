"""LedgerFile: the ledger's history as an append-only file of JSON lines in the run's folder.

Driven by `ReplayService` in the one process that owns the buffer. Moves are checked at once and written in batches; a
kill loses the moves since the last batch, which the next attempt takes over from its checkpoint.
Invariant: what `begin` and `record` have applied is what the file says once it is flushed; nothing is rewritten.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

from megatron_ppo.protocol.ledger import Ledger, LedgerCounts, OrdinalStatus
from megatron_ppo.protocol.moves import Move, Stage
from megatron_ppo.replay.history import Entry, LedgerHistory, read_history, status_of, to_line

logger = logging.getLogger(__name__)

FLUSH_BYTES = 1 << 16
"""About 500 moves; one write takes microseconds."""


CUT_MARK = b" (cut off)\n"
"""Ends a line that a kill cut off, so that it does not swallow the next one. A bare newline would not do: a line that
lacks nothing else would count from then on, although this attempt began without it."""


class LedgerFile:
    """Implements `Journal` over `path`, which is created, or continued by a new attempt.

    Raises: CheckpointError if the file contradicts itself; OSError if it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._history = read_history(path) if path.exists() else LedgerHistory()
        self._history.attempt += 1
        self._unwritten = bytearray()
        self._reported = False
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        if not _ends_whole(path):
            self._unwritten += CUT_MARK

    @property
    def attempt(self) -> int:
        """Number of this attempt at the run, from 1."""
        return self._history.attempt

    def begin(self, ledger: Ledger, *, step: int, reasons: Mapping[int, str]) -> None:
        """Start the attempt at `step` completed steps: what the file knows beyond `ledger` is rolled back.

        Args:
            ledger: what the restored buffer holds.
            reasons: why an ordinal is pending, where more is known than that the earlier attempt ended.
        """
        self._append(Entry(time_unix_s=time.time(), attempt=self.attempt, step=step, move=None))
        for ordinal in range(max(len(self._history), ledger.next_ordinal)):
            self._reconcile(ledger, ordinal, step, reasons)
        self.check(ledger.counts())
        self.sync()

    def record(self, move: Move) -> None:
        """See `Journal.record`."""
        self._history.apply(move)
        self._append(Entry(time_unix_s=time.time(), attempt=self.attempt, step=move.step, move=move))
        if len(self._unwritten) >= FLUSH_BYTES:
            self.flush()

    def check(self, counts: LedgerCounts) -> None:
        """Assert the conservation law on the history. Raises: GroupMismatchError."""
        self._history.check(counts)

    def stage(self, ordinal: int) -> Stage | None:
        """What happened to `ordinal` last."""
        return self._history.stage(ordinal)

    def flush(self) -> None:
        """Hand what was recorded to the operating system; it survives the end of this process from here on.

        A disk that is full is logged once and tried again by the next flush.
        """
        try:
            while self._unwritten:
                del self._unwritten[: os.write(self._descriptor, self._unwritten)]
        except OSError as error:
            if not self._reported:
                logger.error("%s cannot be written, it will be tried again: %s", self._path, error)
            self._reported = True
        else:
            self._reported = False

    def sync(self) -> None:
        """`flush`, and to the disk."""
        self.flush()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            logger.error("%s cannot be flushed to disk: %s", self._path, error)

    def close(self) -> None:
        """Flush and close."""
        self.flush()
        os.close(self._descriptor)

    def _append(self, entry: Entry) -> None:
        self._unwritten += to_line(entry)

    def _reconcile(self, ledger: Ledger, ordinal: int, step: int, reasons: Mapping[int, str]) -> None:
        """Bring one ordinal from where the file has it to where the restored ledger has it."""
        seen, held = self._history.stage(ordinal), ledger.status(ordinal)
        is_open = held in (OrdinalStatus.PENDING, OrdinalStatus.FRESH)
        if status_of(seen) is held or (is_open and seen in (None, Stage.RELEASED, Stage.ROLLED_BACK)):
            if seen is None and held is OrdinalStatus.PENDING:
                self._restore(
                    ordinal, Stage.RELEASED, step, reasons.get(ordinal, "known from the checkpoint only")
                )
            return
        if is_open or seen in (Stage.TRAINED, Stage.DROPPED):
            ended = (
                f"attempt {self.attempt - 1} ended; it was {seen}, the checkpoint of step {step} has it open"
            )
            self._restore(ordinal, Stage.ROLLED_BACK, step, reasons.get(ordinal, ended) if is_open else ended)
        if not is_open:
            reason = ledger.drop_reason(ordinal) or f"by the checkpoint of step {step}"
            self._restore(ordinal, _STAGE_OF[held], step, reason)

    def _restore(self, ordinal: int, stage: Stage, step: int, reason: str) -> None:
        self.record(Move(ordinal=ordinal, stage=stage, step=step, reason=reason, restored=True))


_STAGE_OF = {
    OrdinalStatus.READY: Stage.COMMITTED,
    OrdinalStatus.TRAINED: Stage.TRAINED,
    OrdinalStatus.DROPPED: Stage.DROPPED,
    OrdinalStatus.RESERVED: Stage.DISPATCHED,
}


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return True
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"
