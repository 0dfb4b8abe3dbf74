"""Starts and ends the run's Ray side on trainer rank 0: cluster, engines, replay buffer, collector."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ppo.app.faults import seams_of
from megatron_ppo.collector.scoring import ScoringSettings
from megatron_ppo.config.derived import Derived
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.inference.environment import engine_environment
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.replicas import ReplicaState
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.ray_actors.cluster import cluster_gpus, join_cluster, start_local_cluster
from megatron_ppo.ray_actors.collector_actor import CollectorActor
from megatron_ppo.ray_actors.engine_keeper import EngineKeeper
from megatron_ppo.ray_actors.inference_group import InferenceGroup
from megatron_ppo.ray_actors.liveness import LivenessLimits
from megatron_ppo.ray_actors.rank0 import KnownPosition, RayReplaySnapshots, Supervisor
from megatron_ppo.ray_actors.replay_actor import ReplayActor
from megatron_ppo.telemetry.run_dir import RunDirectory

logger = logging.getLogger(__name__)

BUFFER = "the replay buffer"
COLLECTOR = "the collector"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunActors:
    """Handles that rank 0 holds, and what it knows of the replay buffer without asking it."""

    engines: InferenceGroup
    replay: Any
    collector: Any
    supervisor: Supervisor
    keeper: EngineKeeper
    position: KnownPosition

    def begin(self) -> None:
        """Wait for the engines, start the collector (nothing is reserved before the window opens), watch them all."""
        self.engines.start()
        self.keeper.start()
        self.supervisor.watch(
            {
                self.replay.watch.remote(): BUFFER,
                self.collector.run.remote(): COLLECTOR,
            },
        )

    def statistics(self) -> dict[str, float]:
        """Of the replay buffer and the engines now, and of the collector since it started."""
        call = self.supervisor.call
        buffer = call(self.replay.status.remote(), what="the replay buffer's status", timeout_s=30)
        stats = call(self.collector.stats.remote(), what="the collector's statistics", timeout_s=30)
        engines = self.engines.table
        return {
            "engines/healthy": float(len(engines.members(ReplicaState.HEALTHY))),
            "engines/deaths": float(engines.deaths),
            "train/buffer_size": float(buffer.size),
            "buffer/reserved_groups": float(sum(len(ordinals) for ordinals in buffer.reserved.values())),
            "buffer/pending_prompts": float(len(buffer.pending)),
            "collector/trajectories": float(stats.trajectories),
            "collector/retries": float(stats.retries),
            "collector/failures": float(stats.failures),
            "collector/dropped_prompts": float(stats.dropped),
            "collector/generation_busy_s": stats.generation_busy_s,
            "collector/window_wait_s": stats.window_wait_s,
            "collector/max_loop_lag_s": stats.max_loop_lag_s,
        }

    def raise_if_lost(self) -> None:
        """Raise PartDiedError with the cause when an engine died that will not be built again.

        While no engine is up, a dead collector or replay buffer is a cause, too: the run ends of it after this step,
        and the engine that this step would wait for may never come, because their machine or its raylet is gone.
        """
        if self._note_lost_engines() or not self.engines.table.live():
            self.supervisor.raise_if_failed()

    def raise_if_failed(self) -> None:
        """The same, and for a dead collector or replay buffer."""
        self._note_lost_engines()
        self.supervisor.raise_if_failed()

    def _note_lost_engines(self) -> bool:
        if (reason := self.engines.table.exhausted) is not None:
            self.supervisor.note(reason)
        return reason is not None

    def snapshots(self) -> RayReplaySnapshots:
        """Save and restore of the replay buffer."""
        return RayReplaySnapshots(
            supervisor=self.supervisor,
            replay=self.replay,
            collector=self.collector,
            position=self.position,
        )


@contextlib.contextmanager
def run_actors(
    config: RunConfig,
    derived: Derived,
    *,
    task: TaskSpec,
    task_kwargs: dict[str, Any],
    policy_folder: Path,
    directory: RunDirectory,
) -> Iterator[RunActors]:
    """Start every process without waiting for it; end every process on the way out, also after a failure."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    with _cluster(config, directory) as has_gpus:
        engines = InferenceGroup(
            replicas=config.inference.replicas,
            tensor_parallel_size=config.inference.tensor_parallel_size,
            engine_kwargs={
                "model": str(policy_folder),
                "stop_token_ids": task.stop_token_ids,
                "isolated_batches": config.run.deterministic,
                **_engine_kwargs(config, derived),
            },
            env=engine_environment(device_type=device_type),
            log_dir=directory.logs_dir,
            heartbeat_dir=directory.heartbeats_dir,
            start_timeout_s=config.inference.start_timeout_s,
            gpus_per_worker=1.0 if has_gpus else 0.0,
            engine_target=config.inference.target,
            max_restarts=config.inference.max_engine_restarts,
        )
        supervisor = Supervisor()
        seams = seams_of(config, directory)
        keeper = EngineKeeper(engines=engines, give_up=supervisor.note, liveness=_liveness(config))
        try:
            replay = ReplayActor.remote(
                schedule=derived.schedule,
                num_prompts_per_step=config.algorithm.num_prompts_per_step,
                num_generations_per_prompt=config.algorithm.num_generations_per_prompt,
                log_path=str(directory.log_path("replay_buffer")),
                ledger_path=str(directory.ledger_path),
                heartbeat_path=str(directory.heartbeat_path("replay_buffer")),
                takes_in_ordinal_order=config.run.deterministic,
            )
            collector = CollectorActor.remote(
                engines=engines.clients(),
                whole_steps=config.run.deterministic,
                replay=replay,
                scoring=seams.scoring(_scoring_settings(config, task)),
                around_engine=seams.around_engine(),
                prompts={
                    "_target_": "megatron_ppo.data.tasks.train_prompts",
                    "stream_seed": config.run.seed,
                    **task_kwargs,
                },
                settings=_collector_settings(config, derived),
                log_path=str(directory.log_path("collector")),
                heartbeat_path=str(directory.heartbeat_path("collector")),
            )
            actors = RunActors(
                engines=engines,
                replay=replay,
                collector=collector,
                supervisor=supervisor,
                keeper=keeper,
                position=KnownPosition(),
            )
            yield actors
            _stop_collector(actors, config.cluster.shutdown_timeout_s)
        finally:
            supervisor.stop()
            keeper.stop()
            engines.shutdown()


