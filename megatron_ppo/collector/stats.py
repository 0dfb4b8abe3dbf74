"""What the collector measures about itself: counters, busy time of the generators, event-loop lag."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)

LAG_PROBE_PERIOD_S = 0.25
# A lag that long means that something blocks the loop; a healthy loop stays far below a millisecond.
LAG_WARNING_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorStats:
    """Totals since the collector started.

    Attributes:
        generation_busy_s: wall time during which at least one group was being generated, pauses of the engine
            for a refit included.
        generation_group_s: sum over groups of the time in the engine.   scoring_group_s: the same for
            scoring.
        window_wait_s: wall time in which nothing was reserved because the window was full.
        failures: groups that used up their retries.   consecutive_failures: since the last success.
        dropped: prompts that failed too often and are never tried again.
        max_loop_lag_s, last_loop_lag_s: how late the event loop woke a timer.
    """

    groups: int = 0
    trajectories: int = 0
    response_tokens: int = 0
    generation_busy_s: float = 0.0
    generation_group_s: float = 0.0
    scoring_group_s: float = 0.0
    window_wait_s: float = 0.0
    retries: int = 0
    failures: int = 0
    consecutive_failures: int = 0
    dropped: int = 0
    in_flight: int = 0
    max_loop_lag_s: float = 0.0
    last_loop_lag_s: float = 0.0


class StatsRecorder:
    """Accumulates `CollectorStats`; used from one event loop."""

    def __init__(self) -> None:
        self._stats = CollectorStats()
        self._num_generating = 0
        self._busy_since = 0.0

    def add(self, **increments: float) -> None:
        """Add to counters, by their names in `CollectorStats`."""
        self._stats = dataclasses.replace(
            self._stats, **{name: getattr(self._stats, name) + value for name, value in increments.items()}
        )

    def failed(self) -> int:
        """Count a failed group; how many failed in a row."""
        self.add(failures=1, consecutive_failures=1)
        return self._stats.consecutive_failures

    def succeeded(self, *, trajectories: int, response_tokens: int) -> None:
        """Count a committed group; ends a row of failures."""
        self.add(groups=1, trajectories=trajectories, response_tokens=response_tokens)
        self._stats = dataclasses.replace(self._stats, consecutive_failures=0)

    @contextmanager
    def generating(self) -> Iterator[None]:
        """Time one group's stay in the engine."""
        start = time.monotonic()
        if self._num_generating == 0:
            self._busy_since = start
        self._num_generating += 1
        try:
            yield
        finally:
            now = time.monotonic()
            self._num_generating -= 1
            self.add(generation_group_s=now - start)
            if self._num_generating == 0:
                self.add(generation_busy_s=now - self._busy_since)

    async def watch_loop_lag(self) -> None:
        """Measure until cancelled how late the loop wakes a timer."""
        while True:
            start = time.monotonic()
            await asyncio.sleep(LAG_PROBE_PERIOD_S)
            lag_s = max(0.0, time.monotonic() - start - LAG_PROBE_PERIOD_S)
            if lag_s > LAG_WARNING_S:
                logger.warning("the collector's event loop was blocked for %.1f s", lag_s)
            self._stats = dataclasses.replace(
                self._stats, last_loop_lag_s=lag_s, max_loop_lag_s=max(lag_s, self._stats.max_loop_lag_s)
            )

    def snapshot(self, *, in_flight: int) -> CollectorStats:
        """The totals now, with the running busy period included."""
        running = time.monotonic() - self._busy_since if self._num_generating else 0.0
        return dataclasses.replace(
            self._stats, in_flight=in_flight, generation_busy_s=self._stats.generation_busy_s + running
        )
