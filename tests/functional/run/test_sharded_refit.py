"""A policy that is cut over two trainer ranks refits an engine that is cut over two workers, in a whole job."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launcher import Launched

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(900),
]

STEPS = 4


@pytest.mark.parametrize(
    "trainer",
    [
        ["policy.parallelism.tensor_model_parallel_size=2", "policy.parallelism.sequence_parallel=true"],
        [
            "policy.parallelism.tensor_model_parallel_size=1",
            "policy.parallelism.pipeline_model_parallel_size=2",
        ],
    ],
    ids=["tp2", "pp2"],
)
def test_a_sharded_trainer_refits_an_engine_of_two_workers(
    launch: Callable[..., Launched], trainer: list[str]
) -> None:
    job = launch(
        "+experiment=cpu_smoke", f"run.max_num_steps={STEPS}", "inference.tensor_parallel_size=2",
        "refit.verify_checksum=true", "validation.period=0", "checkpoint.period=0", "gates.age_in_versions=null",
        *trainer, nproc=2,
    )  # fmt: skip
    assert job.wait(timeout_s=700) == 0, job.output + job.log_tails()
    rows = {row["step"]: row for row in job.rows()}
    # The first step trains the critic alone. After each publish, engine and trainer score the same tokens.
    published = [rows[step] for step in range(2, STEPS + 1)]
    assert all(row["refit/bytes"] > 0 and row["train/grad_norm"] > 0 for row in published)
    differences = [row["probe/max_abs_logprob_diff_nats"] for row in published]
    # fp32 on both sides, other reduction orders.
    assert 0 < max(differences) <= 1e-4
    assert job.survivors(within_s=15) == []
