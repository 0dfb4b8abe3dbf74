"""`scripts/launch.py` passes a signal on to the ranks, waits for them, and exits as they do."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import ROOT, free_port

pytestmark = pytest.mark.timeout(200)

RANK = """
import os, pathlib, signal, sys, time
folder, code = pathlib.Path(sys.argv[1]), int(sys.argv[2])
rank = os.environ["RANK"]

def end(signum, frame):
    (folder / f"got_{rank}").write_text(str(signum))
    time.sleep(0.5)  # the rest of a step
    os._exit(code)

for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, end)
(folder / f"ready_{rank}").touch()
time.sleep(120)
"""


class Launch:
    def __init__(self, folder: Path, code: int) -> None:
        self.folder = folder
        script = folder / "rank.py"
        script.write_text(RANK)
        command = [
            sys.executable, str(ROOT / "scripts" / "launch.py"), "--nproc-per-node=2", "--master-addr=127.0.0.1",
            f"--master-port={free_port()}", str(script), str(folder), str(code),
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


@pytest.fixture
def launches() -> Iterator[list[Launch]]:
    started: list[Launch] = []
    yield started
    for launch in started:
        launch.process.kill()


@pytest.mark.parametrize(
    ("signum", "code"), [(signal.SIGUSR1, 0), pytest.param(signal.SIGTERM, 3, marks=pytest.mark.slow)]
)
def test_a_signal_to_the_launcher_is_the_ranks_to_answer(
    tmp_path: Path, launches: list[Launch], signum: signal.Signals, code: int
) -> None:
    launch = Launch(tmp_path, code)
    launches.append(launch)
    launch.process.send_signal(signum)
    ended = launch.process.wait(timeout=90)
    assert (ended == 0) == (code == 0), (tmp_path / "out").read_text()
    assert [(tmp_path / f"got_{rank}").read_text() for rank in (0, 1)] == [str(int(signum))] * 2
