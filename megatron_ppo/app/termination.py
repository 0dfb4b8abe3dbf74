"""How a trainer process ends on a signal, and which of several ranks' failures says what went wrong.

Driven by `app.job` on the main thread of every rank. Invariant: SIGTERM ends the process within `LEAVE_AFTER_S`
of the end of whatever the main thread can be interrupted in, and at once after that limit where it cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator

from megatron_ppo.protocol.errors import (
    CheckpointError,
    GroupMismatchError,
    NonFiniteError,
    PartDiedError,
    RefitError,
    StaleGroupError,
)

LEAVE_AFTER_S = 6.0
"""A main thread that has not met the signal by then is inside a collective that its peers have left."""

# Raised on all ranks together, with a message of its own on rank 0.
_ON_EVERY_RANK = (
    CheckpointError,
    PartDiedError,
    NonFiniteError,
    RefitError,
    StaleGroupError,
    GroupMismatchError,
)
_LOST_PEER = (
    "closed by peer",
    "reset by peer",
    "Broken pipe",
    "remote process exited",
    "NCCL communicator was aborted",
)


@contextlib.contextmanager
def terminate_as_exit(abandon: Callable[[str], None]) -> Iterator[None]:
    """SIGTERM unwinds the stack, so that rank 0 ends its actors before it goes.

    Args:
        abandon: called from another thread, and must not return, when the main thread cannot be interrupted.
    """
    met = threading.Event()

    def leave(signum: int, _frame: object) -> None:
        met.set()
        raise SystemExit(128 + signum)

    # Python runs handlers on the main thread only; the descriptor gets its byte from the signal itself.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def watch() -> None:
        while numbers := os.read(reading, 64):
            if signal.SIGTERM in numbers and not met.wait(LEAVE_AFTER_S):
                abandon(f"SIGTERM arrived, and the main thread did not notice within {LEAVE_AFTER_S:.0f} s")

    watcher = threading.Thread(target=watch, name="sigterm", daemon=True)
    previous = signal.signal(signal.SIGTERM, leave)
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        signal.signal(signal.SIGTERM, previous)
        os.close(writing)
        watcher.join()
        os.close(reading)


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: a consequence, not a cause."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def is_on_every_rank(error: BaseException) -> bool:
    """Whether all ranks meet this error together, so that they may still act together."""
    return isinstance(error, _ON_EVERY_RANK)


def is_own_cause(error: BaseException) -> bool:
    """Whether a rank other than 0 has to report this error itself, because rank 0 does not know of it."""
    return not is_on_every_rank(error) and not lost_a_peer(error)
