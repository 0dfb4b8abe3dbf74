"""Age 0 is synchronous PPO: the job equals an independent implementation, step by step."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from launcher import EXPERIMENTS, MODEL_CACHE, Launched, final_history, metrics_of

from megatron_ppo.config.compose import validate
from megatron_ppo.config.targets import build
from megatron_ppo.warm_start.cache import prepared_path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from reference_ppo import Hyper, response_logprobs, run_reference

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

STEPS = 3
OTHER_LAYOUTS = {
    "one_rank": (1, []),
    "data_parallel": (
        2,
        [f"{model}.parallelism.tensor_model_parallel_size=1" for model in ("policy", "critic")],
    ),
}


def test_age_zero_equals_the_synchronous_reference(two_jobs: Launched) -> None:
    run_dir = two_jobs.run_dirs[-2]
    equals_the_reference(run_dir, metrics_of(run_dir))


@pytest.mark.slow
@pytest.mark.parametrize("layout", OTHER_LAYOUTS)
def test_age_zero_equals_the_synchronous_reference_in_other_layouts(
    launch: Callable[..., Launched], layout: str
) -> None:
    nproc, words = OTHER_LAYOUTS[layout]
    job = launch(
        "--config-dir", str(EXPERIMENTS), "+experiment=smoke_age_zero", "telemetry.record_trajectories=true",
        *words, nproc=nproc,
    )  # fmt: skip
    assert job.wait() == 0, job.output + job.log_tails()
    equals_the_reference(job.run_dir, job.rows())


def equals_the_reference(run_dir: Path, metrics: list[dict]) -> None:
    rows = {row["step"]: row for row in metrics}
    history = final_history(run_dir)
    config = validate(yaml.safe_load((run_dir / "config.yaml").read_text()))
    assert config.policy.model.recipe is not None
    folder = prepared_path(build(config.policy.model.recipe), MODEL_CACHE)
    hyper = Hyper(
        policy_lr=1e-4, critic_lr=1e-3, gamma=1.0, gae_lambda=0.95, clip=0.2, tis_cap=2.0,
        minibatch_size=8, grad_clip=1.0, warmup_steps=1, eps=config.policy.optimizer.adam_eps,
        epochs=config.algorithm.ppo_epochs,
    )  # fmt: skip
    assert hyper.epochs > 1, "the ratios of a first epoch's first minibatch are all 1"
    expected, policies = run_reference(folder, history, hyper)
    assert policies[-1].lm_head.weight is policies[-1].model.embed_tokens.weight, "they are to be tied"

    for step, reference in enumerate(expected, start=1):
        row = rows[step]
        assert row["train/reward"] == pytest.approx(reference["reward"])
        assert row["train/avg_trajectory_age"] == 0
        assert row["age/max_versions"] == 0
        # Two float32 implementations that sum in different orders, after up to eleven optimizer steps of Adam, whose
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
