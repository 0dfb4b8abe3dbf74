"""The command itself: two jobs in one torchrun, and bad input before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launcher import MIXED_LAYOUT, MODEL_CACHE, Launched, metrics_of

from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.compose import load
from tests.functional.worker_group import WorkerGroup

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(400)]


@pytest.fixture
def other_run(workers: WorkerGroup, tmp_path: Path) -> Path:
    """Folder of a run whose critic gives values near 5, which no reward of `cpu_smoke` is."""
    config = load(["+experiment=cpu_smoke"])
    folder = model_folder(config.policy.model, cache_dir=MODEL_CACHE, timeout_s=120.0)
    workers.run_alone(
        "tests.functional.mcore.checkpoint_jobs:leave_critic",
        folder=str(folder),
        run=str(tmp_path / "other"),
        value=5.0,
    )
    return tmp_path / "other"


def test_two_jobs_run_one_after_another_in_one_torchrun(
    launch: Callable[..., Launched], other_run: Path
) -> None:
    job = launch(
        "-m", "+experiment=cpu_smoke", "run.seed=1,2", "run.max_num_steps=2", "checkpoint.period=0",
        "validation.period=0", "gates.age_in_versions=null", f"critic.warm_start={other_run}", *MIXED_LAYOUT,
        nproc=2,
    )  # fmt: skip
    assert job.wait() == 0, job.output + job.log_tails()
    # The gate is the same-version probe: trainer and engine agree on the published weights to 1e-4 nats.
    assert job.output.count("finished; all of 1 gates passed") == 2
    runs = [path for path in job.base.iterdir() if (path / "run.json").exists()]
    assert len(runs) == 2
    # The critics go on from the other run's, in another layout than it was saved in. One that started at zero would not
    # come near these values in two steps: rewards are at most 1.
    for rows in (metrics_of(run) for run in runs):
        assert [row["step"] for row in rows][-2:] == [1, 2]
        assert rows[-2]["train/critic/values_mean"] > 2.0
    assert job.survivors(within_s=15) == []


def test_bad_input_is_one_message_before_anything_starts(launch: Callable[..., Launched]) -> None:
    job = launch("+experiment=cpu_smoke", "schedule.max_trajectory_age_stepz=1", nproc=2)
    assert job.wait(timeout_s=120) != 0
    assert job.output.count("max_trajectory_age_stepz") == 1
    assert "max_trajectory_age_steps" in job.output
    assert not job.base.exists()
    assert not any("ray::" in line or "raylet" in line for line in job.describe().splitlines())
