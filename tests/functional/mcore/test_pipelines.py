"""Model chunks of an interleaved pipeline, overlapped communication, and bfloat16, beyond the table of layouts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.mcore.test_layouts import DEEP, OVERLAP, PP2, SP, TP2, VPP2, Layout
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.pipeline_jobs:"
SHARED_JOBS = "tests.functional.mcore.jobs:"


@pytest.mark.parametrize("model", [DEEP, "qwen3_deep"])
@pytest.mark.parametrize(
    ("layout", "world_size"), [(PP2 | VPP2, 2), (TP2 | PP2 | VPP2, 4)], ids=["pp2_vpp2", "tp2_pp2_vpp2"]
)
def test_chunks_give_back_the_files_bit_by_bit(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], model: str, layout: Layout, world_size: int
) -> None:
    folder = str(tiny_model(model))
    job = SHARED_JOBS + "export_mismatches"
    for wrong in workers.run(job, world_size=world_size, folder=folder, layout=layout):
        assert wrong == []


def test_a_flush_completes_what_an_overlapped_gather_has_not_brought(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    folder = str(tiny_model("qwen2"))
    ranks = workers.run(JOBS + "parameters_around_a_flush", folder=folder, **OVERLAP)
    expected = workers.run(JOBS + "parameters_around_a_flush", folder=folder)
    names = list(expected[0]["behind"])
    for name in names:
        for rank in ranks:
            # The same sums in the same order: overlapping changes no bit.
            assert torch.equal(rank["flushed"][name], expected[0]["flushed"][name]), name
            assert torch.equal(rank["again"][name], rank["flushed"][name]), name
    # Without this the flush would prove nothing: each rank lacks what the other has updated.
    assert all(
        any(not torch.equal(rank["behind"][name], rank["flushed"][name]) for name in names) for rank in ranks
    )


def test_chunks_and_overlapped_optimizers_resume_exactly_in_other_layouts(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    arguments = {"folder": str(tiny_model(DEEP)), "checkpoint": str(tmp_path / "models")}
    interleaved = (PP2 | VPP2, OVERLAP)
    expected = workers.run(JOBS + "save_then_go_on", policy=interleaved, critic=({}, OVERLAP), **arguments)
    for name, policy, critic, exact in (
        ("the same", interleaved, ({}, OVERLAP), True),
        ("swapped", ({}, OVERLAP), interleaved, False),
        ("others", (TP2 | SP, {}), (PP2, {}), False),
    ):
        for seen in workers.run(JOBS + "load_then_go_on", policy=policy, critic=critic, **arguments):
            _assert_same_continuation(seen, expected[0], name, exact=exact)


def _assert_same_continuation(
    seen: dict[str, Any], expected: dict[str, Any], name: str, *, exact: bool
) -> None:
    for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
        for key in theirs:
            if exact:
                assert mine[key] == theirs[key], f"{name}: {key}"
            elif key.endswith(("loss", "grad_norm", "/lr")):
                # The tolerance of test_layouts: float32 sums in another order.
                assert mine[key] == pytest.approx(theirs[key], rel=1e-5), f"{name}: {key}"
    for model in ("policy", "critic"):
        for key, tensor in expected[f"{model}_loaded"].items():
            assert torch.equal(seen[f"{model}_loaded"][key], tensor), f"{name}: {model} {key} as loaded"
        for key, tensor in expected[model].items():
            difference = float((seen[model][key] - tensor).abs().max())
            assert difference <= (0.0 if exact else 1e-6), f"{name}: {model} {key}"


@pytest.mark.parametrize(
    ("model", "layout", "changes"),
    [(DEEP, PP2 | VPP2, OVERLAP), ("qwen2", {}, OVERLAP)],
    ids=["pp2_vpp2_overlap", "dp2_overlap"],
)
def test_a_bad_loss_applies_no_step_to_chunks_or_overlapped_buckets(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    model: str,
    layout: Layout,
    changes: dict[str, Any],
) -> None:
    folder = str(tiny_model(model))
    job = SHARED_JOBS + "spoilt_update"
    for seen in workers.run(job, kind="policy", folder=folder, layout=layout, spoil="nan", **changes):
        assert seen["ordinals"] == (105,)
        assert seen["same_as_clean"]


def test_a_model_moves_off_its_device_while_its_parameters_are_gathered(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    job = "tests.functional.mcore.residence_jobs:moved_between_steps"
    for seen in workers.run(job, kind="policy", folder=str(tiny_model("qwen2")), layout={}, **OVERLAP):
        assert all(moved == stayed for moved, stayed in seen["metrics"])
        assert seen["hashes"][0] == seen["hashes"][1]


def test_jobs_with_overlap_leave_no_threads_behind(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    # Overlap adds hooks to every module, and bound methods of DDP to the configuration that DDP holds.
    job = SHARED_JOBS + "threads_left_by_jobs"
    first, *later = workers.run_alone(job, folder=str(tiny_model("qwen2")), jobs=3, **OVERLAP)
    assert later == [first, first]


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("rows", [1, 3])
def test_scoring_takes_fewer_sequences_than_an_interleaved_pipeline_has_stages(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], rows: int, kind: str
) -> None:
    arguments = {"kind": kind, "folder": str(tiny_model(DEEP)), "rows": rows}
    expected = workers.run_alone(SHARED_JOBS + "score_rows", layout={}, **arguments)
    for seen in workers.run(SHARED_JOBS + "score_rows", layout=PP2 | VPP2, **arguments):
        torch.testing.assert_close(seen, expected, rtol=0.0, atol=1e-5)


# bfloat16 has 8 significant bits.
BF16_ROUNDING = 2.0**-8
# What is not cut over the tensor group is computed in the same bfloat16 operations on every rank; only float32 sums
# (gradients, losses) are in another order.
BF16_LAYOUTS: dict[str, tuple[Layout, dict[str, Any], float]] = {
    "dp2_overlap": ({}, OVERLAP, 1e-5),
    "pp2_vpp2": (PP2 | VPP2, {}, 1e-5),
    # Here the output of every attention and MLP is the sum of two parts that were rounded to bfloat16.
    "tp2_sp": (TP2 | SP, {}, BF16_ROUNDING),
}


@pytest.mark.parametrize("name", BF16_LAYOUTS)
def test_layouts_agree_in_bf16(workers: WorkerGroup, tiny_model: Callable[[str], Path], name: str) -> None:
    layout, changes, relative = BF16_LAYOUTS[name]
    # Adam's steps are of the size of the learning rate, 1e-4, also where the gradient is mostly rounding: there three
    # steps may go in opposite directions.
    steps_apart = 0.0 if relative < BF16_ROUNDING else 2 * 3 * 1e-4
    arguments = {"kind": "policy", "folder": str(tiny_model(DEEP)), "precision": "bf16"}
    expected = workers.run_alone(SHARED_JOBS + "train", layout={}, **arguments)
    for seen in workers.run(SHARED_JOBS + "train", layout=layout, **arguments, **changes):
        for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
            for key in ("train/loss", "train/grad_norm"):
                assert mine[key] == pytest.approx(theirs[key], rel=relative), key
        for key, tensor in expected["parameters"].items():
            # Main parameters differ by rounding, which may fall on the other side of a bfloat16 boundary.
            ulp = 2 * BF16_ROUNDING * tensor.float().abs()
            excess = (seen["parameters"][key].float() - tensor.float()).abs() - ulp
            assert float(excess.max()) <= steps_apart, key


def test_updates_below_the_resolution_of_bf16_add_up_in_float32_main_parameters(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    # Numbers from 1/16 to 1/8 are 2^-11 apart in bfloat16: an update of 2e-5 alone is less than half of that.
    seen = workers.run_alone(
        JOBS + "small_updates_in_bf16", folder=str(tiny_model("qwen2")), updates=40, lr=2e-5
    )
    assert seen["main_types"] == {torch.float32}
    assert seen["low_types"] == {torch.bfloat16}
    assert len(seen["before"]) > 1000
    assert torch.equal(seen["once"], seen["before"])
    # Kept in bfloat16 only, they would stay there for ever; most have moved by several updates instead.
    moved = (seen["all"] != seen["before"]).float().mean()
    assert moved > 0.2, moved
    assert torch.equal(seen["all"], seen["main"].bfloat16())
