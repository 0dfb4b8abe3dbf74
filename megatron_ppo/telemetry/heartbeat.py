"""Signs of life: every process of a run replaces a small file of its own every few seconds.

Driven by the processes themselves: the actors from their event loops, so that a blocked loop falls silent too, the
trainer ranks and engines from a thread, which a trainer rank also wakes whenever its stage changes: after a kill the
file says what the process was doing. Read from outside by `run_status`. Invariant: a heartbeat never ends or delays
the process that it describes; a file is whole or absent.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

logger = logging.getLogger(__name__)

PERIOD_S = 2.0
MIN_SPACING_S = 0.01
"""Between the beats of a process that is woken more often than it can matter."""
SILENT_AFTER_S = 10.0
"""Five periods: a loaded machine delays one or two."""
RANK_PREFIX = "trainer_rank_"
"""Names of trainer ranks, in front of their number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The last sign of life of one process.

    Attributes:
        process: `trainer_rank_0`, `collector`, … as the log files are named.
        beat_unix_s: seconds since the epoch.   detail: what the process says of itself.
    """

    process: str
    pid: int
    host: str
    beat_unix_s: float
    detail: Mapping[str, object]

    def age_s(self, now_unix_s: float) -> float:
        """Seconds since the beat; 0 for one that a faster clock wrote."""
        return max(0.0, now_unix_s - self.beat_unix_s)


class Heartbeat:
    """Writes the beats of this process.

    Args:
        path: `<folder>/<process>.json`.   describe: details, JSON values; called before each beat.
    """

    def __init__(self, path: Path, *, describe: Callable[[], Mapping[str, object]] = dict) -> None:
        self._path = path
        self._describe = describe
        self._failed = False
        self._woken = threading.Event()

    def wake(self) -> None:
        """Let the thread of `in_thread` beat at once; costs the caller nothing."""
        self._woken.set()

    def beat(self) -> None:
        """Replace the file. A disk that does not take it is logged once."""
        draft = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        try:
            content = {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "beat_unix_s": time.time(),
                "detail": dict(self._describe()),
            }
            self._path.parent.mkdir(exist_ok=True)
            # Without fsync: after a crash of the machine no sign of life is of interest.
            draft.write_text(json.dumps(content), encoding="utf-8")
            os.replace(draft, self._path)
        except Exception:  # whatever it is, the process matters more than what is seen of it
            if not self._failed:
                logger.warning("heartbeats cannot be written", exc_info=True)
            self._failed = True

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Beat from the event loop inside the block, so that a stuck loop shows."""
        beating = asyncio.create_task(self._run(), name="heartbeat")
        try:
            yield
        finally:
            beating.cancel()

    async def _run(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(PERIOD_S)

    @contextmanager
    def in_thread(self) -> Iterator[None]:
        """Beat inside the block, whatever the main thread does."""
        stopping = threading.Event()
        thread = threading.Thread(target=self._until, args=(stopping,), name="heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stopping.set()
            self._woken.set()
            thread.join()

    def run_in_daemon(self) -> None:
        """Beat from a thread until the process ends."""
        threading.Thread(target=self._until, args=(threading.Event(),), name="heartbeat", daemon=True).start()

    def _until(self, stopping: threading.Event) -> None:
        while not stopping.is_set():
            self._woken.clear()  # before the beat: what changes during it is written by the next one
            self.beat()
            self._woken.wait(PERIOD_S)
            stopping.wait(MIN_SPACING_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageNow:
    """What a main thread is doing.

    Attributes:
        step: number of the row, None outside of steps.   since_monotonic_s: of `time.monotonic`.
        meeting_since_monotonic_s: since when it waits for nothing but other trainer ranks; None if it does not.
    """

    stage: str
    step: int | None
    since_unix_s: float
    since_monotonic_s: float
    meeting_since_monotonic_s: float | None = None


class StageClock:
    """What the main thread of a trainer rank is doing, since when. Written by it, read by other threads.

    Args:
        monotonic_s: tests give their own.
    Attributes:
        on_change: called by the main thread after each change; must not block.
    """

    def __init__(self, stage: str = "starting", *, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._now = self._begin(stage, None)  # replaced whole: no lock
        self.on_change: Callable[[], None] | None = None
        self._details: dict[str, Callable[[], str]] = {}  # likewise

    def enter(self, stage: str, step: int | None) -> None:
        """Stage `stage` of the row with that number of completed steps has begun."""
        self._now = self._begin(stage, step)
        if self.on_change is not None:
            self.on_change()

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Inside the block the main thread waits for nothing but other trainer ranks; the stage goes on."""
        self._now = replace(self._now, meeting_since_monotonic_s=self._monotonic_s())
        try:
            yield
        finally:
            self._now = replace(self._now, meeting_since_monotonic_s=None)

    def now(self) -> StageNow:
        """The current stage."""
        return self._now

    def tell(self, name: str, detail: Callable[[], str]) -> None:
        """Add what `detail` says to every description, under `name`; called from the heartbeat's thread."""
        self._details = {**self._details, name: detail}

    def describe(self) -> dict[str, object]:
        """As the heartbeat's detail: `stage`, `step`, `stage_since_unix_s`, `in_meeting`, and what `tell` has added."""
        now = self._now
        told = {name: detail() for name, detail in self._details.items()}
        return {
            "stage": now.stage,
            "step": now.step,
            "stage_since_unix_s": now.since_unix_s,
            "in_meeting": now.meeting_since_monotonic_s is not None,
            **told,
        }

    def _begin(self, stage: str, step: int | None) -> StageNow:
        return StageNow(
            stage=stage,
            step=step,
            since_unix_s=time.time(),
            since_monotonic_s=self._monotonic_s(),
        )


def read_beats(folder: Path) -> list[Beat]:
    """The last beat of every process, by name; unreadable files are skipped with a warning."""
    beats = []
    for path in sorted(folder.glob("*.json")) if folder.is_dir() else []:
        try:
            beats.append(Beat(process=path.stem, **json.loads(path.read_text(encoding="utf-8"))))
        except (OSError, ValueError, TypeError) as error:
            logger.warning("%s is no heartbeat: %s", path, error)
    return beats


def clear_beats(folder: Path) -> None:
    """Forget the processes of an earlier start."""
    for path in folder.glob("*.json"):
        path.unlink(missing_ok=True)
