"""Processes are ended by id and start time, also stopped ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from megatron_ppo.telemetry.processes import kill, start_time


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-I", "-c", "import time; time.sleep(60)"])
    yield process
    process.kill()
    process.wait(timeout=10)


def test_a_stopped_process_is_killed(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    os.kill(sleeper.pid, signal.SIGSTOP)
    kill({sleeper.pid: started})
    assert sleeper.wait(timeout=10) == -signal.SIGKILL


def test_a_process_that_has_taken_over_the_id_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    kill({sleeper.pid: str(int(started) - 1)})
    time.sleep(0.1)
    assert sleeper.poll() is None


def test_what_has_ended_has_no_start_time_and_cannot_be_killed(sleeper: subprocess.Popen[bytes]) -> None:
    started = start_time(sleeper.pid)
    assert started is not None
    sleeper.kill()
    sleeper.wait(timeout=10)
    assert start_time(sleeper.pid) is None
    kill({sleeper.pid: started})
