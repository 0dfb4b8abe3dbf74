"""`scripts/launch.py` passes a signal on to the ranks, waits for them, and exits as they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from launcher import ROOT

from tests.listening_sockets import listening

pytestmark = pytest.mark.timeout(200)

SAME_REQUEST_S = 1.0
"""Signals that are closer to each other are one request, of `scripts/launch.py`."""

RANK = """
import os, pathlib, signal, sys, time
import torch.distributed as dist
folder, code, step_s = pathlib.Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
rank = os.environ["RANK"]
got = []

def end(signum, frame):
    got.append(signum)
    (folder / f"got_{rank}").write_text(" ".join(map(str, map(int, got))))
    time.sleep(step_s)  # the rest of a step
    os._exit(code)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, end)
with (folder / f"starts_{rank}").open("a") as starts:
    print("started", file=starts)
store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False)
store.set(rank, "here")
store.wait(["0", "1"])
(folder / f"ready_{rank}").write_text(str(os.getpid()))
time.sleep(120)
"""


class Launch:
    def __init__(
        self, folder: Path, code: int, *, step_s: float = 0.5, words: tuple[str, ...] = ("--master-port=0",)
    ) -> None:
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(RANK)
        command = [
            sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node=2", *words, "--shutdown-timeout=2",
            "--max-restarts=1",
            str(script), str(folder), str(code), str(step_s),
        ]  # fmt: skip
        with (folder / "out").open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"}
            )
        self.wait_for("ready_0", "ready_1")

    def wait_for(self, *names: str) -> None:
        deadline = time.monotonic() + 90
        while not all((self.folder / name).exists() for name in names):
            assert self.process.poll() is None and time.monotonic() < deadline, (
                self.folder / "out"
            ).read_text()
            time.sleep(0.05)


def assert_on_loopback(launch: Launch) -> None:
    """The ranks have met, at a store that no other host can reach."""
    tree = psutil.Process(launch.process.pid)
    sockets = listening([tree, *tree.children(recursive=True)])
    assert list(sockets.values()) == [False], sockets


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.process.kill()


@pytest.mark.slow  # a real run has exit code 0 in test_ending
@pytest.mark.parametrize(("signum", "code"), [(signal.SIGUSR1, 0), (signal.SIGTERM, 3)])
def test_a_signal_to_the_launcher_is_the_ranks_to_answer(
    tmp_path: Path, launches: list[Launch], signum: signal.Signals, code: int
) -> None:
    launch = Launch(tmp_path, code, words=("--standalone",) if code else ("--master-port=0",))
    launches.append(launch)
    assert_on_loopback(launch)
    launch.process.send_signal(signum)
    ended = launch.process.wait(timeout=90)
    assert (ended == 0) == (code == 0), (tmp_path / "out").read_text()
    # A rank that is the last to fail hears from torchrun of the first.
    first = [(tmp_path / f"got_{rank}").read_text().split()[0] for rank in (0, 1)]
    assert first == [str(int(signum))] * 2
    assert [(tmp_path / f"starts_{rank}").read_text() for rank in (0, 1)] == ["started\n"] * 2


def test_a_second_signal_ends_ranks_that_do_not_come_to_the_end_of_their_step(
    tmp_path: Path, launches: list[Launch]
) -> None:
    launch = Launch(tmp_path, 0, step_s=100.0)
    launches.append(launch)
    assert_on_loopback(launch)
    launch.process.send_signal(signal.SIGINT)
    launch.process.send_signal(signal.SIGTERM)  # of the same request: batch systems signal twice
    launch.wait_for("got_0", "got_1")
    time.sleep(SAME_REQUEST_S + 0.2)
    assert launch.process.poll() is None, "a signal that came twice at once counted as two"
    launch.process.send_signal(signal.SIGINT)
    assert launch.process.wait(timeout=30) == 128 + signal.SIGINT, (tmp_path / "out").read_text()
    first_then_torchruns = f"{int(signal.SIGINT)} {int(signal.SIGTERM)}"
    assert [(tmp_path / f"got_{rank}").read_text() for rank in (0, 1)] == [first_then_torchruns] * 2
    assert not any(psutil.pid_exists(int((tmp_path / f"ready_{rank}").read_text())) for rank in (0, 1))
