"""The replay buffer as seen from the collector's process: `protocol.ports.Replay` over an actor handle."""

from __future__ import annotations

import asyncio
from typing import Any

import ray

from megatron_ppo.protocol.errors import MegatronPPOError, PartDiedError, WaitTimeoutError
from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.trajectory import PromptGroup, Reservation

CALL_TIMEOUT_S = 60.0
"""Every call is bookkeeping in memory; only a stuck or vanished process takes that long."""


class RayReplayClient:
    """Implements `Replay`. Calls of one client reach the actor in the order in which they were made.

    Raises: from every method, the buffer's own error; PartDiedError when its process died; WaitTimeoutError
        when it does not answer.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def reserve(self, *, limit: int, timeout_s: float) -> list[Reservation]:
        """See `Replay.reserve`."""
        reservations: list[Reservation] = await _answer(
            self._actor.reserve.remote(limit=limit, timeout_s=timeout_s),
            what="the replay buffer to reserve slots",
            timeout_s=timeout_s + CALL_TIMEOUT_S,
        )
        return reservations

    async def commit(self, group: PromptGroup) -> None:
        """See `Replay.commit`."""
        await _answer(self._actor.commit.remote(group), what=f"the commit of ordinal {group.ordinal}")

    async def note(self, reservation: Reservation, stage: Stage) -> None:
        """See `Replay.note`."""
        await _answer(
            self._actor.note.remote(reservation, stage), what=f"the note of ordinal {reservation.ordinal}"
        )

    async def release(
        self, reservation: Reservation, *, reason: str, failed: bool = False, others_first: bool = False
    ) -> None:
        """See `Replay.release`."""
        await _answer(
            self._actor.release.remote(reservation, reason=reason, failed=failed, others_first=others_first),
            what=f"the release of ordinal {reservation.ordinal}",
        )

    async def drop(self, reservation: Reservation, *, reason: str) -> None:
        """See `Replay.drop`."""
        await _answer(
            self._actor.drop.remote(reservation, reason=reason),
            what=f"the drop of ordinal {reservation.ordinal}",
        )

    async def fail(self, message: str) -> None:
        """See `Replay.fail`."""
        await _answer(self._actor.fail.remote(message), what="the report of the collector's failure")


async def _answer(ref: Any, *, what: str, timeout_s: float = CALL_TIMEOUT_S) -> Any:
    try:
        async with asyncio.timeout(timeout_s):
            return await ref
    except TimeoutError as error:
        raise WaitTimeoutError(f"waited {timeout_s:.0f} s for {what}") from error
    except ray.exceptions.RayActorError as error:
        raise PartDiedError(f"the replay buffer's process died during {what}: {error}") from error
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MegatronPPOError) else error) from error
