"""A run in real processes that is told to end, whose rank dies under a launcher that restarts it, or that is stuck."""

from __future__ import annotations

import contextlib
import itertools
import json
import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from launcher import LAUNCHER, Launched, final_history

from megatron_ppo.app.limits import MEETING_S
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from tests.listening_sockets import listening, open_to_others

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(500)]

SAMPLES = 4
ENDLESS = [
    "+experiment=cpu_smoke", "run.max_num_steps=100000", "validation.period=0", "validation.at_start=false",
    "validation.at_end=false", "gates.age_in_versions=null",
]  # fmt: skip


@pytest.mark.parametrize(
    "victim", [1, pytest.param(0, id="0, which Ray's processes end with", marks=pytest.mark.slow)]
)
def test_a_launcher_restarts_its_ranks_which_go_on_and_end_with_exit_code_zero_when_told_to(
    launch: Callable[..., Launched], victim: int
) -> None:
    job = launch(
        *ENDLESS, "checkpoint.period=2", "telemetry.record_trajectories=true", "run.resume=never",
        nproc=2, max_restarts=1, program=LAUNCHER,
    )  # fmt: skip
    job.wait_for_step(3)
    assert listening(job.seen.values()) and open_to_others(job.seen.values()) == []
    former = {process.pid: process for process in job.seen.values() if process != job.tree}
    job.trainer_rank(victim).send_signal(signal.SIGKILL)
    job.wait_for(lambda: "(restart 1 of its launcher)" in job.output, "the restart", timeout_s=120)
    before = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > before + 1, "a step after the restart", timeout_s=240)
    # The Ray side of the first attempt ended with its trainer rank 0, not with the launcher.
    alive = [p for p in former.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert alive == []

    job.signal_everything(signal.SIGTERM)
    assert job.wait(timeout_s=90) == 0, job.output
    steps = [row["step"] for row in job.rows()]
    assert "SIGTERM: ending after this step" in job.output
    assert (
        f"stopped by SIGTERM; adding run.resume={job.run_dir} continues from step {steps[-1]}" in job.output
    )
    assert job.survivors(within_s=15) == []
    assert len(job.run_dirs) == 1
    assert steps == list(range(1, steps[-1] + 1))
    assert (job.run_dir / "checkpoints" / "latest").read_text() == f"step_{steps[-1]}"
    trained = Counter(
        record["ordinal"] for records in final_history(job.run_dir).values() for record in records
    )
    assert set(trained.values()) == {SAMPLES}, "a prompt was trained twice, or in part"


@pytest.mark.slow
def test_a_signal_to_any_rank_ends_all_of_them_with_exit_code_zero(launch: Callable[..., Launched]) -> None:
    job = launch(*ENDLESS, "checkpoint.period=100000", nproc=2)
    job.wait_for_step(2)
    job.trainer_rank(1).send_signal(signal.SIGUSR1)
    assert job.wait(timeout_s=90) == 0, job.output
    assert (
        f"stopped by SIGUSR1; the same command, or run.resume={job.run_dir}, continues from step"
        in job.output
    )
    assert job.survivors(within_s=15) == []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_every_process_loses_neither_the_step_nor_a_prompt(
    launch: Callable[..., Launched], signum: signal.Signals
) -> None:
    """As of a batch system that ends a job: Ray, its actors, the engine's core, the reward function's process too."""
    words = (
        *ENDLESS,
        "checkpoint.period=100000",
        "telemetry.record_trajectories=true",
        "inference.engine_core=process",
    )
    job = launch(*words, nproc=2, max_restarts=1, program=LAUNCHER)
    job.wait_for_step(3)
    job.signal_everything(signum)
    assert job.wait(timeout_s=90) == 0, job.output + job.log_tails()
    steps = [row["step"] for row in job.rows()]
    name = signum.name
    assert f"{name}: ending after this step" in job.output
    assert (
        f"stopped by {name}; the same command, or run.resume={job.run_dir}, continues from step {steps[-1]}"
        in job.output
    )
    assert "(restart 1 of its launcher)" not in job.output, "a run that was told to end was started again"
    assert all(row.get("engines/deaths", 0) == 0 for row in job.rows())
    assert job.survivors(within_s=15) == []

    resumed = launch(*words, nproc=2, program=LAUNCHER)
    resumed.wait_for_step(steps[-1] + 2)
    resumed.signal_everything(signum)
    assert resumed.wait(timeout_s=90) == 0, resumed.output + resumed.log_tails()
    assert resumed.run_dirs == [job.run_dir]
    assert [row["step"] for row in job.rows()] == list(range(1, job.rows()[-1]["step"] + 1))
    trained = Counter(
        record["ordinal"] for records in final_history(job.run_dir).values() for record in records
    )
    assert set(trained.values()) == {SAMPLES}, "a prompt was trained twice, or in part"
    ordinals = sorted(trained)
    assert ordinals[: len(ordinals) // 2] == list(range(len(ordinals) // 2)), "a prompt was lost"
    assert resumed.survivors(within_s=15) == []


@pytest.mark.slow
def test_a_second_signal_ends_a_run_in_the_middle_of_its_step(launch: Callable[..., Launched]) -> None:
    longest_s = 60.0

    def delay_s(seed: int, version: int) -> float:
        plan = FaultPlan(seed=seed, rates={FaultKind.DELAY_REFIT: 1.0}, max_refit_delay_s=longest_s)
        return plan.refit_delay_s(version, 0)

    seed = next(s for s in itertools.count() if delay_s(s, 0) < 3 and delay_s(s, 1) > longest_s / 2)
    job = launch(
        *ENDLESS, "checkpoint.period=1", f"chaos.delay_refit_s={longest_s}", f"chaos.seed={seed}", nproc=2,
        program=LAUNCHER,
    )  # fmt: skip
    job.wait_for_step(1)
    faults = job.run_dir / "faults.jsonl"
    job.wait_for(lambda: faults.read_text().count("\n") == 2, "the long publication", timeout_s=60)
    job.process.send_signal(signal.SIGINT)
    job.wait_for(
        lambda: (
            "SIGINT: ending after this step, with a checkpoint; a second signal ends at once" in job.output
        ),
        "the first signal to be answered",
        timeout_s=20,
    )
    time.sleep(1.5)  # longer than two signals count as one
    job.process.send_signal(signal.SIGINT)
    began = time.monotonic()
    assert job.wait(timeout_s=30) != 0
    assert time.monotonic() - began < 20, "it waited for the publication"
    assert "ended at once by a signal" in job.output and "continues from step 1" in job.output
    assert job.survivors(within_s=15) == []


def _doing(job: Launched, rank: int) -> dict:
    """What a trainer rank last said of itself."""
    return json.loads((job.run_dir / "heartbeats" / f"trainer_rank_{rank}.json").read_text())["detail"]


def _stop_rank_one_where_rank_zero_waits_in(job: Launched, *stages: str) -> psutil.Process:
    """Stopped elsewhere, say before a batch is handed out, rank 1 would be waited for with another limit."""
    stopped = job.trainer_rank(1)

    def in_stages() -> bool:
        return _doing(job, 0)["stage"] in stages

    for _ in range(20):
        job.wait_for(in_stages, "a stage of training", timeout_s=60)
        stopped.send_signal(signal.SIGSTOP)
        time.sleep(3)  # a sign of life is given every two seconds
        if in_stages():
            return stopped
        stopped.send_signal(signal.SIGCONT)
    raise AssertionError(f"rank 0 never waited for rank 1 in {stages}: {_doing(job, 0)}")


def _ends_with_a_diagnosis(job: Launched, stopped: psutil.Process, *, within_s: float) -> None:
    began = time.monotonic()
    try:
        job.wait_for(lambda: "no progress for" in job.output, "the diagnosis", timeout_s=within_s + 20)
        assert time.monotonic() - began < within_s
        job.wait_for(lambda: "it has no checkpoint yet" in job.output, "the whole message", timeout_s=20)
    finally:
        stopped.send_signal(signal.SIGCONT)  # so that torchrun need not wait until it may kill it
    assert job.wait(timeout_s=60) != 0
    assert "trainer_rank_1: process" in job.output and "SILENT" in job.output
    assert "open prompts:" in job.output and "stack of the main thread:" in job.output


@pytest.mark.slow
def test_a_rank_that_stands_still_ends_the_run_with_a_diagnosis(launch: Callable[..., Launched]) -> None:
    limits = [f"watchdog.{stage}_s=12" for stage in ("scoring", "training", "checkpoint", "other")]
    job = launch(*ENDLESS, *limits, "checkpoint.period=100000", nproc=2)
    job.wait_for_step(2)
    stopped = _stop_rank_one_where_rank_zero_waits_in(job, "value_training", "policy_training")
    _ends_with_a_diagnosis(job, stopped, within_s=40)
    assert job.survivors(within_s=15) == []


@pytest.mark.slow
def test_a_rank_that_stands_still_in_the_wait_for_groups_is_named_though_the_wait_itself_may_last(
    launch: Callable[..., Launched],
) -> None:
    job = launch(*ENDLESS, "checkpoint.period=100000", "collector.scoring_deadline_s=3000", nproc=2)
    job.wait_for_step(2)
    # The slowest of reward functions: no group becomes complete any more.
    scorers = job.find("ray::CollectorActor").children(recursive=True)
    assert scorers
    for scorer in scorers:
        scorer.send_signal(signal.SIGSTOP)
    try:
        slow_s = MEETING_S + 20
        job.wait_for(
            lambda: (
                (now := _doing(job, 0))["stage"] == "exposed_generation"
                and time.time() - now["stage_since_unix_s"] > slow_s
            ),
            "a wait that is longer than the ranks wait for each other",
            timeout_s=slow_s + 60,
        )
        assert "no progress for" not in job.output
        stopped = job.trainer_rank(1)
        stopped.send_signal(signal.SIGSTOP)
        _ends_with_a_diagnosis(job, stopped, within_s=MEETING_S + 30)
    finally:
        for scorer in scorers:
            with contextlib.suppress(psutil.NoSuchProcess):
                scorer.send_signal(signal.SIGCONT)
    assert "no sign of life of trainer_rank_1\n" in job.output
    assert job.survivors(within_s=15) == []
