"""Weights from every layout of the trainer reach every receiver bit by bit, through a sender of bounded memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

PUBLISH = "tests.functional.mcore.publish_jobs:publish"
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
VPP2 = {"virtual_pipeline_model_parallel_size": 2}
# Halves of 20 kB: q, k, v and o (16 kB) share or fill buckets; gate, up and down (49 kB) travel in pieces.
STAGING_BYTES = 40_000
# Tensors of a few numbers in flight between the ranks of a refit; the layers have 210 kB.
SMALL_BYTES = 2_000

ROWS: dict[str, tuple[int, dict[str, int], int, str]] = {
    "one rank, one receiver": (1, {}, 1, "qwen2_deep"),
    "one rank, two receivers": (1, {}, 2, "qwen2_tied"),
    "tp2, one receiver": (2, TP2, 1, "qwen2_deep"),
    "tp2, two receivers": (2, TP2, 2, "qwen2_odd_vocab"),
    "pp2, one receiver": (2, PP2, 1, "qwen2_deep"),
    "pp2, two receivers, tied": (2, PP2, 2, "qwen2_tied"),
    "pp2 of two chunks, one receiver": (2, PP2 | VPP2, 1, "qwen2_deep"),
    "dp2, one receiver": (2, {}, 1, "qwen2_deep"),
    "ep2, one receiver": (2, EP2, 1, "qwen3_moe"),
    "pp2 ep2, one receiver": (4, PP2 | EP2, 1, "qwen3_moe"),
    "tp2 pp2, two receivers": (4, TP2 | PP2, 2, "qwen2_deep"),
}


def _layer_bytes(folder: Path) -> int:
    """Bytes of the largest of: a decoder layer, the embeddings, the head."""
    sizes: dict[str, int] = {}
    with safe_open(folder / "model.safetensors", framework="pt") as opened:
        names = opened.keys()
        for name in names:
            layer = name.split(".")[2] if ".layers." in name else name
            sizes[layer] = sizes.get(layer, 0) + 4 * prod(opened.get_slice(name).get_shape())
    return max(sizes.values())


# Ranks of other hosts cannot read each other's memory; the layouts that have something to send, each once.
BY_SOCKETS = ["tp2, two receivers", "pp2 of two chunks, one receiver", "pp2 ep2, one receiver"]


@pytest.mark.parametrize(
    ("row", "by_sockets"),
    [(row, False) for row in ROWS] + [pytest.param(row, True, id=f"{row}, by sockets") for row in BY_SOCKETS],
)
def test_every_layout_publishes_bit_by_bit_within_one_bucket_and_one_layer(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], row: str, by_sockets: bool
) -> None:
    world_size, layout, receivers, kind = ROWS[row]
    folder = tiny_model(kind)
    results = workers.run(
        PUBLISH,
        world_size=world_size,
        folder=str(folder),
        layout=layout,
        receivers=receivers,
        staging_bytes=STAGING_BYTES,
        verify_checksum=receivers == 2,
        by_sockets=by_sockets,
    )
    sender: dict[str, Any] = results[0]
    assert sender["reads"] == ([] if world_size == 1 else [not by_sockets] * 3)
    assert json.dumps(sender["received"]) == json.dumps([sender["expected"]] * receivers)
    bound = STAGING_BYTES + _layer_bytes(folder) + SMALL_BYTES
    peaks = [result["peak_bytes"] for result in results]
    assert max(peaks) <= bound, f"peaks of the ranks {peaks}, staging and one layer {bound}"
    assert sender["peak_bytes"] > SMALL_BYTES, "nothing was measured"
    if kind == "qwen2_deep" and ("tp2" in row or "pp2" in row):
        # The same measure sees a sender that gathers more than a layer.
        assert sender["whole_bytes"] > bound
