"""Which processes go on after a signal that asks the run to end, and which do not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from megatron_ppo.protocol.signals import ENDING_SIGNALS, deaf_children

# Starts a child and tells its id; whoever of the two ends, ends of a signal.
NESTED = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))  # as programs do that end in their own way
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""
# Ignores the signals itself; its children, forked and executed, do not.
IGNORING = """
import os, signal, subprocess, sys, time
from megatron_ppo.protocol.signals import ENDING_SIGNALS, ignore_ending_signals
ignore_ending_signals()
for number in ENDING_SIGNALS:
    os.kill(os.getpid(), number)
executed = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
executed.terminate()
print(-executed.wait(), flush=True)
reading, writing = os.pipe()
forked = os.fork()
if forked == 0:
    os.write(writing, b"up")
    time.sleep(600)
os.read(reading, 2)
os.kill(forked, signal.SIGTERM)
print(os.WTERMSIG(os.waitpid(forked, 0)[1]), flush=True)
"""
# What engines do at the latest when they start a process of their own.
LOCKING = """
import multiprocessing, os, signal
from megatron_ppo.protocol.signals import stay_deaf
stay_deaf()
multiprocessing.get_context("spawn").Lock()
os.kill(os.getpid(), signal.SIGTERM)
print("still here")
"""


def test_deaf_children_and_theirs_go_on_whatever_handlers_they_have() -> None:
    with deaf_children():
        parent = subprocess.Popen([sys.executable, "-c", NESTED], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        for pid in (parent.pid, child):
            for number in ENDING_SIGNALS:
                os.kill(pid, number)
        for pid in (parent.pid, child):
            with open(f"/proc/{pid}/status") as status:
                waiting = next(line for line in status if line.startswith("ShdPnd"))
            # They have arrived, and wait.
            assert int(waiting.split()[1], 16) == sum(1 << (number - 1) for number in ENDING_SIGNALS)
        assert parent.poll() is None
        os.kill(child, signal.SIGKILL)
    finally:
        parent.kill()
        parent.communicate()


def test_a_deaf_process_that_uses_multiprocessing_stays_deaf_if_it_says_so() -> None:
    with deaf_children():
        done = subprocess.run(
            [sys.executable, "-c", LOCKING], stdout=subprocess.PIPE, text=True, timeout=60, check=True
        )
    assert done.stdout == "still here\n"


def test_this_thread_hears_the_signals_again_after_the_block() -> None:
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("after"))
    try:
        with deaf_children():
            signal.raise_signal(signal.SIGUSR1)
            heard.append("inside")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == ["inside", "after"]


def test_a_process_that_ignores_them_can_still_end_its_own_children() -> None:
    with deaf_children():  # as the collector's process is
        done = subprocess.run(
            [sys.executable, "-c", IGNORING], stdout=subprocess.PIPE, text=True, timeout=60, check=True
        )
    assert done.stdout.split() == [str(int(signal.SIGTERM))] * 2
