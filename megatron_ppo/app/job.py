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
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ppo.app.actors import RunActors, run_actors
from megatron_ppo.app.companions import read_companions
from megatron_ppo.app.determinism import check_determinism
from megatron_ppo.app.diagnosis import absent_ranks, diagnosis, main_thread_stack
from megatron_ppo.app.identity import run_identity
from megatron_ppo.app.interruption import Interruptions
from megatron_ppo.app.kernels import choose_kernels
from megatron_ppo.app.launcher import end_with_launcher, launcher_identity, restart_count
from megatron_ppo.app.limits import ENDING, control_timeout_s, stage_deadlines
from megatron_ppo.app.loopback import keep_to_loopback
from megatron_ppo.app.outcome import Outcome
from megatron_ppo.app.parts import PartsBuilder, refit_backend
from megatron_ppo.app.termination import ending_on_signals, is_on_every_rank
from megatron_ppo.config.derived import Derived
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.data.tasks import build_task, takes_option
from megatron_ppo.loop.async_ppo import LoopSettings, Parts, train
from megatron_ppo.loop.identity import Trait
from megatron_ppo.loop.ports import Checkpoints
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.parallel import DistributedRuntime, distributed_runtime
from megatron_ppo.protocol.errors import MegatronPPOError, StopRequested
from megatron_ppo.protocol.imports import no_garbage
from megatron_ppo.ray_actors.rank0 import RankZero
from megatron_ppo.telemetry.gate_check import gates_of
from megatron_ppo.telemetry.heartbeat import RANK_PREFIX, Heartbeat, StageClock, clear_beats
from megatron_ppo.telemetry.process_log import redirect_process_output
from megatron_ppo.telemetry.run_dir import OpenRun, RunDirectory, open_run
from megatron_ppo.telemetry.watchdog import Overdue, Watchdog

logger = logging.getLogger(__name__)

FAILED = 1
RANK_ZERO_SPEAKS_S = 10.0
"""How much later another rank ends a stuck run: torchrun ends every rank as soon as the first one has exited."""


def run_job(config: RunConfig, derived: Derived, *, alter: Callable[[Parts], Parts] | None = None) -> int:
    """Run one job on this rank.

    Args:
        alter: replaces parts after they were built; for tests that break one on purpose.
    Returns: 0 when it finished and every gate passed, or was stopped by a signal with everything saved; otherwise 1
        after the cause was printed once, by rank 0.
    """
    end_with_launcher()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    keep_to_loopback(config)
    with distributed_runtime(timeout_s=config.cluster.process_group_timeout_s) as runtime:
        control = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=control_timeout_s(config))
        )
        stages = StageClock()
        rank_zero = RankZero(
            rank=runtime.rank, world_size=runtime.world_size, group=control, meeting=stages.meeting
        )
        with contextlib.ExitStack() as stack:
            try:
                run, directory = stack.enter_context(_run_directory(config, rank_zero, runtime.rank))
            except (MegatronPPOError, OSError) as error:  # there is no log file yet, and no actor to end
                if runtime.rank == 0:
                    sys.stderr.write(f"FAILED: {type(error).__name__}: {error}\n")
                return FAILED
            name = f"{RANK_PREFIX}{runtime.rank}"
            log_path = directory.log_path(name)
            level = logging.getLevelNamesMapping()[config.telemetry.log_level]
            with redirect_process_output(log_path, level=level) as terminal:
                heartbeat = Heartbeat(directory.heartbeat_path(name), describe=stages.describe)
                stages.on_change = heartbeat.wake
                interruptions = Interruptions(
                    rank_zero=rank_zero, group=control, world_size=runtime.world_size
                )
                outcome = Outcome(
                    name=config.run.name,
                    resume=config.run.resume,
                    rank=runtime.rank,
                    directory=directory,
                    opened=run,
                    terminal=terminal,
                )
                job = _Job(
                    config=config,
                    derived=derived,
                    runtime=runtime,
                    rank_zero=rank_zero,
                    control=control,
                    directory=directory,
                    opened=run,
                    outcome=outcome,
                    stages=stages,
                    interruptions=interruptions,
                )
                signals = ending_on_signals(
                    request=job.request_end,
                    can_wait=job.can_wait,
                    unwinds=job.ending.is_set,
                    abandon=job.abandon,
                )
                with heartbeat.in_thread(), signals, job.watchdog():
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
                config.run.directory,
                name=config.run.name,
                config=config.resolved(),
                resume=config.run.resume,
                launcher=launcher_identity(),
                restarted=restart_count() > 0,
            )
        )
        clear_beats(opened[0].directory.heartbeats_dir)
        return RunDirectory(path=opened[0].directory.path.resolve())

    directory = rank_zero.run("the choice of the run directory", open_on_rank_zero)
    with contextlib.ExitStack() as stack:
        run = stack.enter_context(opened[0]) if rank == 0 else None
        yield run, directory


