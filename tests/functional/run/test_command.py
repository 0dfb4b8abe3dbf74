"""The command itself: two jobs in one torchrun, and bad input before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launcher import MIXED_LAYOUT, Launched

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(400)]


def test_two_jobs_run_one_after_another_in_one_torchrun(launch: Callable[..., Launched]) -> None:
    job = launch(
        "-m", "+experiment=cpu_smoke", "run.seed=1,2", "run.max_num_steps=2", "checkpoint.period=0",
        "validation.period=0", "gates.age_in_versions=null", *MIXED_LAYOUT, nproc=2,
    )  # fmt: skip
    assert job.wait() == 0, job.output + job.log_tails()
    # The gate is the same-version probe: trainer and engine agree on the published weights to 1e-4 nats.
    assert job.output.count("finished; all of 1 gates passed") == 2
    runs = [path for path in job.base.iterdir() if (path / "run.json").exists()]
    assert len(runs) == 2
    assert job.survivors(within_s=15) == []


def test_bad_input_is_one_message_before_anything_starts(launch: Callable[..., Launched]) -> None:
    job = launch("+experiment=cpu_smoke", "schedule.max_trajectory_age_stepz=1", nproc=2)
    assert job.wait(timeout_s=120) != 0
    assert job.output.count("max_trajectory_age_stepz") == 1
    assert "max_trajectory_age_steps" in job.output
    assert not job.base.exists()
    assert not any("ray::" in line or "raylet" in line for line in job.describe().splitlines())
