"""What only rank 0 does, made to look the same on every rank; and the watch over the run's other processes.

Ray is known to trainer rank 0 alone. It talks to the actors and shares each result, or the failure, over a gloo
control group, so that no rank is left waiting in a collective that its peers will never enter.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import pickle
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import ray
import torch.distributed as dist

from megatron_ppo.loop.checkpoints import without_groups
from megatron_ppo.protocol.errors import (
    MegatronPPOError,
    PartDiedError,
    RankZeroFailedError,
    WaitTimeoutError,
)
from megatron_ppo.protocol.trajectory import PromptGroup

logger = logging.getLogger(__name__)

T = TypeVar("T")
POLL_S = 2.0
"""How long one look into the buffer waits; the other ranks hear from rank 0 at least this often."""
ANSWER_GRACE_S = 30.0
"""How much later than its own limit the buffer's answer may come before rank 0 asks itself what is wrong."""
NOTICED_WITHIN_S = 3.0
"""How long after a process has died the watch over it knows of it, also on a loaded machine."""
ACKNOWLEDGED_WITHIN_S = 10.0
"""How long a save waits for the collector to hold still."""


class RankZero:
    """Runs functions on rank 0 and gives every rank the result or the failure.

    Attributes:
        meeting: entered wherever this rank waits for other ranks: rank 0 while it shares a result, not while it acts.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        meeting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._rank = rank
        self._world_size = world_size
        self._group = group
        self.meeting = meeting

    def run(self, what: str, function: Callable[[], T]) -> T:
        """Collective. `function` runs on rank 0 only; with several ranks its result must be picklable.

        Raises: on rank 0 the error of `function`, or a TypeError for a result that cannot be pickled; on the
            others a PartDiedError that quotes it, which is a RankZeroFailedError unless a part or a wait was to blame.
        """
        if self._world_size == 1:
            return function()
        if self._rank != 0:
            failure, value = self._share(None)
            if failure is not None:
                raise failure(f"rank 0 failed during {what}: {value}")
            return pickle.loads(value)  # type: ignore[no-any-return]
        try:
            result = function()
            outcome = (None, _pickled(result, what))
        except Exception as caught:  # a process boundary: raised again here and on every other rank
            of_a_part = isinstance(caught, (PartDiedError, WaitTimeoutError))
            failure = PartDiedError if of_a_part else RankZeroFailedError
            self._share((failure, f"{type(caught).__name__}: {caught}"))
            raise
        self._share(outcome)
        return result

    def _share(self, outcome: tuple[Any, Any] | None) -> Any:
        """Collective: the outcome of rank 0, which alone gives one."""
        shared: list[Any] = [outcome]
        with self.meeting():
            dist.broadcast_object_list(shared, src=0, group=self._group)
        return shared[0]


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
    produces: the first failure, raised in whatever the main thread waits for next. The step that is going on can be
        finished and saved without the process, so nobody interrupts it.
    """

    def __init__(self) -> None:
        self._watched: dict[Any, str] = {}
        self._failure: PartDiedError | None = None
        self._noting = threading.Lock()
        self._failed = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="supervisor", daemon=True)

    def watch(self, refs: Mapping[Any, str]) -> None:
        """Start watching: object ref of a never-ending call -> name of its process."""
        self._watched = dict(refs)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching, before the processes are ended on purpose."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)

    def note(self, message: str) -> None:
        """Keep a failure that the caller has noticed, from any thread; the first one counts."""
        with self._noting:
            if self._stopping.is_set():
                return
            if self._failure is None:
                self._failure = PartDiedError(message)
                logger.error("%s", message)
        self._failed.set()

    def raise_if_failed(self) -> None:
        """Raise the failure that was noticed, if any."""
        if self._failure is not None:
            raise self._failure

    def raise_cause_of(self, error: PartDiedError) -> NoReturn:
        """Raise the failure that is about to be noticed, from `error`, which a call to a dead process has met."""
        if self._thread.is_alive():
            self._failed.wait(NOTICED_WITHIN_S)
        raise (self._failure or error) from (error if self._failure else error.__cause__)

    def call(self, ref: Any, *, what: str, timeout_s: float, despite_failure: bool = False) -> Any:
        """Wait for one remote call.

        Args:
            despite_failure: wait also after another process has died.
        Raises: PartDiedError, WaitTimeoutError naming `what`, or the call's own error.
        """
        deadline = time.monotonic() + timeout_s
        while not ray.wait([ref], timeout=0.2)[0]:
            if not despite_failure:
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
        watched = dict(self._watched)
        while watched and not self._stopping.is_set():
            ready, _ = ray.wait(list(watched), timeout=1.0)
            if self._stopping.is_set():
                return
            for ref in ready:
                self.note(f"{watched.pop(ref)} died: {_describe(ref)}")


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


@dataclass(slots=True)
class KnownPosition:
    """The replay buffer's state without finished groups, as rank 0 knows it since the last take or restore.

    Enough to go on without losing a prompt when the buffer's process is gone; JSON text, None for a new run.
    """

    text: str | None = None