@contextlib.contextmanager
def _cluster(config: RunConfig, directory: RunDirectory) -> Iterator[bool]:
    """Ray for this run; yields whether the engines take GPUs.

    Raises: ConfigError when there are too few.
    """
    env = {"OMP_NUM_THREADS": "1"}
    if config.cluster.ray_address is None:
        gpus = _engine_gpus(config)
        with start_local_cluster(
            log_dir=directory.logs_dir,
            object_store_bytes=config.cluster.object_store_bytes,
            gpu_ids=gpus,
            env=env,
        ):
            yield bool(gpus)
        return
    with join_cluster(address=config.cluster.ray_address, env=env):
        if torch.cuda.is_available():
            needed, count = _engine_ranks(config), cluster_gpus()
            if needed > count:
                raise ConfigError(
                    f"inference.replicas * inference.tensor_parallel_size = {needed} GPUs; the Ray cluster at "
                    f"cluster.ray_address={config.cluster.ray_address} has {count}"
                )
        yield torch.cuda.is_available()


def _engine_ranks(config: RunConfig) -> int:
    return config.inference.replicas * config.inference.tensor_parallel_size


def _engine_gpus(config: RunConfig) -> list[str]:
    """Devices that this node's trainer ranks leave to the engines; the ranks hold the first ones. [] on a CPU.

    Raises: ConfigError when there are too few.
    """
    count = torch.cuda.device_count()
    if count == 0:
        return []
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = _engine_ranks(config)
    if ranks + needed > count:
        raise ConfigError(
            f"inference.replicas * inference.tensor_parallel_size = {needed} GPUs besides the {ranks} of the trainer "
            f"ranks; this node has {count}"
        )
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = visible.split(",") if visible else [str(index) for index in range(count)]
    return names[ranks : ranks + needed]


def _liveness(config: RunConfig) -> LivenessLimits | None:
    misses = config.inference.liveness_misses
    return LivenessLimits(deadline_s=config.inference.liveness_deadline_s, misses=misses) if misses else None


def sampling_settings(config: RunConfig) -> SamplingSettings:
    """How training rollouts are sampled."""
    return SamplingSettings(
        temperature=config.inference.temperature,
        max_new_tokens=config.inference.max_new_tokens,
    )


def validation_sampling(config: RunConfig, derived: Derived) -> SamplingSettings:
    """How validation responses are sampled."""
    return SamplingSettings(
        temperature=config.validation.temperature,
        top_p=config.validation.top_p,
        top_k=config.validation.top_k,
        max_new_tokens=derived.validation_max_new_tokens,
    )


def _engine_kwargs(config: RunConfig, derived: Derived) -> dict[str, Any]:
    kwargs = config.inference.engine_kwargs(max_model_len=derived.max_model_len)
    return {key: value for key, value in kwargs.items() if key != "tensor_parallel_size"}


def _collector_settings(config: RunConfig, derived: Derived) -> dict[str, Any]:
    return {
        "num_generations": config.algorithm.num_generations_per_prompt,
        "sampling": sampling_settings(config),
        "seed": config.run.seed,
        "max_concurrent_groups": derived.max_concurrent_groups,
        "deadline_s": config.inference.request_deadline_s,
        "max_generation_failures": config.schedule.max_generation_failures,
        "max_retries": config.collector.max_retries,
        "retry_backoff_s": config.collector.retry_backoff_s,
    }


def _scoring_settings(config: RunConfig, task: TaskSpec) -> ScoringSettings:
    spec = config.reward.spec(target=task.reward.target, kwargs=task.reward.kwargs)
    return ScoringSettings(
        target=spec.pop("_target_"),
        kwargs=spec,
        isolated=config.reward.isolation == "process",
        concurrency=config.collector.scorer_threads,
        deadline_s=config.collector.scoring_deadline_s,
    )


def _stop_collector(actors: RunActors, timeout_s: float) -> None:
    """The orderly end: acknowledged, so that no rollout is cut off in the middle of a commit."""
    actors.supervisor.stop()
    actors.keeper.stop()
    actors.supervisor.call(actors.collector.stop.remote(), what="the collector to stop", timeout_s=timeout_s)
    actors.supervisor.call(actors.replay.flush.remote(), what="the ledger to be written", timeout_s=timeout_s)
