"""Who of the engine replicas may serve, who waits for weights, who is being rebuilt.

DEAD → STALE → HEALTHY, where a refit leads from STALE to HEALTHY; every refit pauses HEALTHY replicas, which are STALE
until it has succeeded, and any state falls back to DEAD. A STALE replica that a refit did not wait for is slow: none
addresses it before it has paused. Driven by the inference group (deaths, refits) and by the keeper's threads (rebuilds)
on trainer rank 0, and therefore thread-safe.

Invariant: every HEALTHY replica serves one and the same version, the last one that was published.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal

logger = logging.getLogger(__name__)


class ReplicaState(StrEnum):
    """DEAD: no engine runs there, or it is being built. STALE: it runs, but serves nothing before a refit has given
    it the current version. HEALTHY: it serves the current version.
    """

    DEAD = "DEAD"
    STALE = "STALE"
    HEALTHY = "HEALTHY"


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One life of a replica. `deaths`: how often it had died before; news of an earlier life is old news."""

    replica: int
    deaths: int

    def __str__(self) -> str:
        return f"engine replica {self.replica}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaStatus:
    """State of one replica now.

    Attributes:
        version: the one that it serves, or has served; None before its first refit.
        in_transfer: its workers may be waiting for other members of a refit, and answer nothing meanwhile.
        slow: it is STALE because it was left out of a publication, and has not paused yet.
    """

    state: ReplicaState
    deaths: int
    version: int | None
    in_transfer: bool = False
    slow: bool = False


