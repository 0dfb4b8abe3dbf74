"""The signals that ask a run to end, and how the processes around the trainer outlive them.

A batch system may send them to every process of a job. The trainer ranks answer, after their step; the processes that
they need until then start deaf to them, and are ended by those who started them. Driven by whatever starts or is such a
process. Invariant: the process that uses this keeps its own mask and handlers, unless it says that it ignores them.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def deaf_children() -> Iterator[None]:
    """Processes that this thread starts inside the block, and all that they start, never receive ENDING_SIGNALS.

    Blocked, not ignored: a program that installs handlers, as Ray's and vLLM's do, takes back what is ignored, but
    hardly one changes its mask. Only SIGKILL ends them. A signal to this thread waits until the block is left.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def stay_deaf() -> None:
    """For a deaf process that may use `multiprocessing`: it and its children remain deaf. Before the first such use.

    Python 3.11's resource tracker unblocks SIGTERM and SIGINT in the thread that first needs it, whatever was before.
    """
    from multiprocessing import resource_tracker  # only where it is used

    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_ending_signals() -> None:
    """This process goes on after ENDING_SIGNALS; what it starts from now on can be ended by them, as usual.

    For a process that runs code of users, who end their own child processes with SIGTERM. Main thread only.
    """
    for number in ENDING_SIGNALS:
        # Not SIG_IGN, nor the mask, which programs that are started from here would inherit.
        signal.signal(number, lambda _signum, _frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)
    os.register_at_fork(after_in_child=_default_handlers)


def _default_handlers() -> None:
    for number in ENDING_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
