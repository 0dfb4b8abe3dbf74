"""A signal is a request, or unwinds the stack, or ends the process; and a rank tells a cause from its consequences."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_ppo.app.termination import is_own_cause, lost_a_peer, process_exists
from megatron_ppo.protocol.errors import (
    CheckpointError,
    NonFiniteError,
    PartDiedError,
    StopRequested,
    WaitTimeoutError,
)

PREAMBLE = """
import os, signal, sys, threading, time
from megatron_ppo.app.termination import SAME_REQUEST_S, ending_on_signals

requests, steps_end, unwinding = [], True, False

def abandon(message):
    print("abandoned:", message, flush=True)
    os._exit(3)

def ending():
    return ending_on_signals(
        request=requests.append, can_wait=lambda: steps_end, unwinds=lambda: unwinding, abandon=abandon
    )

def tell(number, *, after_s=0.0):
    timer = threading.Timer(after_s, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()

def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)

def sit_in_a_c_call():
    # One that goes on after a signal, as a collective does; it gives up the interpreter lock.
    import ctypes
    libc = ctypes.CDLL(None)
    barrier = (ctypes.c_char * 64)()
    libc.pthread_barrier_init(barrier, None, 2)
    libc.pthread_barrier_wait(barrier)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)], capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGUSR1"])
def test_the_first_signal_is_a_request_and_the_second_unwinds_the_stack(name: str) -> None:
    result = run(f"""
        with ending():
            try:
                tell(signal.{name})
                wait_for(lambda: requests)
                print(requests == [signal.{name}], flush=True)
                tell(signal.{name}, after_s=SAME_REQUEST_S + 0.1)
                time.sleep(30)
            finally:
                print("cleaned up", flush=True)
    """)
    assert (result.returncode, result.stdout) == (
        128 + getattr(signal, name),
        "True\ncleaned up\n",
    ), result.stderr


def test_signals_of_one_moment_are_one_request() -> None:
    """A batch system signals launcher and ranks, and the launcher passes on what it received."""
    result = run("""
        with ending():
            for _ in range(5):
                tell(signal.SIGTERM)
            wait_for(lambda: requests)
            time.sleep(0.5)
        print(requests == [signal.SIGTERM])
    """)
    assert (result.returncode, result.stdout) == (0, "True\n"), result.stderr


def test_a_signal_that_cannot_wait_for_a_step_to_end_unwinds_the_stack() -> None:
    result = run("""
        steps_end = False
        with ending():
            try:
                tell(signal.SIGTERM)
                time.sleep(30)
            finally:
                print("cleaned up", requests, flush=True)
    """)
    assert (result.returncode, result.stdout) == (128 + 15, "cleaned up []\n"), result.stderr


def test_a_request_reaches_a_main_thread_inside_a_c_call_which_is_left_alone() -> None:
    result = run("""
        def request(signum):
            print("requested", signum, flush=True)
            threading.Timer(0.3, os._exit, (0,)).start()

        with ending_on_signals(
            request=request, can_wait=lambda: True, unwinds=lambda: False, abandon=abandon
        ):
            tell(signal.SIGUSR1, after_s=0.2)
            sit_in_a_c_call()
    """)
    assert (result.returncode, result.stdout) == (0, f"requested {signal.SIGUSR1:d}\n"), result.stderr


def test_a_main_thread_that_cannot_be_interrupted_is_abandoned() -> None:
    started = time.monotonic()
    result = run("""
        from megatron_ppo.app import termination
        termination.LEAVE_AFTER_S = 1.0  # of a run: several seconds, which a test need not wait for
        steps_end = False
        with ending():
            tell(signal.SIGTERM, after_s=0.2)
            sit_in_a_c_call()
    """)
    assert result.returncode == 3, result.stderr
    assert result.stdout.startswith("abandoned: SIGTERM arrived"), result.stdout
    assert "within 1 s" in result.stdout, result.stdout
    assert time.monotonic() - started > 1.0


def test_a_stack_that_unwinds_already_is_not_interrupted() -> None:
    """Torchrun signals a rank that has lost a peer while it ends its actors."""
    result = run("""
        steps_end, unwinding = False, True
        with ending():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.3)
            print("cleaned up", requests, flush=True)
    """)
    assert (result.returncode, result.stdout) == (0, "cleaned up []\n"), result.stderr


def test_a_stack_that_does_not_come_to_its_end_is_abandoned() -> None:
    result = run("""
        from megatron_ppo.app import termination
        termination.CLEANED_UP_AFTER_S = 1.0
        steps_end, unwinding = False, True
        with ending():
            tell(signal.SIGTERM)
            time.sleep(30)
    """)
    assert result.returncode == 3, result.stderr
    assert "the end of the run took more than 1 s" in result.stdout


def test_afterwards_signals_do_what_they_did_before() -> None:
    result = run("""
        numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
        before = [signal.getsignal(number) for number in numbers]
        with ending():
            assert not set(map(signal.getsignal, numbers)) & set(before)
        assert [signal.getsignal(number) for number in numbers] == before
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == 1
    """)
    assert result.returncode == 0, result.stderr


def test_a_process_exists_until_it_is_gone() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert process_exists(process.pid)
    process.communicate(b"\n", timeout=60)
    assert not process_exists(process.pid)


@pytest.mark.parametrize(
    ("error", "is_cause"),
    [
        (OSError("the disk is full"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), True),
        (PartDiedError("rank 0 failed during validation"), False),
        (NonFiniteError("the loss is NaN"), False),
        (WaitTimeoutError("waited 600 s"), False),
        (StopRequested("stopped by SIGTERM"), False),
        (CheckpointError("rank 1: the disk is full"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), False),
    ],
)
def test_a_rank_reports_what_only_it_knows(error: Exception, is_cause: bool) -> None:
    assert is_own_cause(error) is is_cause
    assert lost_a_peer(error) is ("peer" in str(error))
