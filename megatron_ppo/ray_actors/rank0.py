"""What only rank 0 does, made to look the same on every rank; and the watch over the run's other processes.

Ray is known to trainer rank 0 alone. It talks to the actors and shares each result, or the failure, over a gloo
control group, so that no rank is left waiting in a collective that its peers will never enter.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import ray
import torch.distributed as dist

from megatron_ppo.protocol.errors import MegatronPPOError, PartDiedError, WaitTimeoutError
from megatron_ppo.protocol.trajectory import PromptGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 2.0
"""How long one look into the buffer waits; the other ranks hear from rank 0 at least this often."""
ANSWER_GRACE_S = 30.0
"""How much later than its own limit the buffer's answer may come before rank 0 asks itself what is wrong."""
ABANDONED_AFTER_S = 6.0
"""A failure that the main thread has not met by then (it is inside a collective or a kernel) ends the process."""


class RankZero:
    """Runs functions on rank 0 and gives every rank the result or the failure."""

    def __init__(self, *, rank: int, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group

    def run(self, what: str, function: Callable[[], T]) -> T:
        """Collective. `function` runs on rank 0 only; with several ranks its result must be picklable.

        Raises: on rank 0 the error of `function`, or a TypeError for a result that cannot be pickled; on the
            others a PartDiedError that quotes it.
        """
        if self._world_size == 1:
            return function()
        outcome: list[Any] = [None]
        if self._rank != 0:
            dist.broadcast_object_list(outcome, src=0, group=self._group)
            succeeded, value = outcome[0]
            if not succeeded:
                raise PartDiedError(f"rank 0 failed during {what}: {value}")
            return pickle.loads(value)  # type: ignore[no-any-return]
        try:
            result = function()
            outcome = [(True, _pickled(result, what))]
        except Exception as caught:  # a process boundary: raised again here and on every other rank
            dist.broadcast_object_list(
                [(False, f"{type(caught).__name__}: {caught}")], src=0, group=self._group
            )
            raise
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        return result


def _pickled(result: object, what: str) -> bytes:
    # Before the broadcast: inside it, the failure would leave the other ranks waiting for what never comes.
    try:
        return pickle.dumps(result)
    except (pickle.PicklingError, TypeError, AttributeError) as error:
        raise TypeError(
            f"the result of {what} is a {type(result).__name__} that cannot be sent to the other ranks: {error}"
        ) from error


class Supervisor:
    """Notices within a second that an actor has died and ends the run with the cause. Engines have an `EngineKeeper`.

    consumes: one never-ending call per watched process; it becomes ready only when the process is gone or broken.
    produces: the failure, raised in whatever the main thread waits for next; if the main thread does not come by
        within ABANDONED_AFTER_S, `abandon(message)` is called from the watching thread and must not return.
    """

    def __init__(self, *, abandon: Callable[[str], None]) -> None:
        self._abandon = abandon
        self._watched: dict[Any, str] = {}
        self._failure: PartDiedError | None = None
        self._noting = threading.Lock()
        self._met = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def watch(self, refs: Mapping[Any, str]) -> None:
        """Start watching: object ref of a never-ending call -> name of its process."""
        self._watched = dict(refs)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, before the processes are ended on purpose."""
        self._stopping.set()
        self._met.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def note(self, message: str) -> None:
        """Keep a failure that the caller has noticed; the first one counts."""
        with self._noting:
            if self._failure is None and not self._stopping.is_set():
                self._failure = PartDiedError(message)
                logger.error("%s", message)

    def report(self, message: str) -> None:
        """The same from another thread, which waits here until the main thread has met the failure.

        If the main thread does not come by in time, `abandon` ends the process.
        """
        self.note(message)
        if not self._met.wait(ABANDONED_AFTER_S):
            self._abandon(message)

    def raise_if_failed(self) -> None:
        """Raise the failure that was noticed, if any."""
        if self._failure is not None:
            self._met.set()
            raise self._failure

    def call(self, ref: Any, *, what: str, timeout_s: float) -> Any:
        """Wait for one remote call. Raises: PartDiedError, WaitTimeoutError naming `what`, or the call's own error."""
        deadline = time.monotonic() + timeout_s
        while not ray.wait([ref], timeout=0.2)[0]:
            self.raise_if_failed()
            if time.monotonic() > deadline:
                raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}")
        try:
            return ray.get(ref)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from error
        except ray.exceptions.RayActorError as error:
            raise PartDiedError(f"{what}: the process behind it died: {error}") from error

    def _watch(self) -> None:
        while not self._stopping.is_set():
            ready, _ = ray.wait(list(self._watched), timeout=1.0)
            if self._stopping.is_set():
                return
            if ready:
                self.report(f"{self._watched[ready[0]]} died: {_describe(ready[0])}")
                return


