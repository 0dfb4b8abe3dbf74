"""Jobs of this folder run in real processes; each launch is ended, whatever its test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from launcher import EXPERIMENTS, MIXED_LAYOUT, MODEL_CACHE, SECRETS, TORCHRUN, Launched

from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.compose import load
from megatron_ppo.telemetry.run_dir import open_run
from tests.functional.worker_group import WorkerGroup


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """launch(*words, nproc=1, base="run", max_restarts=0, program=TORCHRUN): starts a job in the test's own folder."""
    launched: list[Launched] = []

    def start(
        *words: str,
        nproc: int = 1,
        base: str = "run",
        max_restarts: int = 0,
        program: Sequence[str] = TORCHRUN,
    ) -> Launched:
        launched.append(
            Launched(tmp_path / base, words, nproc=nproc, max_restarts=max_restarts, program=program)
        )
        return launched[-1]

    yield start
    for job in launched:
        if job.process.poll() is None:
            job.kill()


@pytest.fixture(scope="session")
def two_jobs(workers: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """One torchrun of two ranks that has run two jobs to their ends: `smoke_age_zero`, then `smoke_every_part` with a
    critic from another run. In their folder lies an unfinished run of another configuration.

    A job's start takes longer than its steps, so the tests of what a job does share these two. The second one fails a
    gate, as it must, and with it the command.
    """
    folder = tmp_path_factory.mktemp("two_jobs")
    _leave_run_with_a_critic(workers, folder / "other")
    (folder / "experiment").mkdir()
    (folder / "experiment" / "smoke_warm_critic.yaml").write_text(
        "# @package _global_\ndefaults: [smoke_every_part, _self_]\n"
        f"critic:\n  warm_start: {folder / 'other'}\n"
    )
    with open_run(folder / "run", name="cpu_smoke", config={"run": {"seed": 7}}, resume="never") as earlier:
        (earlier.directory.checkpoints_dir / "step_4").mkdir()
    launched = Launched(
        folder / "run",
        [
            "-m", "--config-dir", str(EXPERIMENTS), "--config-dir", str(folder),
            "+experiment=smoke_age_zero,smoke_warm_critic", "telemetry.record_trajectories=true", *MIXED_LAYOUT,
        ],
        nproc=2, env=SECRETS,
    )  # fmt: skip
    try:
        code = launched.wait(timeout_s=480)
        assert code == 1 and "FAILED: " not in launched.output, launched.output + launched.log_tails()
        yield launched
    finally:
        launched.kill() if launched.process.poll() is None else None


def _leave_run_with_a_critic(workers: WorkerGroup, run: Path) -> None:
    """Folder of a run whose critic gives values near 5, which no reward of `cpu_smoke` is."""
    config = load(["+experiment=cpu_smoke"])
    folder = model_folder(config.policy.model, cache_dir=MODEL_CACHE, timeout_s=120.0)
    workers.run_alone(
        "tests.functional.mcore.checkpoint_jobs:leave_critic", folder=str(folder), run=str(run), value=5.0
    )