class RayGroupSource:
    """The learner's side of the replay buffer: rank 0 pops the actor, every rank gets the groups.

    Args:
        groups_timeout_s: longest wait for the groups of a step.
        refresh_engines: collective; gives the current weights to engines that came up without them, and says whether
            there were any. The learner waits here for groups that such an engine may be the only one to generate.
        position: is kept up to date with every take.
        check_interrupted: asked on every rank together while nothing is being taken; raises to end the wait.
    """

    def __init__(
        self,
        *,
        rank_zero: RankZero,
        supervisor: Supervisor | None,
        replay: Any | None,
        groups_timeout_s: float,
        refresh_engines: Callable[[], bool] = lambda: False,
        position: KnownPosition | None = None,
        check_interrupted: Callable[[], None] = lambda: None,
    ) -> None:
        self._rank_zero = rank_zero
        self._supervisor = supervisor
        self._replay = replay
        self._refresh_engines = refresh_engines
        self._groups_timeout_s = groups_timeout_s
        self._position = position or KnownPosition()
        self._check_interrupted = check_interrupted
        self._asked: Any | None = None

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """The groups of `target_step`.

        Raises: WaitTimeoutError with the pending prompts, PartDiedError, or what ends the wait; nothing was taken then.
        """
        started = time.monotonic()
        while True:
            if self._refresh_engines():  # generation begins again only now
                started = time.monotonic()
            groups, asking = self._rank_zero.run(
                f"take of step {target_step}", functools.partial(self._poll, target_step, started)
            )
            if groups is not None:
                return groups
            if not asking:
                self._check_interrupted()

    def open(self, *, step: int, frontier: int) -> None:
        """Announce the learner's step and let the collector work up to `frontier`."""
        self._rank_zero.run(f"opening of the window at step {step}", lambda: self._open(step, frontier))

    def _poll(self, target_step: int, started: float) -> tuple[list[PromptGroup] | None, bool]:
        """The groups, if they came, and whether the buffer is still being asked for them."""
        assert self._supervisor is not None and self._replay is not None
        if self._asked is None:
            self._supervisor.raise_if_failed()
            self._asked = self._replay.take_with_position.remote(target_step=target_step, timeout_s=POLL_S)
        try:
            # Also when a process has died meanwhile: what is taken is trained on before the run ends.
            groups, position = self._supervisor.call(
                self._asked,
                what=f"the groups of step {target_step}",
                timeout_s=POLL_S + ANSWER_GRACE_S,
                despite_failure=True,
            )
        except WaitTimeoutError as error:
            # Only the buffer's own time limit is an answer. A call that is merely late may still take the groups,
            # which then count as trained: it must be waited for, not repeated.
            if error.__cause__ is not None:
                self._asked = None
            waited = time.monotonic() - started
            if waited < self._groups_timeout_s:
                return None, self._asked is not None
            raise WaitTimeoutError(
                f"step {target_step + 1} has no complete set of groups after {waited:.0f} s, "
                f"cluster.groups_timeout_s is {self._groups_timeout_s:.0f}; {error}"
            ) from error
        except PartDiedError as error:
            self._asked = None
            self._supervisor.raise_cause_of(error)
        self._asked = None
        self._position.text = position
        return groups, False

    def _open(self, step: int, frontier: int) -> None:
        assert self._supervisor is not None and self._replay is not None
        self._supervisor.call(
            self._replay.open.remote(step=step, frontier=frontier), what="the window to open", timeout_s=30
        )


class RayReplaySnapshots:
    """Snapshot and restore of the replay actor, with the collector held still by an acknowledged call.

    The buffer alone makes the snapshot consistent: it is one method of an actor with one event loop, so no reservation
    or commit is half in it, and what is in flight is in it as reserved, which a restore makes pending again. Holding
    the collector still is a second safeguard. So one that is dead, or does not acknowledge within
    ACKNOWLEDGED_WITHIN_S, costs the log an error and the checkpoint nothing.

    Also without the buffer: for a dead one the position of the last take stands in; the groups that it held are
    generated again.
    """

    def __init__(
        self, *, supervisor: Supervisor, replay: Any, collector: Any, position: KnownPosition | None = None
    ) -> None:
        self._supervisor = supervisor
        self._replay = replay
        self._collector = collector
        self._position = position or KnownPosition()

    def snapshot(self) -> str:
        """Buffer, targets, ledger and prompt position of one instant, as JSON text."""
        paused = self._tell("pause")
        try:
            text: str = self._supervisor.call(
                self._replay.snapshot.remote(),
                what="the replay snapshot",
                timeout_s=60,
                despite_failure=True,
            )
        except (PartDiedError, WaitTimeoutError) as error:
            if self._position.text is None:
                raise
            logger.error("the checkpoint does without the replay buffer's groups: %s", error)
            return self._position.text
        finally:
            if paused:
                self._tell("resume")
            else:  # in case it pauses later
                self._collector.resume.remote()
        return text

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """Continue from a snapshot, or from an empty buffer."""
        self._supervisor.call(
            self._replay.restore.remote(snapshot, resume_step=resume_step),
            what="the replay buffer to restore",
            timeout_s=60,
        )
        self._position.text = None if snapshot is None else without_groups(snapshot)

    def _tell(self, what: str) -> bool:
        """Whether the collector acknowledged it."""
        try:
            self._supervisor.call(
                getattr(self._collector, what).remote(),
                what=f"the collector to {what}",
                timeout_s=ACKNOWLEDGED_WITHIN_S,
                despite_failure=True,
            )
        except (PartDiedError, WaitTimeoutError) as error:
            logger.error("%s", error)
            return False
        return True
