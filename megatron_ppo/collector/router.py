"""ReplicaRouter: spreads groups over engine replicas, and around those that have died or stand aside.

Owns the load count per replica, and which of them are down. Driven by the collector. A group stays on one replica, so
that its samples share the prompt's cache.

Invariant: no request is given to a replica that is down; a replica is down from its first EngineDeadError or
EngineAsideError until it says itself that it serves, which it does only with the current weights.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from megatron_ppo.protocol.errors import EngineAsideError, EngineDeadError, GenerationError
from megatron_ppo.protocol.ports import EngineReplica
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReplicaRouter:
    """A `RolloutEngine` over several: each request goes to the replica with the fewest running sequences.

    Of equally loaded replicas the one that was idle longest gets the request, so light load is spread as
    well.

    Args:
        look_s: how often a replica that is down is asked whether it serves again.

    Raises: ValueError without replicas.
    """

    def __init__(self, engines: Sequence[EngineReplica], *, look_s: float = 0.5) -> None:
        if not engines:
            raise ValueError("the router needs at least one engine replica, got none")
        self._engines = tuple(engines)
        self._look_s = look_s
        self._load = [0] * len(engines)
        self._last_used = [-1] * len(engines)
        self._num_requests = 0
        self._looking: dict[int, asyncio.Task[None]] = {}
        self._someone_serves = asyncio.Event()
        self._someone_serves.set()

    @property
    def load(self) -> tuple[int, ...]:
        """Running sequences per replica."""
        return tuple(self._load)

    @property
    def down(self) -> tuple[int, ...]:
        """Replicas that have died, or stand aside, and do not serve again yet."""
        return tuple(sorted(self._looking))

    async def available(self) -> None:
        """Wait until some replica serves, for as long as that takes; whoever rebuilds the engines sets the limit."""
        await self._someone_serves.wait()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. A death is a GenerationError: the next attempt goes to another replica.

        One that stands aside turns the request away before anything of it has run, so the next is asked at once.
        Raises: EngineAsideError when none is left; then `available` says when to ask again.
        """
        return await self._first_that_takes(
            len(seeds),
            lambda engine: engine.generate(
                prompt_token_ids, seeds=seeds, sampling=sampling, deadline_s=deadline_s
            ),
        )

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """See `WholeStepEngine.generate_groups`; the whole call goes to one replica. Raises: as `generate`."""
        return await self._first_that_takes(
            sum(len(request.seeds) for request in requests),
            lambda engine: engine.generate_groups(requests, sampling=sampling, deadline_s=deadline_s),
        )

    async def _first_that_takes(self, num_sequences: int, ask: Callable[[EngineReplica], Awaitable[T]]) -> T:
        while True:
            async with self._replica_for(num_sequences) as (replica, engine):
                try:
                    return await ask(engine)
                except EngineAsideError as error:
                    self._take_down(replica, error)

    @asynccontextmanager
    async def _replica_for(self, num_sequences: int) -> AsyncIterator[tuple[int, EngineReplica]]:
        up = [i for i in range(len(self._engines)) if i not in self._looking]
        if not up:
            raise EngineAsideError("no engine serves at the moment")
        replica = min(up, key=lambda i: (self._load[i], self._last_used[i]))
        self._last_used[replica] = self._num_requests
        self._num_requests += 1
        self._load[replica] += num_sequences
        try:
            yield replica, self._engines[replica]
        except EngineDeadError as error:
            self._take_down(replica, error)
            raise GenerationError(f"the engine died during generation: {error}") from error
        finally:
            self._load[replica] -= num_sequences

    async def close(self) -> None:
        """Stop looking after the replicas that are down."""
        tasks = list(self._looking.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _take_down(self, replica: int, error: EngineDeadError | EngineAsideError) -> None:
        if replica in self._looking:
            return
        logger.warning("engine replica %d is down: %s", replica, error)
        self._looking[replica] = asyncio.create_task(
            self._look_after(replica), name=f"look after engine replica {replica}"
        )
        if len(self._looking) == len(self._engines):
            self._someone_serves.clear()

    async def _look_after(self, replica: int) -> None:
        while True:
            await asyncio.sleep(self._look_s)
            if await self._engines[replica].serves():
                break
        logger.info("engine replica %d serves again", replica)
        del self._looking[replica]
        self._someone_serves.set()
