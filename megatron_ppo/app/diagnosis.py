"""What to tell a person whose run makes no progress: who gives signs of life, which prompts are open, where it waits.

Driven by `app.job` at the moment of the failure, from any thread. Reads the run's files only, because a process that
does not answer may be the reason.
"""

from __future__ import annotations

import itertools
import logging
import sys
import threading
import time
import traceback
from collections.abc import Iterator

from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.replay.ledger_report import pending
from megatron_ppo.telemetry.heartbeat import RANK_PREFIX, SILENT_AFTER_S, Beat, read_beats
from megatron_ppo.telemetry.run_dir import RunDirectory
from megatron_ppo.telemetry.run_status import describe_beat

logger = logging.getLogger(__name__)

MAX_PROMPTS = 8
MAX_FRAMES = 12


def diagnosis(directory: RunDirectory) -> str:
    """Every process with the age of its last sign of life and what it said, then the open prompts."""
    return "\n".join(["processes:", *_processes(directory), "open prompts:", *_open_prompts(directory)])


def absent_ranks(directory: RunDirectory, *, stage: str, step: int | None) -> str:
    """Which other trainer ranks keep rank 0 waiting in `stage`, the first one of step `step`, and how that is seen.

    A rank that gives no sign of life is to blame also for those that it keeps from coming.
    """
    now_unix_s = time.time()
    others = [
        beat
        for beat in read_beats(directory.heartbeats_dir)
        if beat.process.startswith(RANK_PREFIX) and beat.process != f"{RANK_PREFIX}0"
    ]
    silent = [beat.process for beat in others if beat.age_s(now_unix_s) > SILENT_AFTER_S]
    if silent:
        return f"no sign of life of {', '.join(silent)}"
    if missing := [beat.process for beat in others if not _has_come(beat, stage=stage, step=step)]:
        return f"the other ranks wait for {', '.join(missing)}"
    return "all ranks give signs of life and wait: look at the network between them"


def _has_come(beat: Beat, *, stage: str, step: int | None) -> bool:
    """Whether a rank waits with rank 0, or is beyond: it may hear rank 0 before others do."""
    if beat.detail.get("step") != step:
        return False  # no rank begins another step while rank 0 is in this one
    return beat.detail.get("stage") != stage or beat.detail.get("in_meeting") is True


def main_thread_stack() -> str:
    """Where the main thread of this process is, innermost frames last."""
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    lines = traceback.format_stack(frame)[-MAX_FRAMES:] if frame is not None else []
    return "stack of the main thread:\n" + "".join(lines).rstrip()


def waiting_stack(error: BaseException) -> str:
    """Where the wait was that ended as `error`, innermost frames last."""
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:  # what an error was raised from begins in the frame that raised it
        lines += traceback.format_tb(link.__traceback__)
        link = link.__cause__
    return "stack of the wait:\n" + "".join(lines[-MAX_FRAMES:]).rstrip()


def explain(error: BaseException, directory: RunDirectory) -> None:
    """Add the diagnosis of this moment to an error that ended a wait. Never raises: the error is the cause."""
    try:
        error.add_note(f"{diagnosis(directory)}\n{waiting_stack(error)}")
    except Exception:
        logger.exception("no diagnosis of the wait that failed")


def _processes(directory: RunDirectory) -> Iterator[str]:
    now_unix_s = time.time()
    for beat in read_beats(directory.heartbeats_dir):
        silent = " SILENT" if beat.age_s(now_unix_s) > SILENT_AFTER_S else ""
        yield f"  {describe_beat(beat, now_unix_s=now_unix_s, may_be_gone=False)}{silent}"


def _open_prompts(directory: RunDirectory) -> Iterator[str]:
    try:
        lines = list(pending(directory.ledger_path))
    except (MegatronPPOError, OSError, ValueError) as error:
        yield f"  the ledger cannot be read: {error}"
        return
    if not lines:
        yield "  none"
    yield from (f"  {line}" for line in itertools.islice(lines, MAX_PROMPTS))
    if len(lines) > MAX_PROMPTS:
        yield f"  and {len(lines) - MAX_PROMPTS} more: scripts/ledger.py {directory.path} pending"
