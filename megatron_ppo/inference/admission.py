"""The engine's own admission gate: at most `limit` requests inside vLLM, none while weights change.

Driven by `inference.engine` on one event loop. vLLM 0.32 queues requests while it is paused and 0.33 rejects
them; with the gate in front neither ever sees one. Invariant: `running` <= `limit`, and while the gate is
closed `running` never grows. Waiters enter first in, first out.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from megatron_ppo.protocol.errors import WaitTimeoutError


class AdmissionGate:
    """Closed at first. Not thread-safe: all calls come from one event loop."""

    def __init__(self, limit: int) -> None:
        if limit < 1:
            raise ValueError(f"max_num_seqs must be >= 1, got {limit}")
        self._limit = limit
        self._is_open = False
        self._running = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_open(self) -> bool:
        """Whether requests may enter."""
        return self._is_open

    @property
    def running(self) -> int:
        """Requests inside."""
        return self._running

    @property
    def waiting(self) -> int:
        """Requests in front of the gate."""
        return sum(not waiter.done() for waiter in self._waiters)

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """Wait for a free place (the caller sets the time limit by cancelling) and hold it."""
        if not self._is_open or self._running >= self._limit or self._waiters:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter.done() and not waiter.cancelled():
                    self._leave()  # admitted and cancelled in the same turn of the loop
                elif waiter in self._waiters:  # `_admit` drops cancelled waiters too
                    self._waiters.remove(waiter)
                raise
        else:
            self._enter()
        try:
            yield
        finally:
            self._leave()

    def open(self) -> None:
        """Let requests in."""
        self._is_open = True
        self._admit()

    def close(self) -> None:
        """Let none in; those inside go on."""
        self._is_open = False

    async def drained(self, *, timeout_s: float) -> None:
        """Wait until nothing is inside. Raises: WaitTimeoutError."""
        try:
            await asyncio.wait_for(self._idle.wait(), timeout_s)
        except TimeoutError:
            raise WaitTimeoutError(
                f"waited {timeout_s:.0f} s for {self._running} running requests to finish before a refit"
            ) from None

    def _admit(self) -> None:
        while self._is_open and self._waiters and self._running < self._limit:
            waiter = self._waiters.popleft()
            if not waiter.done():
                self._enter()
                waiter.set_result(None)

    def _enter(self) -> None:
        self._running += 1
        self._idle.clear()

    def _leave(self) -> None:
        self._running -= 1
        if self._running == 0:
            self._idle.set()
        self._admit()
