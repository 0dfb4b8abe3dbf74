"""One engine replica behind its Ray actor, as the collector (async) sees it, and how its errors reach whoever asks.

Made by `inference_group`, which has one per replica; may be pickled into another actor, where it stays valid when the
replica is built again, because Ray restarts the same actor. Invariant: a replica's own error keeps its type.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from megatron_ppo.protocol.errors import EngineDeadError, MegatronPPOError, WaitTimeoutError
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings


@contextmanager
def replica_errors(replica: int, what: str) -> Iterator[None]:
    """Ray's errors as those of the package, with the replica's number and what was asked."""
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegatronPPOError):
            raise type(cause)(f"engine replica {replica}: {cause}") from None
        raise EngineDeadError(f"engine replica {replica} failed during {what}: {error}") from error
    except RayActorError as error:
        raise EngineDeadError(f"the process of engine replica {replica} is gone ({what}): {error}") from error
    except GetTimeoutError:
        raise WaitTimeoutError(f"engine replica {replica} did not answer in time: {what}") from None
    except RayError as error:  # its node, its environment or the cluster
        raise EngineDeadError(f"engine replica {replica} cannot be reached ({what}): {error}") from error


class RayEngineClient:
    """One replica as an `EngineReplica`. Cheap to pickle."""

    def __init__(self, *, replica: int, handle: Any) -> None:
        self._replica = replica
        self._handle = handle

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Cancelling it aborts the requests in the engine."""
        completions: list[Completion] = await self._call(
            "generate", list(prompt_token_ids), seeds=list(seeds), sampling=sampling, deadline_s=deadline_s
        )
        return completions

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """See `WholeStepEngine.generate_groups`. Cancelling it aborts the requests in the engine."""
        groups: list[list[Completion]] = await self._call(
            "generate_groups", list(requests), sampling=sampling, deadline_s=deadline_s
        )
        return groups

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ref = self._handle.call.remote(method, *args, **kwargs)
        try:
            with replica_errors(self._replica, method):
                return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise

    async def serves(self) -> bool:
        """See `EngineReplica.serves`."""
        try:
            return bool(await self._handle.call.remote("serves"))
        except RayError:
            return False
