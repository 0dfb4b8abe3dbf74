"""One job from checked configuration to exit code: builds the parts, runs the loop, judges the gates.

Runs on every trainer rank; `RankZero` keeps the ranks together where only rank 0 acts. Everything that is opened here
is closed in reverse order, whatever happens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import logging
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist

from megatron_ppo.app.actors import RunActors, run_actors, validation_sampling
from megatron_ppo.app.limits import GENERATION_TIMEOUT_S, control_timeout_s
from megatron_ppo.app.termination import is_own_cause, lost_a_peer, terminate_as_exit
from megatron_ppo.config.derived import Derived
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.targets import build, resolve
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.data.tasks import build_task, takes_option
from megatron_ppo.loop.async_ppo import LoopSettings, Parts, train
from megatron_ppo.loop.checkpoints import RunCheckpoints
from megatron_ppo.loop.ports import GroupSource, Refit
from megatron_ppo.loop.probe import ProbedRefit
from megatron_ppo.loop.recorded import RecordedGroups
from megatron_ppo.loop.validation import EngineValidator
from megatron_ppo.mcore.parallel import DistributedRuntime, distributed_runtime
from megatron_ppo.protocol.errors import ConfigError, MegatronPPOError
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.ray_actors.rank0 import RankZero, RayGroupSource
from megatron_ppo.refit.agreement import agreement_over
from megatron_ppo.telemetry.display import ProgressDisplay
from megatron_ppo.telemetry.gate_check import print_results
from megatron_ppo.telemetry.gates import all_passed, evaluate, parse_gates, results_as_json
from megatron_ppo.telemetry.metrics import NullTelemetry, Telemetry
from megatron_ppo.telemetry.process_log import redirect_process_output
from megatron_ppo.telemetry.run_dir import OpenRun, RunDirectory, open_run, write_json_atomically
from megatron_ppo.telemetry.sinks import build_telemetry, read_rows
from megatron_ppo.transport.broadcast_group import BroadcastStore, backend_for

logger = logging.getLogger(__name__)

FAILED = 1


def run_job(config: RunConfig, derived: Derived, *, alter: Callable[[Parts], Parts] | None = None) -> int:
    """Run one job on this rank.

    Args:
        alter: replaces parts after they were built; for tests that break one on purpose.
    Returns: 0 when it finished and every gate passed, otherwise 1 after the cause was printed once, by rank 0.
    """
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    with distributed_runtime(timeout_s=config.cluster.process_group_timeout_s) as runtime:
        control = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=control_timeout_s(config))
        )
        rank_zero = RankZero(rank=runtime.rank, world_size=runtime.world_size, group=control)
        with contextlib.ExitStack() as stack:
            try:
                run, directory = stack.enter_context(_run_directory(config, rank_zero, runtime.rank))
            except (MegatronPPOError, OSError) as error:  # there is no log file yet, and no actor to end
                if runtime.rank == 0:
                    sys.stderr.write(f"FAILED: {type(error).__name__}: {error}\n")
                return FAILED
            log_path = directory.log_path(f"trainer_rank_{runtime.rank}")
            level = logging.getLevelNamesMapping()[config.telemetry.log_level]
            with redirect_process_output(log_path, level=level) as terminal:
                job = _Job(config, derived, runtime, rank_zero, control, directory, run, terminal)
                with terminate_as_exit(job.abandon):
                    return job.run(alter)


@contextlib.contextmanager
def _run_directory(
    config: RunConfig, rank_zero: RankZero, rank: int
) -> Iterator[tuple[OpenRun | None, RunDirectory]]:
    """Rank 0 opens and locks the run's folder; every rank learns where it is."""
    opened: list[OpenRun] = []

    def open_on_rank_zero() -> RunDirectory:
        opened.append(
            open_run(
                config.run.directory, name=config.run.name, config=config.resolved(), resume=config.run.resume
            )
        )
        return RunDirectory(path=opened[0].directory.path.resolve())

    directory = rank_zero.run("the choice of the run directory", open_on_rank_zero)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(opened[0]) if rank == 0 else None
        yield run, directory


