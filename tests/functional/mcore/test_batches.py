"""How sequences are grouped, and in which portions the vocabulary is computed, changes no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_ppo.data.microbatch_plan import FixedSize, TokenBudget, plan
from tests.functional.mcore.jobs import random_batch
from tests.functional.mcore.test_layouts import (
    CP2,
    DYNAMIC,
    JOBS,
    PP2,
    SP,
    TP2,
    Layout,
    assert_same_training,
)
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

LAYOUTS: dict[str, Layout] = {"dp2": {}, "tp2": TP2, "tp2_sp": TP2 | SP, "pp2": PP2, "cp2": CP2}


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_token_budget_trains_like_fixed_sizes(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str
) -> None:
    arguments = {"kind": kind, "folder": str(tiny_model("qwen2"))}
    prefix = "train" if kind == "policy" else "train/critic"
    expected = workers.run_alone(JOBS + "train", layout={}, **arguments)
    alone = workers.run_alone(JOBS + "train", layout={}, **arguments, **DYNAMIC)
    assert_same_training(alone, expected, prefix)
    for name in ("dp2", "tp2_sp", "pp2"):
        ranks = workers.run(JOBS + "train", layout=LAYOUTS[name], **arguments, **DYNAMIC)
        for seen in ranks:
            assert_same_training(seen, expected, prefix)
        assert ranks[0]["metrics"] == ranks[1]["metrics"]
        assert torch.equal(ranks[0]["scores"], ranks[1]["scores"])
        ranks_of_data = 2 if name == "dp2" else 1
        for step, metrics in enumerate(ranks[0]["metrics"]):
            lengths = random_batch(seed=step).length_B.tolist()
            planned = plan(lengths, data_parallel_size=ranks_of_data, policy=DYNAMIC["train_batches"])
            assert metrics[f"{prefix}/packing_efficiency"] == planned.packing_efficiency
            assert metrics[f"{prefix}/num_microbatches"] == planned.num_microbatches
            assert metrics[f"{prefix}/token_imbalance"] == planned.token_imbalance


def test_padding_counts_what_the_model_was_fed(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    policies = {
        "fixed": FixedSize(sequences=3, multiple=1),
        "dynamic": TokenBudget(tokens=48, packed=False, multiple=8),
        "packed": TokenBudget(tokens=48, packed=True, multiple=1),
    }
    # Packed sequences of a layout with two context ranks are rounded up to 4 positions each.
    seen = workers.run(
        JOBS + "positions_fed", folder=str(tiny_model("qwen2")), layout=LAYOUTS["cp2"], policies=policies
    )
    for rank in seen:
        for name, (planned, fed) in rank.items():
            assert planned == fed, name


@pytest.mark.parametrize("model", ["qwen2_odd_vocab", "qwen2_tied"])
def test_log_probs_in_chunks_train_like_whole_ones(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], model: str
) -> None:
    # Untied with a padded vocabulary, and tied, where the output weight is the embedding's. Chunks of 5 positions
    # divide neither a row nor a microbatch.
    arguments = {"kind": "policy", "folder": str(tiny_model(model)), "temperature": 0.7}
    expected = workers.run_alone(JOBS + "train", layout={}, **arguments)
    alone = workers.run_alone(JOBS + "train", layout={}, logprob_chunk_size=5, **arguments)
    assert_same_training(alone, expected, "train")
    for name in ("tp2", "tp2_sp", "pp2"):
        ranks = workers.run(JOBS + "train", layout=LAYOUTS[name], logprob_chunk_size=5, **arguments)
        for seen in ranks:
            assert_same_training(seen, expected, "train")
        assert ranks[0]["hash"] == ranks[1]["hash"]


def test_log_probs_in_chunks_are_those_of_the_whole_in_bf16(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    arguments = {"kind": "policy", "folder": str(tiny_model("qwen2_tied")), "layout": {}, "precision": "bf16"}
    whole, chunked = (
        workers.run_alone(JOBS + "train", steps=1, logprob_chunk_size=size, **arguments) for size in (None, 5)
    )
    # The same bfloat16 logits in the forward pass; gradients are rounded to bfloat16 (2^-9) per chunk.
    assert chunked["metrics"][0]["train/loss"] == pytest.approx(whole["metrics"][0]["train/loss"], rel=1e-6)
    norms = [seen["metrics"][0]["train/grad_norm"] for seen in (chunked, whole)]
    assert norms[0] == pytest.approx(norms[1], rel=2**-9)


def test_the_reference_is_scored_in_chunks_by_its_own_weights(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    folder = str(tiny_model("qwen2_tied"))
    for seen in workers.run(
        JOBS + "reference_is_frozen", folder=folder, layout=LAYOUTS["tp2"], logprob_chunk_size=5
    ):
        assert torch.equal(seen["reference_before"], seen["initial"])
        assert torch.equal(seen["reference_after"], seen["reference_before"])
        assert not torch.equal(seen["policy_after"], seen["initial"])
