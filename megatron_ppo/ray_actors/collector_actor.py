"""The collector's process: a shell around `Collector`. Driven by trainer rank 0; must not import torch."""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_ppo.collector.collector import Collector
from megatron_ppo.collector.router import ReplicaRouter
from megatron_ppo.collector.scoring import BuildsScoring
from megatron_ppo.collector.stats import CollectorStats
from megatron_ppo.collector.whole_step import StepBatches
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.ports import EngineReplica, RolloutEngine
from megatron_ppo.ray_actors.replay_client import RayReplayClient
from megatron_ppo.telemetry.heartbeat import Heartbeat
from megatron_ppo.telemetry.process_log import redirect_process_output

ACKNOWLEDGE_TIMEOUT_S = 25.0
"""Limit of pause and stop; below the 30 s that rank 0 waits, so that the message says what was waited for."""


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
class CollectorActor:
    """`Collector` over actor handles.

    Args:
        engines: one client per engine replica.  replay: handle of the replay buffer.
        whole_steps: hand the only engine whole training steps, see `collector.whole_step`.
        scoring: how the reward function is run.
        around_engine: what is asked for responses, given the router over all engines.
        prompts: `_target_` (dotted name) and keyword arguments of what is built in this process.
        settings: the remaining keyword arguments of `Collector`.
        heartbeat_path: file of its signs of life.
    """

    def __init__(
        self,
        *,
        engines: Sequence[EngineReplica],
        whole_steps: bool = False,
        replay: Any,
        scoring: BuildsScoring,
        around_engine: Callable[[RolloutEngine], RolloutEngine],
        prompts: Mapping[str, Any],
        settings: Mapping[str, Any],
        log_path: str,
        heartbeat_path: str,
    ) -> None:
        redirect_process_output(Path(log_path))
        self._heartbeat = Heartbeat(Path(heartbeat_path), describe=self._describe)
        self._router = ReplicaRouter(list(engines))
        self._collector = Collector(
            engine=around_engine(_whole_steps(engines, self._router) if whole_steps else self._router),
            engine_ready=self._router.available,
            replay=RayReplayClient(replay),
            scoring=scoring.build(),
            prompts=_build(prompts),
            **settings,
        )

    async def run(self) -> None:
        """Collect until `stop`; raises the cause when that cannot go on. Its object ref is to be watched."""
        beating = asyncio.create_task(self._heartbeat.run(), name="heartbeat")
        try:
            await self._collector.run()
        finally:
            beating.cancel()
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

    def _describe(self) -> dict[str, object]:
        stats = self._collector.stats()
        return {
            "in_flight": stats.in_flight,
            "groups": stats.groups,
            "failures": stats.failures,
            "dropped": stats.dropped,
            "engines_down": ", ".join(str(replica) for replica in self._router.down) or None,
            "loop_lag_s": round(stats.last_loop_lag_s, 3),
        }


def _whole_steps(engines: Sequence[EngineReplica], router: ReplicaRouter) -> StepBatches:
    if len(engines) != 1:
        raise ConfigError(f"whole steps go to one engine, got {len(engines)}")
    return StepBatches(router)


def _build(spec: Mapping[str, Any]) -> Any:
    module_name, _, name = str(spec["_target_"]).rpartition(".")
    target = getattr(importlib.import_module(module_name), name)
    return target(**{key: value for key, value in spec.items() if key != "_target_"})