def _cause(error: ray.exceptions.RayTaskError) -> BaseException:
    cause = error.cause if isinstance(error.cause, BaseException) else error
    return cause if isinstance(cause, MegatronPPOError) else error


def _describe(ref: Any) -> str:
    try:
        ray.get(ref, timeout=1)
    except ray.exceptions.RayTaskError as error:
        cause = error.cause if isinstance(error.cause, BaseException) else error
        return f"{type(cause).__name__}: {cause}"
    except ray.exceptions.RayError as error:
        return str(error)
    return "it ended by itself"


class RayGroupSource:
    """The learner's side of the replay buffer: rank 0 pops the actor, every rank gets the groups.

    Args:
        groups_timeout_s: longest wait for the groups of a step.
        refresh_engines: collective; gives the current weights to engines that came up without them, and says whether
            there were any. The learner waits here for groups that such an engine may be the only one to generate.
    """

    def __init__(
        self,
        *,
        rank_zero: RankZero,
        supervisor: Supervisor | None,
        replay: Any | None,
        groups_timeout_s: float,
        refresh_engines: Callable[[], bool] = lambda: False,
    ) -> None:
        self._rank_zero = rank_zero
        self._supervisor = supervisor
        self._replay = replay
        self._refresh_engines = refresh_engines
        self._groups_timeout_s = groups_timeout_s
        self._asked: Any | None = None

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """The groups of `target_step`. Raises: WaitTimeoutError with the pending prompts, PartDiedError."""
        started = time.monotonic()
        while True:
            if self._refresh_engines():  # generation begins again only now
                started = time.monotonic()
            groups = self._rank_zero.run(
                f"take of step {target_step}", functools.partial(self._poll, target_step, started)
            )
            if groups is not None:
                return groups

    def open(self, *, step: int, frontier: int) -> None:
        """Announce the learner's step and let the collector work up to `frontier`."""
        self._rank_zero.run(f"opening of the window at step {step}", lambda: self._open(step, frontier))

    def _poll(self, target_step: int, started: float) -> list[PromptGroup] | None:
        assert self._supervisor is not None and self._replay is not None
        self._supervisor.raise_if_failed()
        if self._asked is None:
            self._asked = self._replay.take.remote(target_step=target_step, timeout_s=POLL_S)
        try:
            groups: list[PromptGroup] = self._supervisor.call(
                self._asked, what=f"the groups of step {target_step}", timeout_s=POLL_S + ANSWER_GRACE_S
            )
        except WaitTimeoutError as error:
            # Only the buffer's own time limit is an answer. A call that is merely late may still take the groups,
            # which then count as trained: it must be waited for, not repeated.
            if error.__cause__ is not None:
                self._asked = None
            waited = time.monotonic() - started
            if waited < self._groups_timeout_s:
                return None
            raise WaitTimeoutError(
                f"step {target_step + 1} has no complete set of groups after {waited:.0f} s, "
                f"cluster.groups_timeout_s is {self._groups_timeout_s:.0f}; {error}"
            ) from error
        self._asked = None
        return groups

    def _open(self, step: int, frontier: int) -> None:
        assert self._supervisor is not None and self._replay is not None
        self._supervisor.call(
            self._replay.open.remote(step=step, frontier=frontier), what="the window to open", timeout_s=30
        )


class RayReplaySnapshots:
    """Snapshot and restore of the replay actor, with the collector held still by an acknowledged call."""

    def __init__(self, *, supervisor: Supervisor, replay: Any, collector: Any) -> None:
        self._supervisor = supervisor
        self._replay = replay
        self._collector = collector

    def snapshot(self) -> str:
        """Buffer, targets, ledger and prompt position of one instant, as JSON text."""
        call = self._supervisor.call
        call(self._collector.pause.remote(), what="the collector to pause", timeout_s=30)
        try:
            text: str = call(self._replay.snapshot.remote(), what="the replay snapshot", timeout_s=60)
        finally:
            call(self._collector.resume.remote(), what="the collector to resume", timeout_s=30)
        return text

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """Continue from a snapshot, or from an empty buffer."""
        self._supervisor.call(
            self._replay.restore.remote(snapshot, resume_step=resume_step),
            what="the replay buffer to restore",
            timeout_s=60,
        )
