"""Waits for the engines of a refit to pause, and goes on without those that are slow.

Driven by the inference group on trainer rank 0: the main thread gathers, the keeper's threads look after the slow ones.
What is known of them is in the `ReplicaTable`. Imports no Ray.

Invariant: a gathering ends with at least one paused replica or with an error. Who was left out is not asked again
before it has answered, and nobody is slow for ever: a slow replica pauses, or dies, or is declared dead.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ppo.protocol.errors import MegatronPPOError, WaitTimeoutError
from megatron_ppo.protocol.replicas import Member, PauseMode, ReplicaTable

logger = logging.getLogger(__name__)

# An engine keeps its limits itself; this much later its silence itself is the error.
GRACE_S = 30.0


class PauseCall(Protocol):
    """One replica's running call to pause."""

    def done(self) -> bool:
        """Whether it has been answered; returns at once."""
        ...

    def result(self) -> None:
        """Of a call that is done. Raises: its error."""
        ...


class PausingEngines(Protocol):
    """The engines. `ray_actors.inference_group.InferenceGroup` implements it."""

    @property
    def table(self) -> ReplicaTable:
        """Their states."""
        ...

    def ask_to_pause(self, member: Member, *, mode: PauseMode, timeout_s: float) -> PauseCall:
        """Begin to pause it; it gives up after `timeout_s`."""
        ...

    def stand_aside(self, member: Member) -> None:
        """Let it turn new requests away until it has a version again; returns at once."""
        ...

    def wait_for_any(self, calls: Sequence[PauseCall], *, timeout_s: float) -> None:
        """Return when one of `calls`, none of which is done, is done, or after `timeout_s`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Late:
    call: PauseCall
    limit_s: float
    overdue_at: float


class Pauses:
    """The pauses of all refits of a run.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, engines: PausingEngines, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._engines = engines
        self._table = engines.table
        self._clock = clock
        self._late: dict[Member, _Late] = {}
        self._lock = threading.RLock()

    def gather(
        self, members: Sequence[Member], *, mode: PauseMode, patience_s: float | None, timeout_s: float
    ) -> tuple[Member, ...]:
        """Pause `members`; returns who stands still now, in order, and leaves the others out.

        Who was left out earlier and has paused by the end is among the first.

        Args:
            patience_s: how long to wait for all, as long as one is ready; None waits for all.
            timeout_s: longest wait for the first one, and for each when `patience_s` is None.
        Raises: WaitTimeoutError, or the error of a call that has failed before the end.
        """
        started = self._clock()
        self._forget_late_of(members)
        calls = {
            member: self._engines.ask_to_pause(member, mode=mode, timeout_s=timeout_s) for member in members
        }
        ready: set[Member] = set()
        while True:
            for member, call in calls.items():
                if member not in ready and call.done():
                    call.result()
                    ready.add(member)
            missing = [member for member in members if member not in ready]
            returned = self._returned()
            waited_s = self._clock() - started
            impatient = patience_s is not None and waited_s >= patience_s
            if not missing or (impatient and (ready or returned)):
                break
            limit_s = timeout_s + GRACE_S
            if waited_s >= limit_s:
                waiting = [member.replica for member in missing]
                raise WaitTimeoutError(
                    f"waited {waited_s:.0f} s for the engines to pause ({mode}); engine replicas {waiting} have not "
                    "answered"
                )
            until_s = limit_s if patience_s is None or impatient else min(patience_s, limit_s)
            outstanding = [calls[member] for member in missing] + self._outstanding()
            self._engines.wait_for_any(outstanding, timeout_s=until_s - waited_s)
        self._forget_late_of(returned)
        if missing:
            self._leave_out(
                {m: calls[m] for m in missing}, asked_at=started, waited_s=waited_s, limit_s=timeout_s
            )
        return tuple(sorted({*ready, *returned}, key=lambda member: member.replica))

    def look(self, member: Member) -> str | None:
        """Whether a replica that was left out has paused meanwhile, which the table is told. Thread-safe.

        Returns: why it counts as dead, when it could not pause or has not within the limit; None otherwise.
        """
        with self._lock:
            late = self._late.get(member)
            if late is None:
                return None
            if not late.call.done():
                if self._clock() < late.overdue_at:
                    return None
                cause = f"it has not answered a call to pause, whose limit was {late.limit_s:.0f} s"
            else:
                try:
                    late.call.result()
                except MegatronPPOError as error:
                    cause = f"it was left out of a refit and could not pause: {type(error).__name__}: {error}"
                else:
                    self._table.has_paused(member)
                    return None
            del self._late[member]
            return cause

    def _returned(self) -> list[Member]:
        """Who was left out and stands still now."""
        with self._lock:
            for member in list(self._late):
                if (cause := self.look(member)) is not None:
                    self._table.died(member, cause)
            live, slow = self._table.live(), self._table.slow()
            return [member for member in self._late if member in live and member not in slow]

    def _outstanding(self) -> list[PauseCall]:
        with self._lock:
            slow = self._table.slow()
            return [late.call for member, late in self._late.items() if member in slow]

    def _forget_late_of(self, members: Sequence[Member]) -> None:
        """These are paused anew, or take part; and who has died since is nobody's concern."""
        with self._lock:
            live = self._table.live()
            self._late = {m: late for m, late in self._late.items() if m not in members and m in live}

    def _leave_out(
        self, calls: Mapping[Member, PauseCall], *, asked_at: float, waited_s: float, limit_s: float
    ) -> None:
        overdue_at = asked_at + limit_s + GRACE_S
        with self._lock:
            for member, call in calls.items():
                self._late[member] = _Late(call=call, limit_s=limit_s, overdue_at=overdue_at)
            self._table.left_out(calls)
        for member in calls:
            self._engines.stand_aside(member)
            logger.warning(
                "%s has not paused within %.1f s and is left out of this publication; it takes no new requests, and "
                "is given the weights of the then current version when it has paused",
                member,
                waited_s,
            )
