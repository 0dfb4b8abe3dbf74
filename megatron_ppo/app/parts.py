"""Makes the parts of the training loop from the configuration, once actors and models exist.

Driven by `app.job` on every rank. Invariant: on ranks other than 0 there are no actors, and every part acts
through `RankZero` or not at all.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TextIO

import torch
import torch.distributed as dist

from megatron_ppo.app.actors import RunActors, validation_sampling
from megatron_ppo.app.faults import seams_of
from megatron_ppo.app.interruption import Interruptions
from megatron_ppo.app.limits import GENERATION_TIMEOUT_S
from megatron_ppo.config.derived import Derived
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.targets import build, resolve
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.loop.async_ppo import LoopSettings, Parts
from megatron_ppo.loop.checkpoint_folder import Retention
from megatron_ppo.loop.checkpoints import RunCheckpoints
from megatron_ppo.loop.identity import Trait
from megatron_ppo.loop.ports import GroupSource, Refit
from megatron_ppo.loop.probe import ProbedRefit, sequences_of_run
from megatron_ppo.loop.recorded import RecordedGroups
from megatron_ppo.loop.residency import Residency
from megatron_ppo.loop.validation import EngineValidator
from megatron_ppo.mcore.parallel import DistributedRuntime
from megatron_ppo.protocol.errors import ConfigError, MegatronPPOError
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.ray_actors.rank0 import RankZero, RayGroupSource
from megatron_ppo.refit.agreement import agreement_over
from megatron_ppo.refit.recovery import RecoveringRefit, RecoveringValidator, sharing_deaths
from megatron_ppo.rewards.build import GuardedScorer
from megatron_ppo.rewards.process_pool import IsolatedScorer
from megatron_ppo.telemetry.display import ProgressDisplay
from megatron_ppo.telemetry.heartbeat import StageClock
from megatron_ppo.telemetry.metrics import NullTelemetry, Telemetry
from megatron_ppo.telemetry.run_dir import RunDirectory
from megatron_ppo.telemetry.sinks import build_telemetry
from megatron_ppo.transport.broadcast_group import BroadcastStore, backend_for

if TYPE_CHECKING:  # at run time it would load Megatron, before the actors are started
    from megatron_ppo.app.models import Models


def refit_backend(config: RunConfig, device: torch.device) -> str:
    """The transport of the refit.

    Raises: ConfigError for NCCL on a machine that the engines would fail to use it on.
    """
    chosen = config.refit.backend
    possible = backend_for(device)
    if chosen == "nccl" and possible != "nccl":
        raise ConfigError(f"refit.backend: got 'nccl'; must be auto or gloo on {device.type}")
    return possible if chosen == "auto" else chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class PartsBuilder:
    """What the parts share.

    Attributes:
        control: gloo group of all ranks.   resumed: the run goes on from an earlier one.
        terminal: where rank 0 shows progress.   actors: on rank 0 only.
        identity: what a checkpoint is compared by.   companions: what else it holds, on rank 0.
        stack: closes what the parts open.   stages: told what this rank is doing.
        interruptions: what ends the run between two steps.   explain: see `Parts`.
    """

    config: RunConfig
    derived: Derived
    runtime: DistributedRuntime
    rank_zero: RankZero
    control: dist.ProcessGroup
    directory: RunDirectory
    resumed: bool
    terminal: TextIO
    task: TaskSpec
    actors: RunActors | None
    identity: Mapping[str, Trait]
    companions: Mapping[str, bytes]
    stack: contextlib.ExitStack
    stages: StageClock
    interruptions: Interruptions
    explain: Callable[[MegatronPPOError], None]

    def parts(self, models: Models) -> Parts:
        """All parts of the loop; `models` are those of this rank."""
        telemetry = self._telemetry()
        refit = self._recovering(self._probed(self._refit(models.policy), models.policy), models.residency)
        return Parts(
            policy=models.policy,
            residency=models.residency,
            critic=models.critic,
            advantage=self._advantage(),
            groups=self._groups(refit),
            refit=refit,
            validator=RecoveringValidator(validator=self._validator(), repeat=refit.repeat),
            checkpoints=self._checkpoints(models, notify=telemetry.note),
            telemetry=telemetry,
            scoring=lambda: models.critic.scoring_metrics() | models.policy.scoring_metrics(),
            observe=lambda: self.rank_zero.run("the actors' statistics", self._statistics),
            check_interrupted=self._check_interrupted,
            explain=self.explain,
        )

    def loop_settings(self) -> LoopSettings:
        config = self.config
        algorithm = config.algorithm
        return LoopSettings(
            max_num_steps=config.run.max_num_steps,
            seed=config.run.seed,
            num_prompts_per_step=algorithm.num_prompts_per_step,
            num_generations_per_prompt=algorithm.num_generations_per_prompt,
            ppo_epochs=algorithm.ppo_epochs,
            train_global_batch_size=algorithm.train_global_batch_size,
            shuffle_minibatches=algorithm.shuffle_minibatches,
            pad_token_id=self.task.pad_token_id,
            seq_logprob_error_threshold=algorithm.seq_logprob_error_threshold,
            overlong_filtering=algorithm.overlong_filtering,
            use_reference=self.derived.needs_reference,
            validation_period=config.validation.period,
            validate_at_start=config.validation.at_start,
            validate_at_end=config.validation.at_end,
            checkpoint_period=config.checkpoint.period,
            generates_alone=config.run.deterministic,
        )

    def _refit(self, policy: Any) -> Refit:
        config, device, actors = self.config, self.runtime.device, self.actors
        backend = refit_backend(config, device)
        store = None
        if actors is not None:
            store = BroadcastStore(
                host=config.cluster.node_ip_address, backend=backend, timeout_s=config.refit.timeout_s
            )
        refit = resolve(config.refit.target)(
            source=policy,
            sink=seams_of(config, self.directory).fleet(actors.engines) if actors else None,
            store=store,
            device=device,
            bucket_bytes=config.refit.bucket_bytes,
            verify_checksum=config.refit.verify_checksum,
            in_flight=config.schedule.in_flight_weight_updates,
            recompute_kv=config.schedule.recompute_kv_cache_after_weight_updates,
            timeout_s=config.refit.timeout_s,
            straggler_patience_s=config.refit.straggler_patience_s,
            agree=agreement_over(self.control),
        )
        self.stack.callback(refit.close)
        return refit  # type: ignore[no-any-return]

    def _probed(self, refit: Refit, policy: Any) -> Refit:
        actors, task = self.actors, self.task
        if not self.config.refit.probe:
            return refit
        prompts = [p.token_ids for p in task.validation_prompts(limit=self.config.refit.probe_sequences)]
        sampling = SamplingSettings(
            temperature=0.0,
            max_new_tokens=self.derived.validation_max_new_tokens,
        )
        # Scoring asks for one further token, for which a sequence as long as the engine's context has no room.
        longest = self.derived.max_model_len - 1

        def answered() -> list[list[int]]:
            """The prompts with the first published weights' own greedy answers: tokens that a rollout would have."""
            assert actors is not None, "only rank 0 asks the engines"
            answers = actors.engines.generate_many(
                prompts, sampling=sampling, seeds=range(len(prompts)), deadline_s=GENERATION_TIMEOUT_S
            )
            return [[*p, *a.token_ids][:longest] for p, a in zip(prompts, answers, strict=True)]

        def make_sequences() -> list[list[int]]:
            return sequences_of_run(
                self.directory.path / "probe_sequences.json",
                count=len(prompts),
                longest=longest,
                make=answered,
            )

        return ProbedRefit(
            refit=refit,
            policy=policy,
            engines=actors.engines if actors else None,
            make_sequences=make_sequences,
            tolerance_nats=self.config.refit.probe_tolerance_nats,
            pad_token_id=task.pad_token_id,
            deadline_s=GENERATION_TIMEOUT_S,
            on_rank_zero=sharing_deaths(self.rank_zero.run),
        )

    def _recovering(self, refit: Refit, residency: Residency) -> RecoveringRefit:
        actors = self.actors
        return RecoveringRefit(
            refit=refit,
            engines=actors.engines.table if actors else None,
            raise_if_lost=actors.raise_if_lost if actors else _nobody_is_lost,
            end_silent=self._end_silent_engines,
            max_retries=self.config.refit.max_retries,
            on_rank_zero=self.rank_zero.run,
            publishing=residency.publishing,
        )

    def _end_silent_engines(self) -> None:
        assert self.actors is not None, "only rank 0 has actors"
        if self.config.inference.liveness_misses:
            self.actors.engines.end_silent(deadline_s=self.config.inference.liveness_deadline_s)

    def _groups(self, refit: RecoveringRefit) -> GroupSource:
        actors = self.actors
        source: GroupSource = RayGroupSource(
            rank_zero=self.rank_zero,
            supervisor=actors.supervisor if actors else None,
            replay=actors.replay if actors else None,
            groups_timeout_s=self.config.cluster.groups_timeout_s,
            refresh_engines=refit.refresh,
            position=actors.position if actors else None,
            check_interrupted=self._check_interrupted,
        )
        source = seams_of(self.config, self.directory).groups(
            source, engines=actors.engines if actors else None
        )
        if self.config.telemetry.record_trajectories:
            return RecordedGroups(
                source=source,
                path=self.directory.path / "trajectories.jsonl",
                on_rank_zero=self.rank_zero.run,
            )
        return source

    def _validator(self) -> EngineValidator:
        config, task, actors = self.config, self.task, self.actors
        reward = config.reward.spec(target=task.reward.target, kwargs=task.reward.kwargs)
        target, kwargs = reward.pop("_target_"), reward
        if actors is not None and config.reward.isolation == "process":
            isolated = IsolatedScorer(
                target=target, kwargs=kwargs, deadline_s=config.collector.scoring_deadline_s
            )
            self.stack.callback(isolated.close)
            scorer: Scorer = isolated
        else:
            scorer = GuardedScorer(resolve(target)(**kwargs))
        return EngineValidator(
            engines=actors.engines if actors else None,
            prompts=task.validation_prompts(limit=config.validation.max_samples),
            scorer=scorer,
            sampling=validation_sampling(config, self.derived),
            expected_version=self.derived.schedule.version_at,
            seed=config.validation.seed,
            deadline_s=GENERATION_TIMEOUT_S,
            on_rank_zero=sharing_deaths(self.rank_zero.run),
        )

    def _advantage(self) -> Any:
        loss = self.config.loss
        penalty = loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0
        return build(
            self.config.advantage, reward_kl_penalty=penalty, reward_kl_type=loss.reference_policy_kl_type
        )

    def _telemetry(self) -> Telemetry:
        config = self.config
        if self.runtime.rank != 0:
            return NullTelemetry(on_stage=self.stages.enter)
        display = ProgressDisplay(
            self.terminal,
            run_name=config.run.name,
            max_num_steps=config.run.max_num_steps,
            live={"auto": None, "live": True, "plain": False}[config.telemetry.display],
        )
        telemetry = build_telemetry(
            self.directory,
            max_num_steps=config.run.max_num_steps,
            num_trainer_ranks=self.runtime.world_size,
            tensorboard=config.telemetry.tensorboard,
            displays=[display],
            on_stage=self.stages.enter,
        )
        self.stack.callback(telemetry.close)
        return telemetry

    def _checkpoints(self, models: Models, *, notify: Callable[[str], None]) -> RunCheckpoints:
        config = self.config
        checkpoint = config.checkpoint
        return RunCheckpoints(
            folder=self.directory.checkpoints_dir,
            resume=self.resumed,
            required=self.resumed and config.run.resume not in ("auto", "never"),
            retention=Retention(
                keep=checkpoint.keep,
                keep_best=checkpoint.keep_best,
                metric=checkpoint.metric,
                higher_is_better=checkpoint.higher_is_better,
            ),
            asynchronous=checkpoint.async_save,
            on_error=checkpoint.on_save_error,
            notify=notify,
            identity=self.identity,
            companions=self.companions,
            prompts_per_epoch=len(self.task.train),
            # Of a step that was cut off, the rest alone would be another batch.
            load_replay_buffer=checkpoint.load_replay_buffer and not config.run.deterministic,
            models=models.store(),
            replay=self.actors.snapshots() if self.actors else None,
            version_at=self.derived.schedule.version_at,
            on_rank_zero=self.rank_zero.run,
        )

    def _check_interrupted(self) -> None:
        self.interruptions.check(self.actors.raise_if_failed if self.actors else _nobody_is_lost)

    def _statistics(self) -> dict[str, float]:
        assert self.actors is not None, "only rank 0 has actors"
        return {**self.actors.statistics(), **seams_of(self.config, self.directory).statistics()}


def _nobody_is_lost() -> None:
    """On ranks without actors."""
