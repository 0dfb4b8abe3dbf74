"""Age 0 is synchronous PPO: the job equals an independent implementation, step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launcher import MIXED_LAYOUT, MODEL_CACHE, Launched, final_history

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference_ppo import Hyper, response_logprobs, run_reference

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(400)]

STEPS = 3
# Adam divides by the gradient's size. Where the true gradient is 0, rounding noise is divided by itself and becomes a
# step of the full learning rate; with this epsilon it stays noise, and two implementations can be compared.
EPS = 1e-5


DATA_PARALLEL = [f"{model}.parallelism.tensor_model_parallel_size=1" for model in ("policy", "critic")]


# Two ranks take twice as long on two cores. In `make test`, test_command runs a job in the mixed layout, and the layout
# tests compare each with one rank.
@pytest.mark.parametrize(
    ("nproc", "layout"),
    [
        pytest.param(1, [], id="one_rank"),
        pytest.param(2, DATA_PARALLEL, marks=pytest.mark.slow, id="data_parallel"),
        pytest.param(2, MIXED_LAYOUT, marks=pytest.mark.slow, id="mixed_layout"),
    ],
)
def test_age_zero_equals_the_synchronous_reference(
    launch: Callable[..., Launched], nproc: int, layout: list[str]
) -> None:
    job = launch(
        "+experiment=cpu_smoke", f"run.max_num_steps={STEPS}", "schedule.max_trajectory_age_steps=0",
        "schedule.warmup_generation_lead_steps=null", "schedule.policy_training_start_step=1",
        "algorithm.ppo_epochs=1", "algorithm.shuffle_minibatches=false", "telemetry.record_trajectories=true",
        "checkpoint.period=0", "validation.period=0", "validation.at_end=false", "gates.age_in_versions=null",
        f"policy.optimizer.adam_eps={EPS}", f"critic.optimizer.adam_eps={EPS}", *layout, nproc=nproc,
    )  # fmt: skip
    assert job.wait() == 0, job.output + job.log_tails()
    rows = {row["step"]: row for row in job.rows()}
    history = final_history(job.run_dir)
    folder = next(
        path for path in MODEL_CACHE.iterdir() if path.is_dir() and path.name.startswith("sort3_5-64x2")
    )
    hyper = Hyper(
        policy_lr=1e-4, critic_lr=1e-3, gamma=1.0, gae_lambda=0.95, clip=0.2, tis_cap=2.0,
        minibatch_size=8, grad_clip=1.0, warmup_steps=1, eps=EPS,
    )  # fmt: skip
    expected, policies = run_reference(folder, history, hyper)

    for step, reference in enumerate(expected, start=1):
        row = rows[step]
        assert row["train/reward"] == pytest.approx(reference["reward"])
        assert row["train/avg_trajectory_age"] == 0
        assert row["age/max_versions"] == 0
        # Two float32 implementations that sum in different orders, after up to four optimizer steps of Adam, whose
        # first steps divide by gradients near 0: 1e-4 is the settled tolerance of values after several steps.
        assert row["train/critic/loss"] == pytest.approx(reference["critic_loss"], rel=1e-4)
        assert row["train/critic/grad_norm"] == pytest.approx(reference["critic_grad_norm"], rel=1e-3)
        if step > 1:
            # Losses of whitened advantages are differences near 0, so an absolute bound goes with the relative one.
            assert row["train/loss"] == pytest.approx(reference["loss"], rel=1e-4, abs=1e-5)
            assert row["train/grad_norm"] == pytest.approx(reference["grad_norm"], rel=1e-3)
            assert row["train/token_mult_prob_error"] == pytest.approx(1.0, abs=1e-4)

    # The rollouts of a step come from the weights after the step before; those of the first one that trains the policy
    # are the initial ones. 1e-4 is the settled tolerance of trainer against engine; 4e-6 measured.
    before = {step: policies[max(step - 2, 0)] for step in history}
    assert all(_furthest(before[step], history[step]) < 1e-4 for step in history)
    assert _furthest(before[STEPS - 1], history[STEPS]) > 1e-3, "older weights would have gone unnoticed"


def _furthest(policy: torch.nn.Module, records: list[dict]) -> float:
    """Nats between the policy's log-probs and those that the engine sampled with."""
    with torch.no_grad():
        return max(
            float((response_logprobs(policy, record) - torch.tensor(record["logprobs"])).abs().max())
            for record in records
        )