@contextlib.contextmanager
def _last_save(checkpoints: Checkpoints) -> Iterator[None]:
    """A save that is being written when the run fails on all ranks together still becomes a checkpoint."""
    try:
        yield
    except MegatronPPOError as error:
        if is_on_every_rank(error):
            try:
                checkpoints.publish(wait=True)
            except Exception:  # the first error is the cause
                logger.exception("the save in the background could not be completed")
        raise


def _load_megatron() -> None:
    """Takes seconds: not before the processes that are to start meanwhile."""
    if "megatron.core" not in sys.modules:
        with no_garbage():
            platform.install()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """What the steps of building a job share.

    Attributes:
        training, ending: the loop has begun, has ended; between them a signal can wait for the end of a step.
        lonely: when a signal came, another rank of this host was gone.
    """

    config: RunConfig
    derived: Derived
    runtime: DistributedRuntime
    rank_zero: RankZero
    control: dist.ProcessGroup
    directory: RunDirectory
    opened: OpenRun | None
    outcome: Outcome
    stages: StageClock
    interruptions: Interruptions
    training: threading.Event = dataclasses.field(default_factory=threading.Event)
    ending: threading.Event = dataclasses.field(default_factory=threading.Event)
    lonely: threading.Event = dataclasses.field(default_factory=threading.Event)

    def run(self, alter: Callable[[Parts], Parts] | None) -> int:
        self.outcome.announce(self.derived.warnings)
        try:
            if not self.rank_zero.run("the state of the run", self._is_finished):
                self._train(alter)
            passed = self.rank_zero.run("the gates", self._judge)
        except StopRequested as stop:
            self.outcome.stop(str(stop))
            return 0
        except Exception as error:  # the process boundary: the cause goes to the terminal
            logger.exception("the run failed")
            self.outcome.report(error)
            return FAILED
        except SystemExit as signalled:
            return self._left(signalled)
        self.outcome.finish()
        return 0 if passed else FAILED

    def _train(self, alter: Callable[[Parts], Parts] | None) -> None:
        with self._parts() as (settings, parts):
            parts = alter(parts) if alter else parts
            with _last_save(parts.checkpoints), self._training():
                train(settings, self.derived.schedule, parts)

    def _is_finished(self) -> bool:
        return self.opened is not None and self.opened.finished

    @contextlib.contextmanager
    def _training(self) -> Iterator[None]:
        """While the main thread will come to the end of a step."""
        self.training.set()
        try:
            yield
        finally:
            self._begin_to_end()

    def watchdog(self) -> contextlib.AbstractContextManager[None]:
        """Ends this process when its main thread is stuck."""
        if not self.config.watchdog.enabled:
            return contextlib.nullcontext()
        return Watchdog(
            stages=self.stages,
            deadlines=stage_deadlines(self.config, rank=self.runtime.rank),
            on_overdue=self._is_stuck,
        ).in_thread()

    def _is_stuck(self, overdue: Overdue) -> None:
        """Told by the watchdog's thread. Never returns."""
        cause = str(overdue)
        if overdue.in_meeting:
            cause += f": {absent_ranks(self.directory, stage=overdue.stage, step=overdue.step)}"
        details = f"{diagnosis(self.directory)}\n{main_thread_stack()}"
        logger.error("%s\n%s", cause, details)
        if self.runtime.rank == 0:
            self.abandon(f"trainer rank 0: {cause}", details=details)
        time.sleep(RANK_ZERO_SPEAKS_S)
        self.outcome.fail_here(f"{cause}\n{details}")
        os._exit(FAILED)

    def can_wait(self) -> bool:
        """Whether a signal can wait for the end of the step; asked from another thread, at each signal."""
        if self.interruptions.a_peer_is_gone():
            self.lonely.set()
        return self.training.is_set() and not self.ending.is_set() and not self.lonely.is_set()

    def request_end(self, signum: int) -> None:
        """A signal can wait for the end of the step; told from another thread."""
        name = signal.Signals(signum).name
        logger.warning("%s: the run ends after this step", name)
        self.outcome.say(f"{name}: ending after this step, with a checkpoint; a second signal ends at once")
        self.interruptions.request(signum)

    def _left(self, signalled: SystemExit) -> int:
        """A signal that did not wait has unwound the stack, on this rank alone perhaps."""
        logger.warning("a signal has ended the run", exc_info=signalled)
        if not self.training.is_set() and not self.lonely.is_set():
            self.outcome.stop("stopped by a signal before its first step")
            return 0
        self.outcome.fail("ended at once by a signal; if another trainer rank failed, it says why")
        return int(signalled.code or FAILED)

    @contextlib.contextmanager
    def _parts(self) -> Iterator[tuple[LoopSettings, Parts]]:
        config, derived, rank_zero = self.config, self.derived, self.rank_zero
        # All three may refuse, before anything is started.
        refit_backend(config, self.runtime.device)
        check_determinism(config, device_type=self.runtime.device.type)
        kernels = choose_kernels(config, cuda=self.runtime.device.type == "cuda")
        if self.opened is not None:
            self.opened.record_kernels({name: chosen.described() for name, chosen in kernels.items()})
        policy_folder, critic_folder = self._model_folders()
        task_kwargs = self._task_kwargs(policy_folder)
        task = build_task(**task_kwargs)
        task.check_prompt_lengths(config.data.max_prompt_tokens)
        with contextlib.ExitStack() as stack:
            try:
                if self.runtime.rank != 0:
                    _load_megatron()  # while rank 0 starts the actors
                actors = self._start_actors(stack, task, task_kwargs, policy_folder)
                _load_megatron()
                from megatron_ppo.app.models import build_models

                models = build_models(
                    config,
                    derived,
                    policy_folder=policy_folder,
                    critic_folder=critic_folder,
                    pad_token_id=task.pad_token_id,
                )
                rank_zero.run("the start of the inference group", lambda: self._begin(actors))
                builder = PartsBuilder(
                    config=config,
                    derived=derived,
                    runtime=self.runtime,
                    rank_zero=rank_zero,
                    control=self.control,
                    directory=self.directory,
                    resumed=rank_zero.run("resume", lambda: self.opened is not None and self.opened.resumed),
                    terminal=self.outcome.terminal,
                    task=task,
                    actors=actors,
                    identity=self._identity(task, policy_folder, critic_folder),
                    companions=self._companions(policy_folder, critic_folder),
                    stack=stack,
                    stages=self.stages,
                    interruptions=self.interruptions,
                    explain=self.outcome.explain,
                )
                yield builder.loop_settings(), builder.parts(models)
            finally:
                self._begin_to_end()

    def _begin_to_end(self) -> None:
        """Before anything is closed."""
        self.ending.set()
        self.stages.enter(ENDING, None)

    def _model_folders(self) -> tuple[Path, Path]:
        config = self.config
        cache_dir, timeout_s = (
            Path(config.cluster.model_cache_dir).expanduser(),
            config.cluster.prepare_timeout_s,
        )

        def prepare_both() -> tuple[Path, Path]:
            from megatron_ppo.app.model_folder import model_folder

            self.outcome.say("preparing the initial model (cached after the first time)")
            policy = model_folder(config.policy.model, cache_dir=cache_dir, timeout_s=timeout_s)
            own = config.critic.model.path is not None or config.critic.model.recipe is not None
            critic = (
                model_folder(config.critic.model, cache_dir=cache_dir, timeout_s=timeout_s) if own else policy
            )
            return policy, critic

        return self.rank_zero.run("the preparation of the initial model", prepare_both)

    def _identity(self, task: TaskSpec, policy_folder: Path, critic_folder: Path) -> dict[str, Trait]:
        def compute() -> dict[str, Trait]:
            return run_identity(
                self.config,
                self.derived,
                task=task,
                policy_folder=policy_folder,
                critic_folder=critic_folder,
                digests=self.directory.model_digests_path,
            )

        return self.rank_zero.run("the look at data and models", compute)

    def _companions(self, policy_folder: Path, critic_folder: Path) -> dict[str, bytes]:
        read: dict[str, bytes] = {}  # stays on rank 0, which writes it
        self.rank_zero.run(
            "the reading of what checkpoints get a copy of",
            lambda: read.update(
                read_companions(self.directory, policy_folder=policy_folder, critic_folder=critic_folder)
            ),
        )
        return read

    def _task_kwargs(self, policy_folder: Path) -> dict[str, Any]:
        kwargs = self.config.data.kwargs()
        if takes_option(self.config.data.task, "tokenizer_dir"):
            kwargs["tokenizer_dir"] = str(policy_folder)
        return kwargs

    def _start_actors(
        self, stack: contextlib.ExitStack, task: TaskSpec, task_kwargs: dict[str, Any], policy_folder: Path
    ) -> RunActors | None:
        def start() -> None:
            self.outcome.say("starting Ray, the inference engines, the replay buffer and the collector")
            started.append(
                stack.enter_context(
                    run_actors(
                        self.config,
                        self.derived,
                        task=task,
                        task_kwargs=task_kwargs,
                        policy_folder=policy_folder,
                        directory=self.directory,
                    )
                )
            )

        started: list[RunActors] = []
        self.rank_zero.run("the start of the actors", start)
        return started[0] if started else None

    def _begin(self, actors: RunActors | None) -> None:
        assert actors is not None, "only rank 0 has actors"
        actors.begin()
        self.stages.tell("engines", actors.engines.table.describe)

    def abandon(self, message: str, *, details: str = "") -> None:
        """The main thread is stuck inside a collective and will not meet the failure: say why and go.

        Never returns. Ray's processes end with their driver, and torchrun ends the other ranks.
        """
        self.outcome.fail(message, details)
        os._exit(FAILED)

    def _judge(self) -> bool:
        return self.outcome.judge(gates_of(self.config.resolved()))
