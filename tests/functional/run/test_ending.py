"""A run in real processes that is told to end, whose rank dies under a launcher that restarts it, or that is stuck."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest
from launcher import Launched, final_history

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(500)]

SAMPLES = 4
ENDLESS = [
    "+experiment=cpu_smoke", "run.max_num_steps=100000", "validation.period=0", "validation.at_start=false",
    "validation.at_end=false", "gates.age_in_versions=null",
]  # fmt: skip


def test_a_launcher_restarts_its_ranks_which_go_on_and_are_told_to_end(
    launch: Callable[..., Launched],
) -> None:
    job = launch(
        *ENDLESS, "checkpoint.period=2", "telemetry.record_trajectories=true", "run.resume=never",
        nproc=2, max_restarts=1,
    )  # fmt: skip
    job.wait_for_step(3)
    former = {process.pid: process for process in job.seen.values() if process != job.tree}
    job.trainer_rank(1).send_signal(signal.SIGKILL)
    job.wait_for(lambda: "(restart 1 of its launcher)" in job.output, "the restart", timeout_s=120)
    before = len(job.rows())
    job.wait_for(lambda: len(job.rows()) > before + 1, "a step after the restart", timeout_s=240)
    # The Ray side of the first attempt ended with its trainer rank 0, not with the launcher.
    alive = [p for p in former.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert alive == []

    job.process.send_signal(
        signal.SIGTERM
    )  # torchrun passes it on; its own exit code says that it was signalled
    job.wait(timeout_s=90)
    steps = [row["step"] for row in job.rows()]
    assert "SIGTERM: ending after this step" in job.output
    assert (
        f"stopped by SIGTERM; adding run.resume={job.run_dir} continues from step {steps[-1]}" in job.output
    )
    assert job.survivors(within_s=15) == []
    assert len([path for path in job.base.iterdir() if (path / "run.json").exists()]) == 1
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
def test_a_rank_that_stands_still_ends_the_run_with_a_diagnosis(launch: Callable[..., Launched]) -> None:
    limits = [f"watchdog.{stage}_s=12" for stage in ("scoring", "training", "checkpoint", "other")]
    job = launch(*ENDLESS, *limits, "checkpoint.period=100000", nproc=2)
    job.wait_for_step(2)
    stopped = job.trainer_rank(1)
    stopped.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    try:
        job.wait_for(lambda: "no progress for" in job.output, "the diagnosis", timeout_s=60)
        assert time.monotonic() - began < 40
        job.wait_for(lambda: "continues from step" in job.output, "the whole message", timeout_s=20)
    finally:
        stopped.send_signal(signal.SIGCONT)  # so that torchrun need not wait until it may kill it
    assert job.wait(timeout_s=60) != 0
    assert "trainer_rank_1: process" in job.output and "SILENT" in job.output
    assert "open prompts:" in job.output and "stack of the main thread:" in job.output
    assert job.survivors(within_s=15) == []
