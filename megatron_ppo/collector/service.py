"""CollectorService: a collector put together in the process that it runs in, from what can be sent there.

Owns the router, the collector and how both are built. Driven by trainer rank 0, directly in one process or through an
actor. Must not import torch.

Invariant: `pause` and `stop` are acknowledged: what they promise holds when they return.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from megatron_ppo.collector.collector import Collector
from megatron_ppo.collector.router import ReplicaRouter
from megatron_ppo.collector.scoring import BuildsScoring
from megatron_ppo.collector.stats import CollectorStats
from megatron_ppo.collector.whole_step import StepBatches
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.ports import EngineReplica, Replay, RolloutEngine

ACKNOWLEDGE_TIMEOUT_S = 25.0
"""Limit of pause and stop; below the 30 s that rank 0 waits, so that the message says what was waited for."""


class CollectorService:
    """`Collector` over engine replicas.

    Args:
        engines: one client per engine replica.   replay: the replay buffer.
        whole_steps: hand the only engine whole training steps, see `collector.whole_step`.
        scoring: how the reward function is run.
        around_engine: what is asked for responses, given the router over all engines.
        prompts: `_target_` (dotted name) and keyword arguments of what is built in this process.
        settings: the remaining keyword arguments of `Collector`.
    Raises: ConfigError for whole steps with several engines, or a verifier that cannot be built.
    """

    def __init__(
        self,
        *,
        engines: Sequence[EngineReplica],
        whole_steps: bool,
        replay: Replay,
        scoring: BuildsScoring,
        around_engine: Callable[[RolloutEngine], RolloutEngine],
        prompts: Mapping[str, Any],
        settings: Mapping[str, Any],
    ) -> None:
        if whole_steps and len(engines) != 1:
            raise ConfigError(f"whole steps go to one engine, got {len(engines)}")
        self._router = ReplicaRouter(list(engines))
        self._collector = Collector(
            engine=around_engine(StepBatches(self._router) if whole_steps else self._router),
            engine_ready=self._router.available,
            replay=replay,
            scoring=scoring.build(),
            prompts=_build(prompts),
            **settings,
        )

    async def run(self) -> None:
        """Collect until `stop`; raises the cause when that cannot go on."""
        try:
            await self._collector.run()
        finally:
            await self._router.close()

    async def pause(self) -> None:
        """Acknowledged: nothing is dispatched after this until `resume`."""
        await self._collector.pause(timeout_s=ACKNOWLEDGE_TIMEOUT_S)

    async def resume(self) -> None:
        """Dispatch again."""
        await self._collector.resume()

    async def stop(self) -> None:
        """Acknowledged: rollouts are cancelled, their reservations released, `run` has ended."""
        await self._collector.stop(timeout_s=ACKNOWLEDGE_TIMEOUT_S)

    async def stats(self) -> CollectorStats:
        """Totals since the start."""
        return self._collector.stats()

    def describe(self) -> dict[str, object]:
        """What its signs of life say."""
        stats = self._collector.stats()
        return {
            "in_flight": stats.in_flight,
            "groups": stats.groups,
            "failures": stats.failures,
            "dropped": stats.dropped,
            "engines_down": ", ".join(str(replica) for replica in self._router.down) or None,
            "loop_lag_s": round(stats.last_loop_lag_s, 3),
        }


def _build(spec: Mapping[str, Any]) -> Any:
    module_name, _, name = str(spec["_target_"]).rpartition(".")
    target = getattr(importlib.import_module(module_name), name)
    return target(**{key: value for key, value in spec.items() if key != "_target_"})
