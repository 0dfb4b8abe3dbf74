"""Notices that the main thread of this process makes no progress: each stage of a run has a deadline.

Driven by `app.job`: reads the stage clock of this trainer rank from a thread of its own, which runs while the main
thread sits in a collective or a kernel. Where a stage may be long, as the wait for groups, waits for other ranks in it
have a deadline of their own. Invariant: a stage that outlasts its deadline is reported once, with the stacks of all
threads in the log; a process whose interpreter lock is never given up ends GRACE_S later all the same.
"""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_ppo.telemetry.heartbeat import StageClock, StageNow

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
        meetings: stage -> (limit, what it is), of each single wait for the other trainer ranks in that stage. Only for
            a rank that the others are waiting for already when its wait begins.
    """

    otherwise: tuple[float, str]
    of: Mapping[str, tuple[float, str]] = field(default_factory=dict)
    meetings: Mapping[str, tuple[float, str]] = field(default_factory=dict)

    def limit(self, stage: str) -> tuple[float, str]:
        """Limit and key of `stage`."""
        return self.of.get(stage, self.otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class Overdue:
    """A stage that has lasted too long.

    Attributes:
        in_meeting: it is the wait for the other trainer ranks that has.
    """

    stage: str
    step: int | None
    waited_s: float
    limit_s: float
    key: str
    in_meeting: bool = False

    def __str__(self) -> str:
        step = "" if self.step is None else f" of step {self.step}"
        return f"no progress for {self.waited_s:.0f} s in stage {self.stage!r}{step}; {self.key} is {self.limit_s:g}"


class _Waiting:
    """How long something lasts, without the time in which nothing ran."""

    def __init__(self) -> None:
        self._began_s = float("-inf")
        self._excused_s = 0.0

    def seconds(self, began_s: float, *, at_s: float, late_s: float) -> float:
        """Of what began at `began_s`, at the time of a look that comes `late_s` later than asked."""
        if began_s != self._began_s:
            self._began_s, self._excused_s = began_s, 0.0
        if late_s > STOPPED_AFTER_S:
            # It may have begun shortly before everything stood still, too late for the look before.
            self._excused_s = min(self._excused_s + late_s, at_s - began_s)
        return at_s - began_s - self._excused_s


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
        self._in_stage = _Waiting()
        self._in_meeting = _Waiting()

    def look(self, *, at_s: float, late_s: float) -> Overdue | None:
        """The current stage if it, or the wait for other ranks in it, has outlasted its deadline.

        Args:
            at_s: now, of `time.monotonic`.
            late_s: how much later than asked this look comes. Time in which nothing ran is no waiting.
        """
        now = self._stages.now()
        waited_s = self._in_stage.seconds(now.since_monotonic_s, at_s=at_s, late_s=late_s)
        limit_s, key = self._deadlines.limit(now.stage)
        overdue: Overdue | None
        if waited_s > limit_s:
            overdue = Overdue(stage=now.stage, step=now.step, waited_s=waited_s, limit_s=limit_s, key=key)
        else:
            overdue = self._overdue_meeting(now, at_s=at_s, late_s=late_s)
        # For the stage alone: who waits for other ranks has given up the interpreter lock.
        self._arm(GRACE_S + (limit_s - waited_s if overdue is None else 0.0))
        return overdue

    def _overdue_meeting(self, now: StageNow, *, at_s: float, late_s: float) -> Overdue | None:
        if now.meeting_since_monotonic_s is None or now.stage not in self._deadlines.meetings:
            return None
        limit_s, key = self._deadlines.meetings[now.stage]
        waited_s = self._in_meeting.seconds(now.meeting_since_monotonic_s, at_s=at_s, late_s=late_s)
        if waited_s <= limit_s:
            return None
        return Overdue(
            stage=now.stage, step=now.step, waited_s=waited_s, limit_s=limit_s, key=key, in_meeting=True
        )

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
