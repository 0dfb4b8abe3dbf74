"""The command itself: two jobs in one torchrun, and bad input before anything starts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launcher import Launched, metrics_of

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]


def test_two_jobs_run_one_after_another_in_one_torchrun_and_a_failed_gate_is_its_exit_code(
    two_jobs: Launched,
) -> None:
    first, _, second = two_jobs.output.partition("job 2 of 2: cpu_smoke, run.seed=42")
    # The gate of both is the same-version probe: trainer and engine agree on the published weights to 1e-4 nats.
    assert "job 1 of 2: cpu_smoke" in first and "finished; all of 1 gates passed" in first
    assert "finished; NOT all of 3 gates passed" in second
    assert two_jobs.process.returncode != 0
    assert len(two_jobs.run_dirs) == 1 + 2
    assert two_jobs.survivors(within_s=15) == []


def test_a_critic_goes_on_from_another_run_in_another_layout_than_it_was_saved_in(two_jobs: Launched) -> None:
    rows = {row["step"]: row for row in two_jobs.rows()}
    # One that started at zero would not come near these values: rewards are at most 1.
    assert rows[1]["train/critic/values_mean"] > 2.0
    cold = {row["step"]: row for row in metrics_of(two_jobs.run_dirs[-2])}
    assert cold[1]["train/critic/values_mean"] < 1.0


def test_bad_input_is_one_message_before_anything_starts(launch: Callable[..., Launched]) -> None:
    job = launch("+experiment=cpu_smoke", "schedule.max_trajectory_age_stepz=1", nproc=2)
    assert job.wait(timeout_s=120) != 0
    assert job.output.count("max_trajectory_age_stepz") == 1
    assert "max_trajectory_age_steps" in job.output
    assert not job.base.exists()
    assert not any("ray::" in line or "raylet" in line for line in job.describe().splitlines())
