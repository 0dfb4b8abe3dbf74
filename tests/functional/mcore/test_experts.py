"""Mixture-of-experts models train alike however experts, layers, sequences and batches are shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.mcore.test_layouts import assert_same_training
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
EXPERT_JOBS = "tests.functional.mcore.expert_jobs:"
Layout = dict[str, int | bool]
EP2: Layout = {"expert_model_parallel_size": 2}
TP2_SP: Layout = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# World size and layout; the data-parallel size is what is left.
LAYOUTS: dict[str, tuple[int, Layout]] = {
    "ep2": (2, EP2),
    "dp2": (2, {}),
    "tp2_sp": (2, TP2_SP),
    "pp2": (2, {"pipeline_model_parallel_size": 2}),
    "dp2_ep2": (4, EP2),
    "tp2_sp_ep2": (4, {**TP2_SP, **EP2}),
}
# float32 sums in another order, relative to the largest entry of the tensor; read off parameters of order 1 whose
# step is 100 times the gradient, which adds 1e-9 or so.
GRADIENT_RELATIVE = 1e-5
GRADIENT_ABSOLUTE = 1e-8


@pytest.fixture(scope="module")
def one_process(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> Callable[[str, str], dict[str, Any]]:
    """The training in one process, and its first gradient; computed once per head and model."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def result(kind: str, model: str) -> dict[str, Any]:
        if (kind, model) not in known:
            arguments: dict[str, Any] = {"kind": kind, "folder": str(tiny_model(model)), "layout": {}}
            known[kind, model] = {
                **workers.run_alone(JOBS + "train", **arguments),
                "gradients": workers.run_alone(EXPERT_JOBS + "gradients", **arguments),
            }
        return known[kind, model]

    return result


@pytest.mark.parametrize(
    ("layout", "kind", "model"),
    [
        *((layout, "policy", "qwen3_moe") for layout in LAYOUTS),
        ("ep2", "critic", "qwen3_moe"),
        ("tp2_sp_ep2", "critic", "qwen3_moe"),
        ("ep2", "policy", "qwen3_moe_mixed"),
        ("pp2", "policy", "qwen3_moe_mixed"),
    ],
)
def test_experts_train_like_in_one_process(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    layout: str,
    kind: str,
    model: str,
) -> None:
    world_size, sizes = LAYOUTS[layout]
    arguments: dict[str, Any] = {"kind": kind, "folder": str(tiny_model(model)), "layout": sizes}
    expected, prefix = one_process(kind, model), "train" if kind == "policy" else "train/critic"
    ranks = workers.run(JOBS + "train", world_size=world_size, **arguments)
    for rank in ranks:
        assert_same_training(rank, expected, prefix)
        assert rank["hash"] == ranks[0]["hash"]
    for gradients in workers.run(EXPERT_JOBS + "gradients", world_size=world_size, **arguments):
        assert gradients.keys() == expected["gradients"].keys()
        for name, gradient in expected["gradients"].items():
            tolerance = GRADIENT_RELATIVE * float(gradient.abs().max()) + GRADIENT_ABSOLUTE
            torch.testing.assert_close(
                gradients[name], gradient, rtol=0.0, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_every_expert_and_every_router_is_trained(
    one_process: Callable[[str, str], dict[str, Any]],
) -> None:
    # Otherwise equal gradients would prove little.
    gradients = one_process("policy", "qwen3_moe")["gradients"]
    still = [
        name for name, gradient in gradients.items() if ".mlp." in name and not (gradient.abs() > 1e-6).any()
    ]
    assert still == []


@pytest.mark.parametrize("size", [1, 3])
def test_the_microbatch_size_changes_nothing_for_experts(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    one_process: Callable[[str, str], dict[str, Any]],
    size: int,
) -> None:
    folder = str(tiny_model("qwen3_moe"))
    for seen in workers.run(
        JOBS + "train", kind="policy", folder=folder, layout=EP2, train_micro_batch_size=size
    ):
        assert_same_training(seen, one_process("policy", "qwen3_moe"), "train")


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
