"""Mixture-of-experts models train alike however experts, layers, sequences and batches are shared out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional.mcore.test_layouts import assert_trains_like_one_process
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
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


@pytest.fixture(scope="module")
def one_process(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> Callable[[str, str], dict[str, Any]]:
    """The training in one process; computed once per head and model."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def result(kind: str, model: str) -> dict[str, Any]:
        if (kind, model) not in known:
            folder = str(tiny_model(model))
            known[kind, model] = workers.run_alone(JOBS + "train", kind=kind, folder=folder, layout={})
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
    # Gradients are compared too: those of experts are summed over groups of their own, and Adam hides a wrong scale.
    world_size, sizes = LAYOUTS[layout]
    expected = one_process(kind, model)
    assert_trains_like_one_process(workers, tiny_model(model), expected, kind, world_size, layout=sizes)


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
    expected = one_process("policy", "qwen3_moe")
    assert_trains_like_one_process(
        workers, tiny_model("qwen3_moe"), expected, "policy", 2, layout=EP2, train_micro_batch_size=size
    )


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
