"""Models that leave their device and come back: nothing is lost, nothing stays, and training goes on bit for bit.

On a CPU "away" is another piece of host memory. The code is the one that runs on a GPU; what only a GPU has (pinned
memory, streams) was not run.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.residence_jobs:"
TP2 = {"tensor_model_parallel_size": 2}
INTERLEAVED = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("kind", "layout", "changes"),
    [
        ("policy", {}, {}),
        ("policy", {}, {"precision": "bf16"}),
        ("policy", {}, OVERLAP),
        ("critic", TP2, {}),
        ("critic", INTERLEAVED, {}),
    ],
    ids=["policy_dp2", "policy_dp2_bf16", "policy_dp2_overlap", "critic_tp2", "critic_pp2_vpp2"],
)
def test_training_goes_on_bit_for_bit_when_everything_was_away_between_steps(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    kind: str,
    layout: dict[str, int],
    changes: dict[str, Any],
) -> None:
    folder = str(tiny_model("qwen2_deep" if layout == INTERLEAVED else "qwen2"))
    ranks = workers.run(JOBS + "moved_between_steps", kind=kind, folder=folder, layout=layout, **changes)
    for seen in ranks:
        for moved, stayed in seen["metrics"]:
            assert moved == stayed
        assert seen["hashes"][0] == seen["hashes"][1]
        _assert_same(seen["moved"], seen["stayed"])
        assert len(seen["adam"][0]) > 0
        for mine, theirs in zip(*seen["adam"], strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize(("precision", "main_bytes"), [("fp32", 0), ("bf16", 4)])
def test_a_model_that_is_away_holds_no_memory_of_its_device_and_says_so_when_used(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], precision: str, main_bytes: int
) -> None:
    folder = str(tiny_model("qwen2"))
    seen = workers.run_alone(JOBS + "device_bytes", folder=folder, precision=precision)
    numel, per_part = seen["numel"], seen["per_part"]
    # DDP pads its buffers a little. Float32 main parameters are views of float32 parameters, but copies of bf16 ones.
    assert per_part["parameters"] == pytest.approx(numel * (4 if precision == "fp32" else 2), rel=0.02)
    assert per_part["gradients"] == pytest.approx(numel * 4, rel=0.02)
    assert per_part["optimizer"] == pytest.approx(numel * (8 + main_bytes), rel=0.02)
    assert seen["away"] == 0
    assert seen["after"] == seen["before"]
    assert set(seen["messages"]) == {
        "an update",
        "a forward pass",
        "a digest of the parameters",
        "reading the weights",
    }
    for doing, message in seen["messages"].items():
        assert message.startswith(doing) and "policy" in message and "parameters" in message


def test_a_rank_that_failed_alone_waits_for_nobody_and_frees_nothing_that_a_gather_still_writes(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    for seen in workers.run(JOBS + "one_rank_leaves_alone", folder=str(tiny_model("qwen2")), timeout_s=60.0):
        assert "other ranks may never join" in seen["message"]
        assert len(seen["present"]) == 3
        assert seen["hashes"][0] == seen["hashes"][1]


def test_gradients_come_back_as_zeros(workers: WorkerGroup, tiny_model: Callable[[str], Path]) -> None:
    folder = str(tiny_model("qwen2"))
    assert workers.run_alone(JOBS + "gradients_come_back_as_zeros", folder=folder) == 0.0


def test_a_checkpoint_under_the_schedule_holds_the_same_as_one_without_moves(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"folder": str(tiny_model("qwen2")), "layout": TP2}
    for seen in workers.run(JOBS + "saved_while_away", checkpoint=str(tmp_path / "models"), **arguments):
        assert seen["moved"]["metrics"] == seen["stayed"]["metrics"] == seen["resumed"]["metrics"]
        for name in ("stayed", "resumed"):
            for mine, theirs in zip(seen["moved"]["weights"], seen[name]["weights"], strict=True):
                assert torch.equal(mine, theirs)


def _assert_same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert mine.keys() == theirs.keys()
    for name in theirs:
        assert torch.equal(mine[name], theirs[name]), name
