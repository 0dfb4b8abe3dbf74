"""The collector's process: a shell around `CollectorService`. Driven by trainer rank 0; must not import torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from megatron_ppo.collector.scoring import BuildsScoring
from megatron_ppo.collector.service import CollectorService
from megatron_ppo.protocol.ports import EngineReplica, RolloutEngine
from megatron_ppo.ray_actors.replay_client import RayReplayClient
from megatron_ppo.telemetry.heartbeat import Heartbeat
from megatron_ppo.telemetry.process_log import redirect_process_output


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
class CollectorActor(CollectorService):
    """`CollectorService` with its methods as remote calls.

    Args:
        replay: handle of the replay buffer.
        log_path: file for everything that this process prints.   heartbeat_path: file of its signs of life.
        The others: see `CollectorService`.
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
        self._heartbeat = Heartbeat(Path(heartbeat_path), describe=self.describe)
        super().__init__(
            engines=engines, whole_steps=whole_steps, replay=RayReplayClient(replay), scoring=scoring,
            around_engine=around_engine, prompts=prompts, settings=settings,
        )  # fmt: skip

    async def run(self) -> None:
        """Collect until `stop`; its object ref is to be watched. Gives the signs of life."""
        async with self._heartbeat.running():
            await super().run()
