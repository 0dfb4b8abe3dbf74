"""The memory estimate against counted tensors and numbers worked out by hand."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from composed import changed
from composed import experiment as composed

from megatron_ppo.config.checks import derive
from megatron_ppo.config.derived import ParallelSizes
from megatron_ppo.config.memory import (
    GIB,
    engine_memory,
    memory_rows,
    num_parameters,
    rank_parameters,
    trainer_memory,
)
from megatron_ppo.mcore.hf_config import HFModelConfig, map_hf_config
from megatron_ppo.mcore.hf_map import expected_tensors
from megatron_ppo.warm_start.facts import SMOLLM2_135M, ModelFacts

ONE = ParallelSizes(tensor=1, pipeline=1, context=1, data=1)
RAW: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}


def facts_of(model: HFModelConfig) -> ModelFacts:
    return ModelFacts(
        architecture=model.architecture,
        hidden_size=model.hidden_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        ffn_hidden_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        context_length=model.max_position_embeddings,
        tie_word_embeddings=model.tied,
    )


@pytest.mark.parametrize("value_head", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3"])
def test_number_of_parameters_is_that_of_the_folders_tensors(
    family: str, tied: bool, value_head: bool
) -> None:
    raw = {**RAW, "architectures": [f"{family}ForCausalLM"], "tie_word_embeddings": tied}
    model = map_hf_config(raw, source="test")
    counted = sum(prod(shape) for shape in expected_tensors(model, value_head=value_head).values())
    assert num_parameters(facts_of(model), value_head=value_head) == counted
    # In one process nothing is padded or doubled.
    assert rank_parameters(facts_of(model), ONE, value_head=value_head) == counted


def test_number_of_parameters_of_published_models() -> None:
    assert num_parameters(SMOLLM2_135M) == 134_515_008
    qwen = derive(composed("qwen2.5_1.5b_gsm8k_2n8g"), 8, folders_may_be_absent=True).policy_model
    assert num_parameters(qwen) == 1_543_714_304


def test_optimizer_state_is_shared_by_data_and_context_ranks() -> None:
    section = changed({}).policy
    small = ParallelSizes(tensor=1, pipeline=1, context=1, data=1)
    shared = ParallelSizes(tensor=1, pipeline=1, context=2, data=4)
    one, eighth = (
        trainer_memory(SMOLLM2_135M, sizes, section, sequence_tokens=64, value_head=False)
        for sizes in (small, shared)
    )
    assert (one.parameters, one.gradients) == (eighth.parameters, eighth.gradients)
    assert one.optimizer == 8 * 134_515_008  # two moments in float32
    assert eighth.optimizer * 8 == one.optimizer
    assert eighth.activations * 2 == one.activations


def test_bfloat16_halves_the_weights_and_adds_main_parameters() -> None:
    section = changed({"policy.precision": "bf16"}).policy
    seen = trainer_memory(SMOLLM2_135M, ONE, section, sequence_tokens=64, value_head=False)
    assert seen.parameters == 2 * 134_515_008
    assert seen.gradients == 4 * 134_515_008
    assert seen.optimizer == 12 * 134_515_008


def test_activations_of_a_layer_by_hand() -> None:
    section = changed({"policy.train_micro_batch_size": 2}).policy
    seen = trainer_memory(SMOLLM2_135M, ONE, section, sequence_tokens=10, value_head=False)
    per_token = 4 * 576 + (9 + 2 * 3 + 9 + 3 + 9) * 64 + 4 * 1536
    assert seen.activations == 2 * 10 * 30 * per_token * 4
    assert seen.logits == 2 * 10 * 49152 * (4 + 4 + 4)
    whole = trainer_memory(SMOLLM2_135M, ONE, section, sequence_tokens=10, value_head=True)
    assert whole.logits == 0


def test_a_token_budget_and_chunks_of_log_probs_bound_what_a_microbatch_takes() -> None:
    dynamic = {"enabled": True, "train_mb_tokens": 32, "logprob_mb_tokens": 32, "sequence_length_round": 8}
    section = changed({"policy.dynamic_batching": dynamic, "policy.logprob_chunk_size": 4}).policy
    seen = trainer_memory(SMOLLM2_135M, ONE, section, sequence_tokens=10, value_head=False)
    fixed = changed({"policy.train_micro_batch_size": 2}).policy
    of_twenty = trainer_memory(SMOLLM2_135M, ONE, fixed, sequence_tokens=10, value_head=False)
    assert seen.activations * 20 == of_twenty.activations * 32
    assert seen.logits * 20 == of_twenty.logits * 4


def test_recomputation_and_sequence_parallelism_keep_less() -> None:
    def activations(changes: dict[str, Any], sizes: ParallelSizes = ONE) -> int:
        section = changed({f"policy.{key}": value for key, value in changes.items()}).policy
        return trainer_memory(SMOLLM2_135M, sizes, section, sequence_tokens=100, value_head=False).activations

    full = {"recompute.granularity": "full", "recompute.method": "uniform", "recompute.num_layers": 1}
    mlp = {"recompute.granularity": "selective", "recompute.modules": ["mlp"]}
    nothing = activations({})
    assert activations(full) < activations(mlp) < nothing
    tp = ParallelSizes(tensor=3, pipeline=1, context=1, data=1)
    assert activations({"parallelism.sequence_parallel": True}, tp) * 3 == nothing
    assert nothing / 3 < activations({}, tp) < nothing
    stages = ParallelSizes(tensor=1, pipeline=2, context=1, data=1)
    assert activations({}, stages) == nothing  # half the layers, two microbatches in flight
    assert activations({"parallelism.virtual_pipeline_model_parallel_size": 3}, stages) > nothing


def test_padded_heads_and_the_copy_of_tied_embeddings_are_counted() -> None:
    two = ParallelSizes(tensor=2, pipeline=1, context=1, data=1)
    whole = rank_parameters(SMOLLM2_135M, ONE, value_head=False)
    per_head_group = (3 + 2 + 3) * 64 * 576
    norms = 30 * 2 * 576 + 576
    assert 2 * rank_parameters(SMOLLM2_135M, two, value_head=False) == whole + norms + 30 * per_head_group
    stages = ParallelSizes(tensor=1, pipeline=2, context=1, data=1)
    embedding = 49152 * 576
    assert rank_parameters(SMOLLM2_135M, stages, value_head=False) == (whole + embedding + 576) // 2


def test_kv_cache_of_every_request_by_hand() -> None:
    config = composed("qwen2.5_1.5b_gsm8k_2n8g")
    derived = derive(config, 8, folders_may_be_absent=True)
    seen = engine_memory(config, derived)
    assert seen.kv_for_all == 2 * 2 * 128 * 28 * 2 * 128 * 1537
    assert seen.kv_cache is None
    assert seen.weights == 2 * 1_543_714_304


def test_the_reference_recipe_fits_its_gpus() -> None:
    config = composed("qwen2.5_1.5b_gsm8k_2n8g")
    rows = dict(memory_rows(config, derive(config, 8, folders_may_be_absent=True)))
    on_its_device = float(rows["trainer rank"].split(" GiB")[0])
    assert on_its_device < 72  # of 80 GB, without CUDA context and communication buffers
    assert GIB == 2**30
    assert "reference, per trainer rank" not in rows
    smoke = changed({"algorithm.skip_reference_policy_logprobs_calculation": False})
    assert "reference, per trainer rank" in dict(memory_rows(smoke, derive(smoke, 1)))