@dataclasses.dataclass(frozen=True, slots=True)
class _Job:
    """What the steps of building a job share."""

    config: RunConfig
    derived: Derived
    runtime: DistributedRuntime
    rank_zero: RankZero
    control: dist.ProcessGroup
    directory: RunDirectory
    opened: OpenRun | None
    terminal: TextIO

    def run(self, alter: Callable[[Parts], Parts] | None) -> int:
        self._announce()
        try:
            with self._parts() as (settings, parts):
                train(settings, self.derived.schedule, alter(parts) if alter else parts)
            passed = self.rank_zero.run("the gates", self._judge)
        except (
            Exception
        ) as error:  # the process boundary: the cause goes to the terminal, the trace to the log
            logger.exception("the run failed")
            self._report(error)
            return FAILED
        except (SystemExit, KeyboardInterrupt) as signalled:
            logger.warning("stopped by a signal", exc_info=signalled)
            self._fail("stopped by a signal; if another trainer rank failed, it says why")
            return 130 if isinstance(signalled, KeyboardInterrupt) else int(signalled.code or FAILED)
        if self.opened is not None:
            self.opened.finish()
        return 0 if passed else FAILED

    def _report(self, error: Exception) -> None:
        """The cause, once: by rank 0, or by the rank that failed alone."""
        text = f"{type(error).__name__}: {error}"
        if self.runtime.rank == 0:
            self._fail(
                f"another trainer rank ended; it says why. Seen here: {text}" if lost_a_peer(error) else text
            )
        elif is_own_cause(error):
            self._write(
                f"FAILED on trainer rank {self.runtime.rank}: {text}\nlogs: {self.directory.logs_dir}"
            )

    def _fail(self, reason: str) -> None:
        self._say(f"FAILED: {reason}\nlogs: {self.directory.logs_dir}")
        if self.opened is not None:
            self.opened.fail(reason)

    def _announce(self) -> None:
        verb = "continuing" if self.opened is not None and self.opened.resumed else "starting"
        self._say(f"{verb} {self.config.run.name} in {self.directory.path}")
        for warning in self.derived.warnings:
            self._say(f"warning: {warning}")

    def _say(self, text: str) -> None:
        if self.runtime.rank == 0:
            self._write(text)

    def _write(self, text: str) -> None:
        self.terminal.write(text + "\n")
        self.terminal.flush()

    @contextlib.contextmanager
    def _parts(self) -> Iterator[tuple[LoopSettings, Parts]]:
        config, derived, rank_zero = self.config, self.derived, self.rank_zero
        backend = self._refit_backend()
        policy_folder, critic_folder = self._model_folders()
        task_kwargs = self._task_kwargs(policy_folder)
        task = build_task(**task_kwargs)
        task.check_prompt_lengths(config.data.max_prompt_tokens)
        with contextlib.ExitStack() as stack:
            actors = self._start_actors(stack, task, task_kwargs, policy_folder)

            # Imported here and not at the top: Megatron takes seconds, in which the actors are starting already.
            from megatron_ppo.app.models import build_models

            models = build_models(
                config,
                derived,
                policy_folder=policy_folder,
                critic_folder=critic_folder,
                pad_token_id=task.pad_token_id,
            )
            rank_zero.run("the start of the inference group", lambda: self._begin(actors))
            checkpoints = RunCheckpoints(
                folder=self.directory.checkpoints_dir,
                resume=rank_zero.run("resume", lambda: self.opened is not None and self.opened.resumed),
                keep=config.checkpoint.keep,
                metric=config.checkpoint.metric,
                higher_is_better=config.checkpoint.higher_is_better,
                identity=self._identity(),
                load_replay_buffer=config.checkpoint.load_replay_buffer,
                models=models.store(),
                replay=actors.snapshots() if actors else None,
                version_at=derived.schedule.version_at,
                on_rank_zero=rank_zero.run,
            )
            settings = self._loop_settings(task)
            refit = self._refit(stack, models.policy, actors, backend)
            parts = Parts(
                policy=models.policy,
                critic=models.critic,
                advantage=self._advantage(),
                groups=self._groups(actors),
                refit=self._probed(refit, models.policy, actors, task),
                validator=self._validator(actors, task),
                checkpoints=checkpoints,
                telemetry=self._telemetry(stack),
                observe=lambda: rank_zero.run("the actors' statistics", lambda: self._statistics(actors)),
            )
            yield settings, parts

    def _model_folders(self) -> tuple[Path, Path]:
        config = self.config
        cache_dir, timeout_s = (
            Path(config.cluster.model_cache_dir).expanduser(),
            config.cluster.prepare_timeout_s,
        )

        def prepare_both() -> tuple[Path, Path]:
            from megatron_ppo.app.model_folder import model_folder

            self._say("preparing the initial model (cached after the first time)")
            policy = model_folder(config.policy.model, cache_dir=cache_dir, timeout_s=timeout_s)
            own = config.critic.model.path is not None or config.critic.model.recipe is not None
            critic = (
                model_folder(config.critic.model, cache_dir=cache_dir, timeout_s=timeout_s) if own else policy
            )
            return policy, critic

        return self.rank_zero.run("the preparation of the initial model", prepare_both)

    def _task_kwargs(self, policy_folder: Path) -> dict[str, Any]:
        kwargs = self.config.data.kwargs()
        if takes_option(self.config.data.task, "tokenizer_dir"):
            kwargs["tokenizer_dir"] = str(policy_folder)
        return kwargs

    def _start_actors(
        self, stack: contextlib.ExitStack, task: TaskSpec, task_kwargs: dict[str, Any], policy_folder: Path
    ) -> RunActors | None:
        def start() -> None:
            self._say("starting Ray, the inference engines, the replay buffer and the collector")
            started.append(
                stack.enter_context(
                    run_actors(
                        self.config,
                        self.derived,
                        task=task,
                        task_kwargs=task_kwargs,
                        policy_folder=policy_folder,
                        directory=self.directory,
                        abandon=lambda message: self.abandon(f"PartDiedError: {message}"),
                    )
                )
            )

        started: list[RunActors] = []
        self.rank_zero.run("the start of the actors", start)
        return started[0] if started else None

    def _begin(self, actors: RunActors | None) -> None:
        assert actors is not None, "only rank 0 has actors"
        actors.begin()

    def _statistics(self, actors: RunActors | None) -> dict[str, float]:
        assert actors is not None, "only rank 0 has actors"
        return actors.statistics()

    def abandon(self, message: str) -> None:
        """The main thread is stuck inside a collective and will not meet the failure: say why and go.

        Never returns. Ray's processes end with their driver, and torchrun ends the other ranks.
        """
        self._fail(message)
        os._exit(FAILED)

    def _refit_backend(self) -> str:
        """Raises: ConfigError for NCCL on a machine that the engines would fail to use it on."""
        chosen = self.config.refit.backend
        possible = backend_for(self.runtime.device)
        if chosen == "nccl" and possible != "nccl":
            raise ConfigError(
                f"refit.backend: got 'nccl'; must be auto or gloo on {self.runtime.device.type}"
            )
        return possible if chosen == "auto" else chosen

    def _refit(
        self, stack: contextlib.ExitStack, policy: Any, actors: RunActors | None, backend: str
    ) -> Refit:
        config, device = self.config, self.runtime.device
        store = None
        if actors is not None:
            store = BroadcastStore(
                host=config.cluster.node_ip_address, backend=backend, timeout_s=config.refit.timeout_s
            )
        refit = resolve(config.refit.target)(
            source=policy,
            sink=actors.engines if actors else None,
            store=store,
            device=device,
            bucket_bytes=config.refit.bucket_bytes,
            in_flight=config.schedule.in_flight_weight_updates,
            recompute_kv=config.schedule.recompute_kv_cache_after_weight_updates,
            timeout_s=config.refit.timeout_s,
            agree=agreement_over(self.control),
        )
        stack.callback(refit.close)
        return refit  # type: ignore[no-any-return]

    def _probed(self, refit: Refit, policy: Any, actors: RunActors | None, task: TaskSpec) -> Refit:
        if not self.config.refit.probe:
            return refit
        prompts = [p.token_ids for p in task.validation_prompts(limit=self.config.refit.probe_sequences)]
        sampling = SamplingSettings(
            temperature=0.0,
            max_new_tokens=self.derived.validation_max_new_tokens,
        )

        def make_sequences() -> list[list[int]]:
            """The prompts with the first published weights' own greedy answers: tokens that a rollout would have."""
            assert actors is not None, "only rank 0 asks the engines"
            answers = actors.engines.generate_many(
                prompts, sampling=sampling, seeds=range(len(prompts)), deadline_s=GENERATION_TIMEOUT_S
            )
            # Scoring asks for one further token, for which a sequence as long as the engine's context has no room.
            longest = self.derived.max_model_len - 1
            return [[*p, *a.token_ids][:longest] for p, a in zip(prompts, answers, strict=True)]

        return ProbedRefit(
            refit=refit,
            policy=policy,
            engines=actors.engines if actors else None,
            make_sequences=make_sequences,
            tolerance_nats=self.config.refit.probe_tolerance_nats,
            pad_token_id=task.pad_token_id,
            deadline_s=GENERATION_TIMEOUT_S,
            on_rank_zero=self.rank_zero.run,
        )

    def _groups(self, actors: RunActors | None) -> GroupSource:
        source = RayGroupSource(
            rank_zero=self.rank_zero,
            supervisor=actors.supervisor if actors else None,
            replay=actors.replay if actors else None,
            groups_timeout_s=self.config.cluster.groups_timeout_s,
        )
        if self.config.telemetry.record_trajectories:
            return RecordedGroups(
                source=source,
                path=self.directory.path / "trajectories.jsonl",
                on_rank_zero=self.rank_zero.run,
            )
        return source

    def _validator(self, actors: RunActors | None, task: TaskSpec) -> EngineValidator:
        config = self.config
        reward = config.reward.spec(target=task.reward.target, kwargs=task.reward.kwargs)
        scorer = resolve(reward.pop("_target_"))(**reward)
        return EngineValidator(
            engines=actors.engines if actors else None,
            prompts=task.validation_prompts(limit=config.validation.max_samples),
            scorer=scorer,
            sampling=validation_sampling(config, self.derived),
            expected_version=self.derived.schedule.version_at,
            seed=config.validation.seed,
            deadline_s=GENERATION_TIMEOUT_S,
            on_rank_zero=self.rank_zero.run,
        )

    def _advantage(self) -> Any:
        loss = self.config.loss
        penalty = loss.reference_policy_kl_penalty if loss.use_kl_in_reward else 0.0
        return build(
            self.config.advantage, reward_kl_penalty=penalty, reward_kl_type=loss.reference_policy_kl_type
        )

    def _telemetry(self, stack: contextlib.ExitStack) -> Telemetry:
        config = self.config
        if self.runtime.rank != 0:
            return NullTelemetry()
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
        )
        stack.callback(telemetry.close)
        return telemetry

    def _identity(self) -> dict[str, str]:
        """What a checkpoint must agree on with the run that continues from it."""
        config, facts = self.config, self.derived.policy_model
        return {
            "run.seed": str(config.run.seed),
            "data": str(sorted(config.data.model_dump().items())),
            "policy.model": f"{facts.architecture}/{facts.num_layers}x{facts.hidden_size}/{facts.vocab_size}",
        }

    def _loop_settings(self, task: TaskSpec) -> LoopSettings:
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
            pad_token_id=task.pad_token_id,
            seq_logprob_error_threshold=algorithm.seq_logprob_error_threshold,
            overlong_filtering=algorithm.overlong_filtering,
            use_reference=self.derived.needs_reference,
            validation_period=config.validation.period,
            validate_at_start=config.validation.at_start,
            validate_at_end=config.validation.at_end,
            checkpoint_period=config.checkpoint.period,
        )

    def _judge(self) -> bool:
        """Evaluate the gates, print them, keep them beside the metrics."""
        results = evaluate(
            parse_gates(self.config.resolved()["gates"]), read_rows(self.directory.metrics_path)
        )
        write_json_atomically(self.directory.gates_path, results_as_json(results))
        if results:
            print_results(results, self.terminal)
        passed = all_passed(results)
        self._say(
            f"finished; {'all' if passed else 'NOT all'} of {len(results)} gates passed: {self.directory.path}"
        )
        return passed
