"""A deterministic job that was killed after two steps and resumed equals one of four steps, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from launcher import Launched, final_history

from megatron_ppo.telemetry.run_comparison import compare_runs

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(500)]

STEPS, KILLED_AFTER = 4, 2
CLOCKS = ("started_at", "finished_at")


# Two ranks with a process of its own for the engine's core take more than the time there is.
@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_resumed_job_equals_an_uninterrupted_one_bit_for_bit(
    launch: Callable[..., Launched], nproc: int
) -> None:
    words = [
        "+experiment=cpu_smoke", f"run.max_num_steps={STEPS}", "run.deterministic=true",
        "schedule.max_trajectory_age_steps=0", "schedule.warmup_generation_lead_steps=null",
        "schedule.policy_training_start_step=1", f"checkpoint.period={KILLED_AFTER}", "checkpoint.metric=null",
        "validation.period=1", "telemetry.record_trajectories=true", "gates.age_in_versions=null",
        # More requests than the engine runs at once: who waits for whom must be the same as well.
        "algorithm.num_prompts_per_step=6", "inference.max_num_seqs=16",
    ]  # fmt: skip
    if nproc > 1:
        words += ["inference.engine_core=process", "critic.parallelism.tensor_model_parallel_size=1"]
    # Side by side: the two disturb each other's timing, and none of their bits.
    whole, cut = (launch(*words, base=base, nproc=nproc) for base in ("whole", "cut"))
    cut.wait_for(lambda: _latest(cut) == f"step_{KILLED_AFTER}", "the checkpoint", timeout_s=240)
    cut.kill()
    resumed = launch(*words, base="cut", nproc=nproc)
    assert whole.wait() == 0, whole.output + whole.log_tails()
    assert resumed.wait() == 0, resumed.output + resumed.log_tails()
    assert resumed.run_dir == cut.run_dir
    assert "continuing cpu_smoke" in resumed.output

    comparison = compare_runs(whole.run_dir, resumed.run_dir)
    assert comparison.findings == ()
    assert _trajectories(whole.run_dir) == _trajectories(resumed.run_dir)
    # A comparison of nothing would succeed.
    rows = whole.rows()
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert comparison.checkpoints == tuple(f"step_{step}" for step in (KILLED_AFTER, STEPS))
    for metric in (
        "train/grad_norm",
        "train/critic/grad_norm",
        "train/entropy",
        "probe/max_abs_logprob_diff_nats",
    ):
        values = [row[metric] for row in rows if row["step"] > KILLED_AFTER]
        assert len(values) == STEPS - KILLED_AFTER and all(values)


def _latest(job: Launched) -> str | None:
    found = list(job.base.glob("*/checkpoints/latest"))
    return found[0].read_text() if found else None


def _trajectories(run_dir: Path) -> dict[int, list[dict]]:
    return {
        step: [{key: value for key, value in record.items() if key not in CLOCKS} for record in records]
        for step, records in final_history(run_dir).items()
    }
