"""Settings that change no result do what they are for: equality alone would also hold if they were ignored."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ppo.mcore.settings import RecomputeSettings
from tests.functional.mcore.test_layouts import ALL_LAYERS, EXPERTS, FIRST_LAYER, GRAD_OVERLAP, TP2
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.execution_jobs:"
PARTS = ("core_attention", "input_layernorm", "pre_mlp_layernorm", "mlp")


def selective(module: str) -> RecomputeSettings:
    return RecomputeSettings(granularity="selective", modules=(module,))  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_the_backward_pass_computes_again_exactly_what_recompute_names(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str
) -> None:
    ways = {
        "nothing": RecomputeSettings(),
        "all_layers": ALL_LAYERS["recompute"],
        "first_layer": FIRST_LAYER["recompute"],
        "core_attn": selective("core_attn"),
        "layernorm": selective("layernorm"),
        "mlp": selective("mlp"),
    }
    found = workers.run_alone(
        JOBS + "forward_calls", folder=str(tiny_model("qwen2")), kind=kind, ways=ways, parts=PARTS
    )
    # Two layers, one microbatch.
    once, twice = dict.fromkeys(PARTS, 2), dict.fromkeys(PARTS, 4)
    assert found == {
        "nothing": once,
        "all_layers": twice,
        "first_layer": dict.fromkeys(PARTS, 3),
        "core_attn": once | {"core_attention": 4},
        "layernorm": once | {"input_layernorm": 4, "pre_mlp_layernorm": 4},
        "mlp": once | {"mlp": 4},
    }


def test_experts_are_computed_again_if_recompute_names_them(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    found = workers.run_alone(
        JOBS + "forward_calls",
        folder=str(tiny_model("qwen3_moe")),
        kind="policy",
        ways={"nothing": RecomputeSettings(), "moe": EXPERTS["recompute"]},
        parts=("core_attention", "router", "experts"),
    )
    once = {"core_attention": 2, "router": 2, "experts": 2}
    assert found == {"nothing": once, "moe": once | {"router": 4, "experts": 4}}


def test_gradients_are_reduced_while_the_backward_pass_goes_on(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    folder = str(tiny_model("qwen2"))
    for seen in workers.run(JOBS + "gradient_events", folder=folder, **GRAD_OVERLAP):
        events, buckets = seen["events"], seen["buckets"]
        assert buckets >= 3
        backward = events[: events.index("backward is over")]
        assert (backward.count("reduce"), events.count("reduce")) == (buckets, buckets)
        # The last gradients, of the embedding, come when all buckets but its own are on their way.
        last = max(position for position, event in enumerate(backward) if event == "gradient")
        assert backward[:last].count("reduce") == buckets - 1
    for seen in workers.run(JOBS + "gradient_events", folder=folder):
        # What the above is compared with: one bucket, after the backward pass.
        assert seen["events"] == ["backward is over", "reduce"]


def test_logits_exist_for_one_chunk_of_positions_at_a_time(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    # 61 entries of the vocabulary, a number that no other dimension has.
    job, folder = JOBS + "positions_with_logits", str(tiny_model("qwen2_odd_vocab"))
    chunked = workers.run_alone(job, folder=folder, logprob_chunk_size=5)
    assert chunked == {"logprobs": 5, "reference": 5, "update": 5}
    whole = workers.run_alone(job, folder=folder)
    # Microbatches of 3 and 4 sequences with up to 14 tokens.
    assert min(whole.values()) > 30


@pytest.mark.parametrize("kind", ["policy", "critic"])
def test_a_rank_reads_its_own_share_of_the_files_one_parameter_at_a_time(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str
) -> None:
    folder = tiny_model("qwen2_deep")
    on_disk = (folder / "model.safetensors").stat().st_size
    for seen in workers.run(JOBS + "loading", folder=str(folder), layout=TP2, kind=kind):
        # A critic's head starts at zero and is not read.
        head = 0 if kind == "policy" else 65 * 4
        assert seen["read"] == seen["own"] - head
        assert seen["read"] < 0.6 * on_disk
        # Gate and up are read one after the other and joined.
        assert seen["alive"] <= seen["largest"]
        # The file is mapped, which the recorder counts, though only pages that are read take memory, and those can be
        # dropped at any time. Beside it: the parts of a fused parameter, and their join.
        assert seen["peak"] - on_disk <= 2 * seen["largest"]
        assert 2 * seen["largest"] < 0.3 * seen["own"], "the bound would prove nothing"
