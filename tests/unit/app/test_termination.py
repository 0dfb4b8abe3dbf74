"""SIGTERM unwinds the stack, or ends the process; and a rank tells a cause from its consequences."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time

import pytest

from megatron_ppo.app.termination import is_own_cause, lost_a_peer
from megatron_ppo.protocol.errors import CheckpointError, NonFiniteError, PartDiedError

PREAMBLE = """
import os, signal, sys, threading, time
from megatron_ppo.app.termination import terminate_as_exit

def abandon(message):
    print("abandoned:", message, flush=True)
    os._exit(3)
"""


def run(body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PREAMBLE + textwrap.dedent(body)], capture_output=True, text=True, timeout=60
    )


def test_sigterm_unwinds_the_stack() -> None:
    result = run("""
        with terminate_as_exit(abandon):
            try:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(30)
            finally:
                print("cleaned up", flush=True)
    """)
    assert (result.returncode, result.stdout) == (128 + 15, "cleaned up\n"), result.stderr


def test_a_main_thread_that_cannot_be_interrupted_is_abandoned() -> None:
    started = time.monotonic()
    result = run("""
        import ctypes
        from megatron_ppo.app import termination
        termination.LEAVE_AFTER_S = 1.0  # of a run: several seconds, which a test need not wait for
        with terminate_as_exit(abandon):
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
            # A C call that goes on after a signal, as a collective does; it gives up the interpreter lock.
            libc = ctypes.CDLL(None)
            barrier = (ctypes.c_char * 64)()
            libc.pthread_barrier_init(barrier, None, 2)
            libc.pthread_barrier_wait(barrier)
    """)
    assert result.returncode == 3, result.stderr
    assert result.stdout.startswith("abandoned: SIGTERM arrived"), result.stdout
    assert "within 1 s" in result.stdout, result.stdout
    assert time.monotonic() - started > 1.0


def test_afterwards_signals_do_what_they_did_before() -> None:
    result = run("""
        before = signal.getsignal(signal.SIGTERM)
        with terminate_as_exit(abandon):
            assert signal.getsignal(signal.SIGTERM) is not before
        assert signal.getsignal(signal.SIGTERM) is before
        assert signal.set_wakeup_fd(-1) == -1
        assert threading.active_count() == 1
    """)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("error", "is_cause"),
    [
        (OSError("the disk is full"), True),
        (MemoryError(), True),
        (RuntimeError("shapes differ"), True),
        (PartDiedError("rank 0 failed during validation"), False),
        (NonFiniteError("the loss is NaN"), False),
        (CheckpointError("rank 1: the disk is full"), False),
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1"), False),
    ],
)
def test_a_rank_reports_what_only_it_knows(error: Exception, is_cause: bool) -> None:
    assert is_own_cause(error) is is_cause
    assert lost_a_peer(error) is ("peer" in str(error))
