"""Processes of this host, named by id and start time, because ids are used again.

Read by whoever has to end a process that it did not start itself, or to recognise one. Invariant: no signal goes to a
process that has merely taken over an id.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path


def start_time(pid: int) -> str | None:
    """In clock ticks since the machine was started; None if the process has ended, or there is no /proc to ask."""
    try:
        # The name, in parentheses, may contain anything; after it come state, parent, ..., and 20th the start time.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    # A zombie only waits for a parent that collects its exit code.
    return None if fields[0] == "Z" else fields[19]


def kill(started: Mapping[int, str]) -> None:
    """SIGKILL, which ends a stopped process as well.

    Args:
        started: start time by process id. Those that have ended are left out.
    """
    for pid, at in started.items():
        if start_time(pid) == at:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
