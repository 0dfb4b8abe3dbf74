"""Ends what a Ray cluster leaves behind when its driver is killed with SIGKILL.

Started by `ray_actors.cluster` as a process of its own that imports nothing but the standard library. It
sleeps until its standard input ends, which happens when the driver is gone in whatever way. Most of Ray
shares the driver's fate at once; Ray's agents do not and would linger for more than a minute. Invariant: only
processes that name, or hold open a file under, the cluster's own temporary folder are ended.

Usage: python -I reaper.py TEMP_DIR
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import suppress

# Time for the processes that end by themselves, and write their last log lines, to do so.
GRACE_S = 3.0
LIMIT_S = 10.0
POLL_S = 0.25


def processes_of(temp_dir: str) -> list[int]:
    """Ids of the other processes that name `temp_dir` in their command line or hold a file under it open."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        # Processes end while they are looked at, and those of other users cannot be looked at.
        with suppress(OSError):
            if _belongs_to(f"/proc/{entry}", temp_dir):
                found.append(int(entry))
    return found


def _belongs_to(process: str, temp_dir: str) -> bool:
    with open(f"{process}/cmdline", "rb") as file:
        if temp_dir.encode() in file.read():
            return True
    for descriptor in os.listdir(f"{process}/fd"):
        with suppress(OSError):
            if os.readlink(f"{process}/fd/{descriptor}").startswith(temp_dir):
                return True
    return False


def main(temp_dir: str) -> None:
    """Wait for the end of standard input, then for the cluster's processes; kill those that stay."""
    sys.stdin.buffer.read()
    ended = time.monotonic()
    while (left := processes_of(temp_dir)) and (waited_s := time.monotonic() - ended) < LIMIT_S:
        if waited_s > GRACE_S:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(POLL_S)
    shutil.rmtree(temp_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
