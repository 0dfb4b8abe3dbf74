"""Keeps the engine replicas alive: notices a death, ends what hangs, has the replica built again, gives up after too
many.

One thread per replica, on trainer rank 0, beside the main thread, which trains meanwhile. What the threads know is in
the `ReplicaTable`; a rebuilt replica is STALE there, and the main thread's next refit makes it HEALTHY. Imports no Ray.

Invariant: every death ends in a rebuild or in `give_up`, unless `stop` comes first.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Protocol

from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.protocol.replicas import Member, ReplicaState, ReplicaTable
from megatron_ppo.ray_actors.liveness import LivenessLimits, Question, Silence

logger = logging.getLogger(__name__)

LOOK_S = 0.5
_STOP_LIMIT_S = 5.0


class Rebuildable(Protocol):
    """The engines. `ray_actors.inference_group.InferenceGroup` implements it."""

    @property
    def table(self) -> ReplicaTable:
        """Their states."""
        ...

    def wait_for_death(self, member: Member, *, timeout_s: float) -> str | None:
        """Why `member` has died; None when it is alive after `timeout_s`."""
        ...

    def ask(self, member: Member) -> Question:
        """Ask the core of `member`, and every worker of it, for a sign of life."""
        ...

    def kill_all(self, member: Member) -> None:
        """SIGKILL every process of `member`, also where they stand still."""
        ...

    def rebuild(self, replica: int, *, stopping: Callable[[], bool]) -> None:
        """End what is left of `replica` and build it again; returns when it runs, or soon after `stopping`.

        Raises: EngineDeadError, WaitTimeoutError, or whatever building it raises.
        """
        ...


class EngineKeeper:
    """The threads.

    Args:
        engines: all of them built.
        give_up: called with the cause, from a thread, when a replica will not be built again.
        liveness: when a replica that could answer is taken to hang; None asks no questions.
    """

    def __init__(
        self,
        *,
        engines: Rebuildable,
        give_up: Callable[[str], None],
        liveness: LivenessLimits | None = None,
    ) -> None:
        self._engines = engines
        self._table = engines.table
        self._give_up = give_up
        self._liveness = liveness
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(
                target=self._keep_or_give_up, args=(replica,), name=f"engine-keeper-{replica}", daemon=True
            )
            for replica in range(len(self._table.statuses()))
        ]

    def start(self) -> None:
        """Begin to watch."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Rebuild nothing any more; before the engines are ended on purpose. Harmless when repeated."""
        self._stopping.set()
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=_STOP_LIMIT_S)

    def _keep_or_give_up(self, replica: int) -> None:
        try:
            self._keep(replica)
        except Exception as error:  # the end of a thread: nobody would build the replica again, or say so
            logger.exception("engine replica %d is not watched any more", replica)
            self._give_up(
                f"engine replica {replica} is not watched any more: {type(error).__name__}: {error}"
            )

    def _keep(self, replica: int) -> None:
        silence = Silence(limits=self._liveness, ask=self._engines.ask) if self._liveness else None
        while not self._stopping.is_set():
            # The main thread may have noticed first, in a call of its own.
            if self._table.statuses()[replica].state is ReplicaState.DEAD:
                if (reason := self._table.exhausted) is not None:
                    self._give_up(reason)
                    return
                self._rebuild(replica)
                continue
            member = self._table.member(replica)
            cause = self._engines.wait_for_death(member, timeout_s=LOOK_S)
            if self._stopping.is_set():
                return
            if cause is not None:
                self._table.died(member, cause)
            elif silence is not None:
                self._end_if_silent(silence, member)

    def _end_if_silent(self, silence: Silence, member: Member) -> None:
        if not self._table.answers(member.replica):
            silence.forget()
        elif (cause := silence.look(member)) is not None:
            # Told before it is done: whoever meets the consequences is late with the news.
            self._table.died(member, cause)
            self._engines.kill_all(member)

    def _rebuild(self, replica: int) -> None:
        logger.info("engine replica %d is built again", replica)
        try:
            self._engines.rebuild(replica, stopping=self._stopping.is_set)
        except MegatronPPOError as error:
            if not self._stopping.is_set():
                self._table.rebuild_failed(replica, str(error))
        else:
            if not self._stopping.is_set():
                self._table.built(replica)