PauseMode = Literal["drain", "keep"]
"""How a refit pauses an engine: its running requests finish first, or are frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PausedEngines:
    """How the engines stand after the pause of a refit.

    Attributes:
        ready: names of the workers of those that have paused, see `refit.fleet.EngineFleet.muster`.
        num_slow: engines that run and were not waited for, now or in an earlier refit.
    """

    ready: Sequence[str]
    num_slow: int = 0


class ReplicaTable:
    """The states of all replicas; DEAD at first, because nothing has been built.

    Args:
        max_restarts: rebuilds of one replica; a further death exhausts the table.
    """

    def __init__(self, *, replicas: int, max_restarts: int) -> None:
        if replicas < 1 or max_restarts < 0:
            raise ValueError(f"needs replicas >= 1 and max_restarts >= 0, got {replicas} and {max_restarts}")
        self._max_restarts = max_restarts
        self._replicas = [
            ReplicaStatus(state=ReplicaState.DEAD, deaths=0, version=None) for _ in range(replicas)
        ]
        self._exhausted: str | None = None
        self._changed = threading.Condition()

    @property
    def deaths(self) -> int:
        """Of all replicas, failed rebuilds included."""
        with self._changed:
            return sum(status.deaths for status in self._replicas)

    @property
    def lacks_weights(self) -> bool:
        """Whether an engine could be given the current version: it is up without it, and is not slow."""
        with self._changed:
            return any(s.state is ReplicaState.STALE and not s.slow for s in self._replicas)

    @property
    def exhausted(self) -> str | None:
        """Why no rebuild can help any more; None while the run can go on."""
        return self._exhausted

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Of all replicas, in order."""
        with self._changed:
            return tuple(self._replicas)

    def member(self, replica: int) -> Member:
        """The present life of `replica`."""
        with self._changed:
            return Member(replica=replica, deaths=self._replicas[replica].deaths)

    def members(self, *states: ReplicaState) -> tuple[Member, ...]:
        """The replicas in one of `states`, in order."""
        with self._changed:
            return tuple(
                Member(replica=replica, deaths=status.deaths)
                for replica, status in enumerate(self._replicas)
                if status.state in states
            )

    def live(self) -> tuple[Member, ...]:
        """The replicas whose engines run."""
        return self.members(ReplicaState.STALE, ReplicaState.HEALTHY)

    def slow(self) -> tuple[Member, ...]:
        """The replicas that were left out of a publication and have not paused yet."""
        with self._changed:
            return tuple(member for member in self.live() if self._replicas[member.replica].slow)

    def lacking(self, version: int) -> tuple[Member, ...]:
        """Whom a refit to `version` addresses: who is up without it and not slow; when all have it, all of these."""
        with self._changed:
            prompt = [member for member in self.live() if not self._replicas[member.replica].slow]
            serving = ReplicaState.HEALTHY
            return tuple(
                member
                for member in prompt
                if (self._state(member), self._replicas[member.replica].version) != (serving, version)
            ) or tuple(prompt)

    def built(self, replica: int) -> None:
        """Its engine runs. Raises: ValueError unless it was DEAD."""
        with self._changed:
            self._require(replica, ReplicaState.DEAD, "was built")
            self._set(replica, ReplicaState.STALE)

    def died(self, member: Member, cause: str) -> bool:
        """Its engine is gone, or could not be built. Returns whether that was news of its present life.

        A replica that is DEAD already has died once more only if a rebuild failed, see `rebuild_failed`.
        """
        with self._changed:
            status = self._replicas[member.replica]
            if status.deaths != member.deaths or status.state is ReplicaState.DEAD:
                return False
            self._count_death(member.replica, cause)
            return True

    def rebuild_failed(self, replica: int, cause: str) -> None:
        """The rebuild of a DEAD replica failed, which counts like a death. Raises: ValueError unless it is DEAD."""
        with self._changed:
            self._require(replica, ReplicaState.DEAD, "failed to be rebuilt")
            self._count_death(replica, f"it could not be rebuilt: {cause}")

    def paused(self, members: Iterable[Member]) -> None:
        """A refit has begun: what still serves stops, and serves nothing until `serving`. It answers until it has."""
        with self._changed:
            for member in members:
                self._mark(member, in_transfer=False)
                if self._is_current(member) and self._state(member) is ReplicaState.HEALTHY:
                    self._set(member.replica, ReplicaState.STALE)

    def in_transfer(self, members: Iterable[Member]) -> None:
        """They join a group, or have paused and are given weights: nobody may expect an answer before `serving`."""
        with self._changed:
            for member in members:
                self._mark(member, in_transfer=True)

    def answers(self, replica: int) -> bool:
        """Whether its engine runs and waits for nobody, so that it would answer a question, unless it hangs."""
        with self._changed:
            status = self._replicas[replica]
            return status.state is not ReplicaState.DEAD and not status.in_transfer

    def left_out(self, members: Iterable[Member]) -> None:
        """The refit that paused `members` goes on without them: they are slow until each `has_paused`."""
        with self._changed:
            for member in members:
                if self._is_current(member) and self._state(member) is ReplicaState.STALE:
                    self._change(member.replica, slow=True)
            self._changed.notify_all()

    def has_paused(self, member: Member) -> None:
        """It is not slow any more: the next refit addresses it. Harmless when repeated, and about an earlier life."""
        with self._changed:
            if self._is_current(member) and self._replicas[member.replica].slow:
                self._change(member.replica, slow=False)
                logger.info("engine replica %d has paused and waits for the current version", member.replica)
                self._changed.notify_all()

    def serving(self, members: Iterable[Member], *, version: int) -> None:
        """A refit of `members` has succeeded. Those that have died meanwhile are left out.

        Raises: ValueError if a replica that did not take part still serves another version.
        """
        with self._changed:
            taking_part = tuple(members)
            for member in taking_part:
                if self._is_current(member) and self._state(member) is not ReplicaState.DEAD:
                    self._set(member.replica, ReplicaState.HEALTHY, version=version)
            for replica, status in enumerate(self._replicas):
                if status.state is ReplicaState.HEALTHY and status.version != version:
                    raise ValueError(
                        f"engine replica {replica} serves version {status.version} after the refit to version "
                        f"{version} of {[member.replica for member in taking_part]}"
                    )

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        """Wait until `condition`, which may use this table, holds; whether it does."""
        with self._changed:
            return self._changed.wait_for(condition, timeout_s)

    def wait_for_news(self, *, deaths: int, timeout_s: float) -> None:
        """Return when more than `deaths` engines have died, or after `timeout_s`."""
        self.wait_for(lambda: self.deaths > deaths, timeout_s=timeout_s)

    def describe(self) -> str:
        """One line for status and messages: "0 HEALTHY v3, 1 STALE v2 slow, 2 DEAD (died 1x)"."""
        return ", ".join(
            f"{replica} {status.state}"
            + ("" if status.version is None else f" v{status.version}")
            + (" slow" if status.slow else "")
            + (f" (died {status.deaths}x)" if status.deaths else "")
            for replica, status in enumerate(self.statuses())
        )

    def _count_death(self, replica: int, cause: str) -> None:
        status = self._replicas[replica]
        self._change(replica, deaths=status.deaths + 1, version=None)
        self._set(replica, ReplicaState.DEAD)
        left = self._max_restarts - status.deaths
        logger.warning("engine replica %d died: %s; %d restarts left", replica, cause, max(0, left))
        if left <= 0 and self._exhausted is None:
            limit = f" (inference.max_engine_restarts={self._max_restarts})" if self._max_restarts else ""
            self._exhausted = f"engine replica {replica} died: {cause}{limit}"

    def _set(self, replica: int, state: ReplicaState, *, version: int | None = None) -> None:
        before = self._replicas[replica]
        kept = before.version if version is None else version
        self._change(replica, state=state, version=kept, in_transfer=False, slow=False)
        # Every refit pauses everybody; what is told is who comes and goes.
        level = (
            logging.DEBUG if before.version is not None and state is not ReplicaState.DEAD else logging.INFO
        )
        served = "" if version is None else f", version {version}"
        logger.log(level, "engine replica %d: %s → %s%s", replica, before.state, state, served)
        self._changed.notify_all()

    def _change(self, replica: int, **changes: Any) -> None:
        self._replicas[replica] = replace(self._replicas[replica], **changes)

    def _mark(self, member: Member, *, in_transfer: bool) -> None:
        if self._is_current(member) and self._state(member) is not ReplicaState.DEAD:
            self._change(member.replica, in_transfer=in_transfer)

    def _is_current(self, member: Member) -> bool:
        return self._replicas[member.replica].deaths == member.deaths

    def _state(self, member: Member) -> ReplicaState:
        return self._replicas[member.replica].state

    def _require(self, replica: int, state: ReplicaState, what: str) -> None:
        if (seen := self._replicas[replica].state) is not state:
            raise ValueError(f"engine replica {replica} {what} while it is {seen}; it must be {state}")
