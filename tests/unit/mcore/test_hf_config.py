"""What is read from config.json, and what is refused before anything starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.mcore.hf_config import (
    ExpertsConfig,
    HFModelConfig,
    Llama3RopeScaling,
    map_hf_config,
    read_hf_config,
)
from megatron_ppo.protocol.errors import ConfigError

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def mapped(**changes: Any) -> HFModelConfig:
    return map_hf_config({**QWEN2, **changes}, source="config.json")


def test_every_field_is_mapped() -> None:
    assert mapped() == HFModelConfig(
        architecture="Qwen2ForCausalLM",
        vocab_size=61,
        hidden_size=64,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        ffn_hidden_size=192,
        rms_norm_eps=1e-5,
        max_position_embeddings=64,
        tied=True,
        qkv_bias=True,
        qk_norm=False,
        rope_theta=1e5,
        rope_scaling=None,
    )


def test_architectures_differ_in_biases_norms_and_head_dimension() -> None:
    llama = mapped(architectures=["LlamaForCausalLM"])
    qwen3 = mapped(architectures=["Qwen3ForCausalLM"])
    assert (llama.qkv_bias, llama.qk_norm, llama.head_dim) == (False, False, 16)
    assert (qwen3.qkv_bias, qwen3.qk_norm, qwen3.head_dim) == (False, True, 128)
    assert mapped(architectures=["Qwen3ForCausalLM"], head_dim=32).head_dim == 32


def test_untied_is_the_default_of_these_architectures() -> None:
    without = {key: value for key, value in QWEN2.items() if key != "tie_word_embeddings"}
    assert map_hf_config(without, source="x").tied is False


@pytest.mark.parametrize("suffix", ["ForTokenClassification", "ForSequenceClassification"])
def test_a_reward_model_is_the_language_model_of_its_family_with_a_value_head(suffix: str) -> None:
    config = mapped(architectures=[f"Qwen2{suffix}"], id2label={"0": "LABEL_0"})
    assert config.has_value_head
    # A critic is the same model wherever its first weights came from: its checkpoints fit either way.
    assert config == mapped()
    assert repr(config) == repr(mapped())


@pytest.mark.parametrize("labels", [{}, {"id2label": {"0": "a", "1": "b"}}])
def test_a_classifier_is_no_value_head(labels: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="num_labels is 2; a value head has exactly 1 output"):
        mapped(architectures=["Qwen2ForSequenceClassification"], **labels)


MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "head_dim": 16,
}


def test_experts_are_read_with_old_and_new_keys() -> None:
    expected = ExpertsConfig(
        num_experts=4, experts_per_token=2, ffn_hidden_size=48, normalised=True, layers=(0, 1)
    )
    assert mapped(**MOE).experts == expected
    new = {key: value for key, value in MOE.items() if key != "num_experts"}
    assert mapped(**new, num_local_experts=4).experts == expected
    assert mapped(**MOE).qk_norm
    assert mapped().experts is None


def test_layers_without_experts_are_known() -> None:
    step = mapped(**MOE, num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert step.experts is not None
    assert step.experts.layers == (1, 5)
    assert step.dense_layers
    assert not mapped(**MOE).dense_layers


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": None, "rope_parameters": None},
    ],
)
def test_both_spellings_of_the_rope_base_are_read(rope: dict[str, Any]) -> None:
    assert mapped(**rope).rope_theta == 5e5


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_llama3_scaling_is_read_from_old_and_new_files(key: str) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    expected = Llama3RopeScaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    raw = {**QWEN2, "rope_parameters": None, "rope_theta": 5e5, key: scaling}
    config = map_hf_config(raw, source="x")
    assert config.rope_scaling == expected
    assert config.rope_theta == 5e5


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM")),
        ({"architectures": None}, ("architecture None",)),
        ({"use_sliding_window": True}, ("use_sliding_window", "True")),
        ({"attention_bias": True}, ("attention_bias", "False")),
        ({"mlp_bias": True}, ("mlp_bias",)),
        ({"hidden_act": "gelu"}, ("hidden_act", "gelu", "silu")),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, ("yarn", "default, llama3")),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ("low_freq_factor is missing",)),
        ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
        ({"hidden_size": 0}, ("hidden_size", "positive", "0")),
        ({"vocab_size": None}, ("vocab_size is missing",)),
        ({"num_hidden_layers": 2.5}, ("num_hidden_layers", "2.5")),
        ({"hidden_size": 66}, ("hidden_size=66", "num_attention_heads=4", "head_dim is missing")),
        ({"head_dim": 15}, ("head_dim=15", "even")),
        ({"architectures": ["GPT2ForTokenClassification"]}, ("GPT2ForTokenClassification", "for the critic")),
        ({**MOE, "num_experts": None}, ("num_experts is missing",)),
        ({**MOE, "num_experts_per_tok": 5}, ("num_experts_per_tok=5", "num_experts=4")),
        ({**MOE, "num_experts_per_tok": 1}, ("norm_topk_prob=true", "num_experts_per_tok=1")),
        ({**MOE, "mlp_only_layers": [0, 1]}, ("no layer with experts",)),
        ({**MOE, "mlp_only_layers": "0"}, ("mlp_only_layers", "'0'")),
    ],
)
def test_a_model_that_would_be_mapped_wrongly_is_refused(
    changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        mapped(**changes)
    assert all(word in str(error.value) for word in ("config.json", *words)), str(error.value)


def test_a_folder_without_a_readable_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="not valid JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN2))
    assert read_hf_config(tmp_path) == mapped()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "tp", "padded"),
    [
        (4, 2, 1, (4, 2)),
        (4, 2, 2, (4, 2)),
        (4, 2, 4, (8, 4)),
        (9, 3, 2, (12, 4)),
        (9, 3, 3, (9, 3)),
        (3, 1, 2, (6, 2)),
    ],
)
def test_key_value_heads_are_filled_up_to_equal_shares(
    heads: int, kv_heads: int, tp: int, padded: tuple[int, int]
) -> None:
    model = mapped(num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16)
    model.check_parallelism(tensor_model_parallel_size=tp, pipeline_model_parallel_size=1)
    assert (model.padded_heads(tp), model.padded_kv_heads(tp)) == padded


@pytest.mark.parametrize(
    ("tp", "pp", "changes", "words"),
    [
        (2, 1, {"intermediate_size": 191}, ("tensor_model_parallel_size=2", "intermediate_size=191")),
        (1, 4, {}, ("pipeline_model_parallel_size=4", "num_hidden_layers=2")),
        (4, 1, {"num_key_value_heads": 4, "vocab_size": 6}, ("rank without any", "6 entries")),
    ],
)
def test_a_cut_that_does_not_fit_the_model_is_refused(
    tp: int, pp: int, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        mapped(**changes).check_parallelism(tensor_model_parallel_size=tp, pipeline_model_parallel_size=pp)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("tp", "ep", "changes", "words"),
    [
        (1, 2, {}, ("expert_model_parallel_size=2", "Qwen2ForCausalLM has none")),
        (1, 3, MOE, ("expert_model_parallel_size=3", "num_experts=4")),
        (2, 1, MOE, ("tensor_model_parallel_size=2", "sequence_parallel=true")),
    ],
)
def test_a_cut_that_does_not_fit_the_experts_is_refused(
    tp: int, ep: int, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(ConfigError) as error:
        mapped(**changes).check_parallelism(
            tensor_model_parallel_size=tp, pipeline_model_parallel_size=1, expert_model_parallel_size=ep
        )
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_pipeline_stage_without_experts_is_refused() -> None:
    model = mapped(**MOE, num_hidden_layers=4, mlp_only_layers=[0, 1])
    model.check_parallelism(tensor_model_parallel_size=1, pipeline_model_parallel_size=1)
    with pytest.raises(
        ConfigError, match=r"leaves stage 0 without a layer that has experts; the model's are \[2, 3\]"
    ):
        model.check_parallelism(tensor_model_parallel_size=1, pipeline_model_parallel_size=2)
    # With two chunks per stage, the stages hold layers 0 and 2, 1 and 3.
    model.check_parallelism(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2
    )


def test_a_cut_that_fits_is_accepted_and_pads_the_vocabulary() -> None:
    config = mapped()
    config.check_parallelism(tensor_model_parallel_size=2, pipeline_model_parallel_size=2)
    assert [config.padded_vocab_size(tp) for tp in (1, 2, 4)] == [61, 62, 64]


def test_reading_a_folder_imports_no_torch() -> None:
    code = "import sys, megatron_ppo.mcore.hf_preflight; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
