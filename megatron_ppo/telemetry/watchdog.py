"""Notices that the main thread of this process makes no progress: each stage of a run has a deadline.

Driven by `app.job`: reads the stage clock of this trainer rank from a thread of its own, which runs while the main
thread sits in a collective or a kernel. Invariant: a stage that outlasts its deadline is reported once, with the stacks
of all threads in the log; a process whose interpreter lock is never given up ends GRACE_S later all the same.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_ppo.telemetry.heartbeat import StageClock

POLL_S = 1.0
GRACE_S = 60.0
"""For the diagnosis. Python's C-level timer ends the process after that, without a diagnosis but with the stacks."""
STOPPED_AFTER_S = 10.0
"""A thread that slept this much longer than it asked for did not run: the process was stopped, or swapped out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each stage may last, in seconds, and which key of the configuration says so.

    Attributes:
        of: stage -> (limit, key).   otherwise: for every stage that is not named.
    """

    otherwise: tuple[float, str]
    of: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def limit(self, stage: str) -> tuple[float, str]:
        """Limit and key of `stage`."""
        return self.of.get(stage, self.otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A stage that has lasted too long."""

    stage: str
    step: int | None
    waited_s: float
    limit_s: float
    key: str

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"no progress for {self.waited_s:.0f} s in stage {self.stage!r}{step}; {self.key} is {self.limit_s:g}"


class Watchdog:
    """Compares the stage clock with the deadlines.

    Args:
        on_overdue: called once, from the watching thread; it is expected to end the process.
    """

    def __init__(
        self,
        *,
        stages: StageClock,
        deadlines: Deadlines,
        on_overdue: Callable[[Overdue], None],
        poll_s: float = POLL_S,
    ) -> None:
        self._stages = stages
        self._deadlines = deadlines
        self._on_overdue = on_overdue
        self._poll_s = poll_s
        self._entered = -1
        self._excused_s = 0.0

    def look(self, *, at_s: float, late_s: float) -> Overdue | None:
        """The current stage if it has outlasted its deadline.

        Args:
            at_s: now, of `time.monotonic`.
            late_s: how much later than asked this look comes. Time in which nothing ran is no waiting.
        """
        now = self._stages.now()
        if now.count != self._entered:
            self._entered, self._excused_s = now.count, 0.0
        elif late_s > STOPPED_AFTER_S:
            self._excused_s += late_s
        waited_s = at_s - now.since_monotonic_s - self._excused_s
        limit_s, key = self._deadlines.limit(now.stage)
        self._arm(max(0.0, limit_s - waited_s) + GRACE_S)
        if waited_s <= limit_s:
            return None
        return Overdue(stage=now.stage, step=now.step, waited_s=waited_s, limit_s=limit_s, key=key)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Watch inside the block."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._until, args=(stopping,), name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _until(self, stopping: threading.Event) -> None:
        looked = time.monotonic()
        while not stopping.wait(self._poll_s):
            now = time.monotonic()
            overdue = self.look(at_s=now, late_s=now - looked - self._poll_s)
            looked = now
            if overdue is not None:
                faulthandler.dump_traceback(file=sys.stderr, all_threads=True)
                self._on_overdue(overdue)
                return

    def _arm(self, timeout_s: float) -> None:
        # Needs no interpreter lock, unlike this thread.
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
