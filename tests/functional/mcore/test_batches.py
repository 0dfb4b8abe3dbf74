"""How sequences are grouped, and in which portions the vocabulary is computed, changes no result."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.data.microbatch_plan import FixedSize, TokenBudget, plan
from tests.functional.mcore.jobs import random_batch
from tests.functional.mcore.test_layouts import (
    CP2,
    DYNAMIC,
    JOBS,
    OVERLAP,
    PACKED,
    PP2,
    SP,
    TP2,
    VPP2,
    Layout,
    Row,
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
            assert planned.metrics(f"{prefix}/").items() <= metrics.items()
        planned = plan(
            random_batch().length_B.tolist(),
            data_parallel_size=ranks_of_data,
            policy=DYNAMIC["score_batches"],
            may_repeat=True,
        )
        scores = {"policy": "train/logprob_", "critic": "train/critic/value_"}[kind]
        assert ranks[0]["scoring"] == planned.metrics(scores)


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


CHUNKED: dict[str, Row] = {
    "cp2_packed": Row(layout=CP2, changes=PACKED),
    # The last stage's copy of the embedding, in its second chunk.
    "pp2_vpp2_tied": Row(layout=PP2 | VPP2, model="qwen3_deep"),
    # Hooks on the output layer wait for its weights: its own ones, and those of the embedding.
    "ep2_packed_overlap": Row(
        layout={"expert_model_parallel_size": 2}, model="qwen3_moe_deep", changes=PACKED | OVERLAP
    ),
    "dp2_tied_overlap": Row(model="qwen2_tied", changes=OVERLAP),
    "tp2_sp_cp2_packed_overlap": Row(layout=TP2 | SP | CP2, world_size=4, changes=PACKED | OVERLAP),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(x, marks=pytest.mark.slow if row.world_size > 2 else ()) for x, row in CHUNKED.items()],
)
def test_log_probs_in_chunks_train_like_whole_ones_in_every_layout(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    name: str,
) -> None:
    row = CHUNKED[name]
    ranks = workers.run(
        JOBS + "train",
        world_size=row.world_size,
        kind="policy",
        folder=str(tiny_model(row.model)),
        layout=row.layout,
        logprob_chunk_size=5,
        **row.changes,
    )
    for seen in ranks:
        assert_same_training(seen, one_process("policy", row.model), "train")
        assert seen["hash"] == ranks[0]["hash"]


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
