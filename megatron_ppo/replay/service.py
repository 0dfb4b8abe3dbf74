"""ReplayService: the buffer for concurrent callers in one event loop.

Owns the waiting. Driven by the collector (reserve, commit, release, fail) and by the learner (open, take,
snapshot, restore), directly in one process or through an actor.

Invariant: a wake-up cannot be lost. Every change of the buffer happens between two awaits and notifies all waiters of
the one condition; every waiter re-evaluates its own predicate; every wait is bounded.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import replace

from megatron_ppo.protocol.errors import PartDiedError, WaitTimeoutError
from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.trajectory import PromptGroup, Reservation
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.replay.state import from_json, to_json
from megatron_ppo.replay.status import BufferStatus, ContentDiagnostics, diagnose

logger = logging.getLogger(__name__)


class ReplayService:
    """Asynchronous front of one `PromptGroupBuffer`; implements `protocol.ports.Replay`.

    consumes: groups from the collector.   produces: complete target steps for the learner.
    waits for: `reserve` for a free slot in the window, `take` for the last group of its target.
    unblocked by: `open`, `commit`, `release`, `restore`, `fail`, or the time limit.

    Args:
        journal: where `buffer` records its moves; None keeps no history.
    """

    def __init__(self, buffer: PromptGroupBuffer, *, journal: LedgerFile | None = None) -> None:
        self._buffer = buffer
        self._journal = journal
        self._changed = asyncio.Condition()
        self._failure: str | None = None
        self._reserved_at: dict[int, float] = {}

    async def reserve(self, *, limit: int, timeout_s: float) -> list[Reservation]:
        """See `Replay.reserve`. Raises: PartDiedError after `fail`."""
        reservations: list[Reservation] = []

        def reserve_some() -> bool:
            self._raise_failure()
            reservations.extend(self._buffer.reserve(limit))
            return bool(reservations)

        await self._wait(reserve_some, timeout_s)
        now = time.monotonic()
        self._reserved_at.update({reservation.ordinal: now for reservation in reservations})
        return reservations

    async def commit(self, group: PromptGroup) -> None:
        """See `Replay.commit`."""
        async with self._changed:
            self._buffer.commit(group)
            self._reserved_at.pop(group.ordinal, None)
            self._changed.notify_all()

    async def note(self, reservation: Reservation, stage: Stage) -> None:
        """See `Replay.note`."""
        self._buffer.note(reservation, stage)

    async def release(
        self, reservation: Reservation, *, reason: str, failed: bool = False, others_first: bool = False
    ) -> None:
        """See `Replay.release`."""
        async with self._changed:
            if self._buffer.release(reservation, reason=reason, failed=failed, others_first=others_first):
                logger.info(
                    "ordinal %d of step %d released: %s", reservation.ordinal, reservation.target_step, reason
                )
                self._reserved_at.pop(reservation.ordinal, None)
                self._changed.notify_all()

    async def drop(self, reservation: Reservation, *, reason: str) -> None:
        """See `Replay.drop`."""
        async with self._changed:
            if self._buffer.drop(reservation, reason=reason):
                logger.warning("ordinal %d dropped for good: %s", reservation.ordinal, reason)
                self._reserved_at.pop(reservation.ordinal, None)
                self._changed.notify_all()  # its slot is free for another ordinal

    async def open(self, *, step: int, frontier: int) -> None:
        """Announce the learner's step and let targets up to `frontier` be reserved."""
        async with self._changed:
            self._buffer.open(step, frontier)
            self._changed.notify_all()

    async def take(self, *, target_step: int, timeout_s: float) -> list[PromptGroup]:
        """The N groups of `target_step`, in the order of `PromptGroupBuffer.take`; they count as trained from here on.

        Raises: PartDiedError with the collector's cause after `fail`; WaitTimeoutError after `timeout_s`,
            with what is missing; GroupMismatchError if the step can never be taken, or if the history of moves
            does not lead to what the buffer holds.
        """
        groups: list[PromptGroup] = []

        def take_all() -> bool:
            self._raise_failure()
            groups.extend(self._buffer.take(target_step) or ())
            return bool(groups)

        if not await self._wait(take_all, timeout_s):
            raise WaitTimeoutError(f"waited {timeout_s:.1f} s for groups: {self.describe(target_step)}")
        self._forget_times()
        if self._journal is not None:
            self._journal.check(self._buffer.ledger.counts())
            self._journal.flush()
        return groups

    async def take_with_position(
        self, *, target_step: int, timeout_s: float
    ) -> tuple[list[PromptGroup], str]:
        """As `take`, and the state right after it as JSON text, without the groups that wait for later steps.

        With that, a learner can be saved whose buffer is gone: it is where every prompt is at the next step boundary.
        """
        groups = await self.take(target_step=target_step, timeout_s=timeout_s)
        return groups, to_json(replace(self._buffer.state(), groups=()))

    async def fail(self, message: str) -> None:
        """Record that the collector died of `message`; present and later waits raise it. The first stays."""
        async with self._changed:
            self._failure = self._failure or message
            self._changed.notify_all()

    async def snapshot(self) -> str:
        """One atomic snapshot of buffer, targets, ledger and prompt position, as JSON text."""
        if self._journal is not None:  # on disk before the checkpoint that relies on it
            self._journal.sync()
        self._log_cut()
        return to_json(self._buffer.state())

    async def flush(self) -> None:
        """Hand the history of moves to the operating system."""
        if self._journal is not None:
            self._journal.flush()

    async def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """Continue from a snapshot, or with an empty buffer, at `resume_step` completed steps.

        Raises: CheckpointError, GroupMismatchError as `PromptGroupBuffer.restore`.
        """
        if snapshot is None:
            if resume_step:
                logger.warning(
                    "no replay snapshot for step %d: the prompts start from the first", resume_step
                )
            self._begin_attempt(resume_step)
            return
        async with self._changed:
            report = self._buffer.restore(from_json(snapshot), resume_step=resume_step)
            logger.info("replay buffer restored: %s", report)
            self._log_cut()
            self._begin_attempt(resume_step)
            self._changed.notify_all()

    async def status(self) -> BufferStatus:
        """Where every open slot and ordinal is."""
        return self._buffer.status()

    def brief(self) -> dict[str, object]:
        """The state in a few JSON values, for a look from outside."""
        status = self._buffer.status()
        window = None if status.frontier is None else f"{status.step}..{status.frontier}"
        oldest = min(self._reserved_at.values(), default=None)
        return {
            "window": window,
            "size": status.size,
            "capacity": status.capacity,
            "ready": {str(target): count for target, count in status.ready.items()},
            "in_flight": sum(len(ordinals) for ordinals in status.reserved.values()),
            "oldest_in_flight_s": None if oldest is None else round(time.monotonic() - oldest, 1),
            "pending": len(status.pending),
            "next_ordinal": status.next_ordinal,
        }

    async def diagnostics(self) -> ContentDiagnostics:
        """Distributions over the stored groups."""
        return diagnose(self._buffer.groups())

    async def trained_ordinals(self) -> tuple[int, ...]:
        """Every ordinal trained so far, ascending."""
        return self._buffer.trained_ordinals()

    def describe(self, target_step: int) -> str:
        """Why `target_step` is not complete, naming what is pending and for how long."""
        now = time.monotonic()
        oldest = min(self._reserved_at, key=self._reserved_at.__getitem__, default=None)
        longest = (
            "nothing in flight"
            if oldest is None
            else f"longest in flight: ordinal {oldest}{self._stage_of(oldest)}, "
            f"{now - self._reserved_at[oldest]:.1f} s"
        )
        return f"{self._buffer.status().describe(target_step)}; {longest}"

    async def _wait(self, attempt: Callable[[], bool], timeout_s: float) -> bool:
        """Repeat `attempt` at every change until it succeeds or time is up; whether it succeeded.

        `attempt` changes the buffer only when it succeeds. Reserving and taking never unblock another waiter,
        so success needs no notification.
        """
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                # Cancellation can only arrive at the await, never between a successful attempt and the
                # return.
                while not attempt():
                    await self._changed.wait()
                return True
        except TimeoutError:
            # The change that was waited for may have come together with the time limit.
            return attempt()

    def _begin_attempt(self, step: int) -> None:
        if self._journal is not None:
            self._journal.begin(self._buffer.ledger, step=step, reasons=self._buffer.status().pending)

    def _log_cut(self) -> None:
        cut, frontier = self._buffer.ledger.cut, self._buffer.ledger.trained_frontier
        if cut < frontier:
            logger.info(
                "a resume starts at ordinal %d, below the trained frontier %d: ordinals %s are open",
                cut,
                frontier,
                [q for q in range(cut, frontier) if self._buffer.ledger.is_open(q)],
            )

    def _stage_of(self, ordinal: int) -> str:
        stage = None if self._journal is None else self._journal.stage(ordinal)
        return "" if stage is None else f" ({stage})"

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise PartDiedError(f"the collector stopped: {self._failure}")

    def _forget_times(self) -> None:
        open_ordinals = {q for ordinals in self._buffer.status().reserved.values() for q in ordinals}
        self._reserved_at = {q: at for q, at in self._reserved_at.items() if q in open_ordinals}
