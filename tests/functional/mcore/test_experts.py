"""Mixture-of-experts models train alike however experts, layers, sequences and batches are shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.mcore.test_layouts import (
    OVERLAP,
    PACKED,
    PARAMETER_ABSOLUTE,
    RELATIVE,
    Row,
    assert_same_training,
)
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
Layout = dict[str, int | bool]
EP2: Layout = {"expert_model_parallel_size": 2}
PP2: Layout = {"pipeline_model_parallel_size": 2}
TP2_SP: Layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
MOE, MIXED = "qwen3_moe", "qwen3_moe_mixed"
TABLE: dict[str, Row] = {
    "ep2": Row(layout=EP2, model=MOE),
    "dp2": Row(model=MOE),
    "tp2_sp": Row(layout=TP2_SP, model=MOE),
    "pp2": Row(layout=PP2, model=MOE),
    "cp2_ep2": Row(layout={"context_parallel_size": 2, **EP2}, model=MOE),
    "ep2_overlap": Row(layout=EP2, model=MOE, changes=OVERLAP),
    "ep2_packed": Row(layout=EP2, model=MOE, changes=PACKED),
    "ep2_microbatches_of_one": Row(layout=EP2, model=MOE, changes={"train_micro_batch_size": 1}),
    "dp2_ep2": Row(layout=EP2, world_size=4, model=MOE),
    "tp2_sp_ep2": Row(layout={**TP2_SP, **EP2}, world_size=4, model=MOE),
    "pp2_ep2": Row(layout={**PP2, **EP2}, world_size=4, model=MOE),
    "mixed_ep2": Row(layout=EP2, model=MIXED),
    "mixed_pp2": Row(layout=PP2, model=MIXED),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [*((name, "policy") for name in TABLE), ("ep2", "critic"), ("tp2_sp_ep2", "critic")],
)
def test_experts_train_like_in_one_process(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    name: str,
    kind: str,
) -> None:
    # Gradients are compared too: those of experts are summed over groups of their own, and Adam hides a wrong scale.
    row = TABLE[name]
    arguments = {"kind": kind, "folder": str(tiny_model(row.model)), "layout": row.layout, **row.changes}
    ranks = workers.run(JOBS + "train", world_size=row.world_size, **arguments)
    for rank in ranks:
        assert_same_training(
            rank, one_process(kind, row.model), "train" if kind == "policy" else "train/critic"
        )
        assert rank["metrics"] == ranks[0]["metrics"]
        assert rank["hash"] == ranks[0]["hash"]


def test_every_expert_and_every_router_is_trained(
    one_process: Callable[[str, str], dict[str, Any]],
) -> None:
    # Otherwise equal gradients would prove little.
    gradients = one_process("policy", "qwen3_moe")["gradients"]
    still = [
        name for name, gradient in gradients.items() if ".mlp." in name and not (gradient.abs() > 1e-6).any()
    ]
    assert still == []


ONE: Layout = {}


@pytest.mark.parametrize(
    ("saved", "loaded"), [(EP2, ONE), (ONE, EP2), (EP2, PP2)], ids=["ep2_one", "one_ep2", "ep2_pp2"]
)
def test_training_goes_on_exactly_where_experts_are_shared_out_differently(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path, saved: Layout, loaded: Layout
) -> None:
    arguments = {"folder": str(tiny_model(MOE)), "checkpoint": str(tmp_path / "saved")}

    def run(job: str, layout: Layout) -> list[dict[str, Any]]:
        layouts = {"policy_layout": layout, "critic_layout": layout}
        if layout == ONE:
            return [workers.run_alone(JOBS + job, **arguments, **layouts)]
        return workers.run(JOBS + job, **arguments, **layouts)

    expected = run("save", saved)[0]
    for seen in run("resume", loaded):
        # The policy has taken two steps by now and the critic four, every parameter of them.
        assert seen["adam_steps"] == [{2.0}, {4.0}]
        for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
            for name in theirs:
                if name.endswith(("loss", "grad_norm", "lr")):
                    assert mine[name] == pytest.approx(theirs[name], rel=RELATIVE, abs=1e-6), name
        for model in ("policy", "critic"):
            for name, tensor in expected[model].items():
                torch.testing.assert_close(seen[model][name], tensor, rtol=0.0, atol=PARAMETER_ABSOLUTE)


def test_the_load_balancing_loss_adds_its_own_gradient_and_nothing_else(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    found = workers.run_alone(JOBS + "balancing_gradients", folder=str(tiny_model(MOE)), coefficient=0.5)
    assert len(found["expected"]) == 2
    for name, expected in found["expected"].items():
        assert expected.abs().max() > 1e-3
        # Differences of float32 gradients of order 0.1.
        torch.testing.assert_close(found["added"][name], expected, rtol=1e-4, atol=1e-6)
    # Nothing flows from a router into its own layer's experts.
    last = [tensor for name, tensor in found["added"].items() if "layers.1.mlp.experts" in name]
    assert last
    assert all(tensor.abs().max() < 1e-6 for tensor in last)


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        ({"tensor_model_parallel_size": 2}, ("tensor_model_parallel_size=2", "sequence_parallel=true")),
        ({"expert_model_parallel_size": 4}, ("expert_model_parallel_size=4", "2 data-parallel ranks")),
    ],
)
def test_a_layout_that_experts_cannot_have_is_refused(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], layout: Layout, words: tuple[str, ...]
) -> None:
    for message in workers.run(JOBS + "layout_error", folder=str(tiny_model("qwen3_moe")), layout=layout):
        assert all(word in message for word in words), message
