"""Ends what a Ray cluster leaves behind when its driver is killed with SIGKILL.

Started by `ray_actors.cluster` as a process of its own that imports nothing but the standard library. It
keeps a list of the cluster's processes until its standard input ends, which happens when the driver is gone
in whatever way. Most of Ray then ends at once; Ray's agents would linger for more than a minute, and an
engine core that is still starting for minutes. Invariant: only descendants of the driver's children that
name the cluster's own temporary folder are ended.

Usage: python -I reaper.py TEMP_DIR DRIVER_PID
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time
from contextlib import suppress

# Time for the processes that end by themselves, and write their last log lines, to do so.
GRACE_S = 3.0
LIMIT_S = 10.0
_SCAN_S = 2.0
_POLL_S = 0.25


class ClusterProcesses:
    """The processes seen so far, with their start times, because process ids are used again."""

    def __init__(self, temp_dir: str, driver_pid: int) -> None:
        self._temp_dir = temp_dir.encode()
        self._driver_pid = driver_pid
        self._seen: dict[int, str] = {}

    def scan(self) -> None:
        """Add the processes that have started since the last scan."""
        table = _process_table()
        grew = True
        while grew:
            grew = False
            for pid, (parent, started) in table.items():
                if pid in self._seen or pid == os.getpid():
                    continue
                if parent in self._seen or (parent == self._driver_pid and self._is_root(pid)):
                    self._seen[pid] = started
                    grew = True

    def alive(self) -> list[int]:
        """Those that still run."""
        table = _process_table()
        return [pid for pid, started in self._seen.items() if table.get(pid, (0, ""))[1] == started]

    def _is_root(self, pid: int) -> bool:
        with suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
            return self._temp_dir in file.read()
        return False


def _process_table() -> dict[int, tuple[int, str]]:
    """Process id -> (parent's id, start time in clock ticks); zombies are left out."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        # A process may end while it is looked at.
        with suppress(OSError), open(f"/proc/{entry}/stat") as file:
            # The name, in parentheses, may contain anything; after it come state, parent, ..., start time.
            fields = file.read().rpartition(")")[2].split()
            if fields[0] != "Z":
                table[int(entry)] = (int(fields[1]), fields[19])
    return table


def main(temp_dir: str, driver_pid: int) -> None:
    """Watch until standard input ends, wait for the processes to end, kill those that stay, tidy up."""
    processes = ClusterProcesses(temp_dir, driver_pid)
    while not select.select([sys.stdin], [], [], _SCAN_S)[0]:
        processes.scan()
    ended = time.monotonic()
    processes.scan()
    while (left := processes.alive()) and (waited_s := time.monotonic() - ended) < LIMIT_S:
        if waited_s > GRACE_S:
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)
    shutil.rmtree(temp_dir, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
