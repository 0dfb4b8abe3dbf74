"""How a trainer process ends on a signal, and which of several ranks' failures says what went wrong.

Driven by `app.job` on the main thread of every rank. The first signal asks the run to end between two steps; a second
one, or one that arrives when no step boundary can be reached, unwinds the stack. Invariant: a process that is to unwind
ends within `LEAVE_AFTER_S` of the end of whatever the main thread can be interrupted in, and at once after that limit
where it cannot.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

from megatron_ppo.protocol.errors import (
    CheckpointError,
    GroupMismatchError,
    NonFiniteError,
    PartDiedError,
    RefitError,
    StaleGroupError,
    StopRequested,
    WaitTimeoutError,
)
from megatron_ppo.protocol.signals import ENDING_SIGNALS

LEAVE_AFTER_S = 6.0
"""A main thread that has not met the signal by then is inside a collective that its peers have left."""
_AGAIN_AFTER_S = 0.05
CLEANED_UP_AFTER_S = 15.0
"""How long a stack that unwinds already may go on after a signal. Below the 30 s after which torchrun kills."""
SAME_REQUEST_S = 1.0
"""A batch system may signal launcher and ranks, and the launcher passes its own signal on: one request, not two."""

# Raised on all ranks together, with a message of its own on rank 0.
_ON_EVERY_RANK = (
    CheckpointError,
    PartDiedError,
    WaitTimeoutError,
    StopRequested,
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


class _SignalWatch:
    """Decides what each signal means, in a thread of its own: the main thread may be inside a C call for long."""

    def __init__(
        self,
        *,
        request: Callable[[int], None],
        can_wait: Callable[[], bool],
        unwinds: Callable[[], bool],
        abandon: Callable[[str], None],
    ) -> None:
        self._request = request
        self._can_wait = can_wait
        self._unwinds = unwinds
        self._abandon = abandon
        self._main = threading.get_ident()
        self._requested_at: float | None = None
        self._leaving: int | None = None
        self._met = threading.Event()
        self.over = threading.Event()

    def handle(self, _signum: int, _frame: object) -> None:
        """The handler, on the main thread. Python calls it for the first signal, too, which only wakes a wait."""
        if self._leaving is not None and not self._met.is_set():
            self._met.set()
            raise SystemExit(128 + self._leaving)

    def watch(self, descriptor: int) -> None:
        """Read signal numbers until the descriptor is closed."""
        while numbers := os.read(descriptor, 64):
            for signum in numbers:
                if signum in ENDING_SIGNALS and self._leaving is None:
                    self._arrived(signum)

    def _arrived(self, signum: int) -> None:
        now = time.monotonic()
        if self._requested_at is None and self._can_wait():
            self._requested_at = now
            self._request(signum)
        elif self._requested_at is None or now - self._requested_at > SAME_REQUEST_S or not self._can_wait():
            self._leave(signum)

    def _leave(self, signum: int) -> None:
        name = signal.Signals(signum).name
        if self._unwinds():
            # Interrupted, it would leave processes behind; what it must not do is to hang.
            self._met.set()
            self._leaving = signum
            if not self.over.wait(CLEANED_UP_AFTER_S):
                self._abandon(
                    f"{name} arrived, and the end of the run took more than {CLEANED_UP_AFTER_S:.0f} s"
                )
            return
        self._leaving = signum
        # The handler has run already, and let the main thread go on. Again and again: a signal that arrives just before
        # a call that waits, a sleep that is resumed for example, does not interrupt it.
        deadline = time.monotonic() + LEAVE_AFTER_S
        while time.monotonic() < deadline:
            signal.pthread_kill(self._main, signum)
            if self._met.wait(_AGAIN_AFTER_S):
                return
        self._abandon(f"{name} arrived, and the main thread did not notice within {LEAVE_AFTER_S:.0f} s")


@contextlib.contextmanager
def ending_on_signals(
    *,
    request: Callable[[int], None],
    can_wait: Callable[[], bool],
    unwinds: Callable[[], bool],
    abandon: Callable[[str], None],
) -> Iterator[None]:
    """Inside the block, the first ending signal is a request, and one that cannot wait unwinds the stack as SystemExit.

    Args:
        request: told the number of the first signal, from another thread.
        can_wait: whether the main thread will come to the end of a step; asked from another thread.
        unwinds: whether it is closing what it has opened; then it is given CLEANED_UP_AFTER_S. Likewise.
        abandon: called from another thread, and must not return, when the main thread cannot be interrupted.
    """
    watch = _SignalWatch(request=request, can_wait=can_wait, unwinds=unwinds, abandon=abandon)
    # Python runs handlers on the main thread only; the descriptor gets its byte from the signal itself.
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    watcher = threading.Thread(target=watch.watch, args=(reading,), name="signals", daemon=True)
    previous = {number: signal.signal(number, watch.handle) for number in ENDING_SIGNALS}
    previous_fd = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher.start()
    try:
        yield
    finally:
        watch.over.set()
        signal.set_wakeup_fd(previous_fd)
        for number, handler in previous.items():
            signal.signal(number, handler)
        os.close(writing)
        watcher.join()
        os.close(reading)


def process_exists(pid: int) -> bool:
    """Whether the process with that id, of this host, has not ended."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it exists, as another user's
        return True
    return True


def lost_a_peer(error: BaseException) -> bool:
    """Whether a collective failed because another rank is gone: a consequence, not a cause."""
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _LOST_PEER)


def is_on_every_rank(error: BaseException) -> bool:
    """Whether all ranks meet this error together, so that they may still act together."""
    return isinstance(error, _ON_EVERY_RANK)


def is_own_cause(error: BaseException) -> bool:
    """Whether a rank other than 0 has to report this error itself, because rank 0 does not know of it."""
    return not is_on_every_rank(error) and not lost_a_peer(error)
