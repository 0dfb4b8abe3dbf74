"""ReplicaRouter: spreads groups over engine replicas.

Owns the load count per replica. Driven by the collector. A group stays on one replica, so that its samples
share the prompt's cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_ppo.protocol.ports import RolloutEngine
from megatron_ppo.protocol.trajectory import Completion, SamplingSettings


class ReplicaRouter:
    """A `RolloutEngine` over several: each request goes to the replica with the fewest running sequences.

    Of equally loaded replicas the one that was idle longest gets the request, so light load is spread as
    well.

    Raises: ValueError without replicas.
    """

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise ValueError("the router needs at least one engine replica, got none")
        self._engines = tuple(engines)
        self._load = [0] * len(engines)
        self._last_used = [-1] * len(engines)
        self._num_requests = 0

    @property
    def load(self) -> tuple[int, ...]:
        """Running sequences per replica."""
        return tuple(self._load)

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        replica = min(range(len(self._engines)), key=lambda i: (self._load[i], self._last_used[i]))
        self._last_used[replica] = self._num_requests
        self._num_requests += 1
        self._load[replica] += len(seeds)
        try:
            return await self._engines[replica].generate(
                prompt_token_ids, seeds=seeds, sampling=sampling, deadline_s=deadline_s
            )
        finally:
            self._load[replica] -= len(seeds)
