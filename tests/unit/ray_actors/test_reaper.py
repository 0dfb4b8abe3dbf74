"""The reaper ends what a cluster's driver has left behind, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from megatron_ppo.ray_actors import reaper

LIMIT_S = 60.0
# Starts a child, tells its process id, then waits to be ended.
PARENT = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "print(child.pid, flush=True)\n"
    "time.sleep(600)\n"
)
SLEEPER = "import time; time.sleep(600)"
# Alone and without site packages, as the cluster starts it, but with less patience for what does not end by itself.
REAPER = (
    "import runpy, sys\n"
    "main = runpy.run_path(sys.argv[1])['main']\n"
    "main.__globals__['GRACE_S'] = 0.5\n"
    "main(sys.argv[2], int(sys.argv[3]))\n"
)

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts processes of this one and ends those that are left."""
    started: list[subprocess.Popen[str]] = []

    def _start(*command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield _start
    for process in started:
        _kill_tree(process)


def is_alive(pid: int) -> bool:
    """Whether it runs; a zombie does not."""
    try:
        return (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _kill_tree(process: subprocess.Popen[str]) -> None:
    children = Path("/proc") / str(process.pid) / "task" / str(process.pid) / "children"
    pids = [int(pid) for pid in children.read_text().split()] if children.exists() else []
    process.kill()
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(timeout=LIMIT_S)
    for stream in (process.stdin, process.stdout):
        if stream is not None:
            stream.close()


def child_of(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline())


def wait_until_dead(*pids: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while any(is_alive(pid) for pid in pids):
        assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {pids} to end"
        time.sleep(0.05)


def test_descendants_that_name_the_cluster_are_ended_when_the_driver_is_gone(
    tmp_path: Path, start: Start
) -> None:
    cluster_dir = tmp_path / "cluster"
    (cluster_dir / "session").mkdir(parents=True)
    # This process plays the driver. Ray's processes name their folder; what they start need not.
    raylet = start("-c", PARENT, str(cluster_dir))
    worker = child_of(raylet)
    bystander = start("-c", SLEEPER, str(tmp_path / "another cluster"))
    # The driver's own other children, and theirs, are none of the cluster's.
    other = start("-c", PARENT, "unrelated")
    others_child = child_of(other)

    watcher = start("-I", "-c", REAPER, reaper.__file__, str(cluster_dir), str(os.getpid()))
    time.sleep(0.5)
    assert is_alive(raylet.pid) and watcher.poll() is None, "nothing ends while the driver lives"
    assert watcher.stdin is not None
    watcher.stdin.close()  # the driver is gone
    watcher.wait(timeout=LIMIT_S)
    wait_until_dead(raylet.pid, worker)
    assert not cluster_dir.exists()
    assert all(is_alive(pid) for pid in (bystander.pid, other.pid, others_child))


def test_processes_that_name_the_folder_but_are_not_the_drivers_are_not_seen(
    tmp_path: Path, start: Start
) -> None:
    driver = start("-c", SLEEPER)
    start("-c", SLEEPER, str(tmp_path))
    processes = reaper.ClusterProcesses(str(tmp_path), driver.pid)
    processes.scan()
    assert processes.alive() == []


def test_a_process_that_ended_is_not_alive(tmp_path: Path, start: Start) -> None:
    raylet = start("-c", SLEEPER, str(tmp_path))
    processes = reaper.ClusterProcesses(str(tmp_path), os.getpid())
    processes.scan()
    assert processes.alive() == [raylet.pid]
    raylet.kill()
    raylet.wait(timeout=LIMIT_S)
    assert processes.alive() == []
