"""Parameters go by the same names whether Megatron's local layers hold them or Transformer Engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ppo.mcore.hf_config import HFModelConfig, map_hf_config
from megatron_ppo.mcore.hf_map import weight_pieces
from megatron_ppo.mcore.weights import named_parameters

# What Transformer Engine's spec names otherwise, as Megatron 0.16 and 0.19 build it: the norm before a dense layer is
# inside of that layer. The norm before experts stays where it is: the router needs its output too.
MOVED = {
    "input_layernorm": "self_attention.linear_qkv",
    "pre_mlp_layernorm": "mlp.linear_fc1",
}


def module_of(parts: dict[str, torch.nn.Parameter]) -> torch.nn.Module:
    """Nested modules whose parameters have the given dotted names."""
    root = torch.nn.Module()
    for name, parameter in parts.items():
        *path, leaf = name.split(".")
        module = root
        for step in path:
            if not hasattr(module, step):
                module.add_module(step, torch.nn.Module())
            module = getattr(module, step)
        module.register_parameter(leaf, parameter)
    return root


def chunk_of(model: HFModelConfig, *, fused: bool) -> Any:
    """A model chunk with every parameter of `model`, named as by the local spec or by Transformer Engine's."""
    parameters: dict[str, torch.nn.Parameter] = {}
    with_experts = () if model.experts is None else model.experts.layers
    for piece in weight_pieces(model):
        name = piece.name
        module, _, leaf = piece.parameter.rpartition(".")
        before_experts = module == "pre_mlp_layernorm" and piece.layer in with_experts
        if fused and module in MOVED and not before_experts:
            name = name.replace(f"{module}.{leaf}", f"{MOVED[module]}.layer_norm_{leaf}")
        parameters[name] = torch.nn.Parameter(torch.zeros(1))
    chunk: Any = module_of(parameters)
    layers = chunk.decoder.layers
    chunk.decoder.layers = torch.nn.ModuleList(getattr(layers, str(i)) for i in range(model.num_layers))
    for number, layer in enumerate(chunk.decoder.layers, start=1):
        layer.layer_number = number
        if number - 1 in with_experts:
            layer.mlp.local_expert_indices = list(range(model.experts.num_experts))
    return chunk


def mapped(architecture: str, **changes: Any) -> HFModelConfig:
    return map_hf_config(
        {
            "architectures": [architecture],
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "intermediate_size": 128,
            "vocab_size": 64,
            "max_position_embeddings": 64,
            "rms_norm_eps": 1e-6,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
            **changes,
        },
        source="config.json",
    )


def assert_same_names(model: HFModelConfig) -> set[str]:
    """Returns: what Transformer Engine's spec calls the parameters."""
    expected = {piece.name for piece in weight_pieces(model)}
    fused = chunk_of(model, fused=True)
    assert {name for name, _ in named_parameters([fused])} == expected
    assert {name for name, _ in named_parameters([chunk_of(model, fused=False)])} == expected
    return {name for name, _ in fused.named_parameters()}


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_both_specs_name_the_same_parameters(architecture: str) -> None:
    own_names = assert_same_names(mapped(architecture))
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in own_names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in own_names
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in own_names)


def test_both_specs_name_the_parameters_of_layers_with_and_without_experts_the_same() -> None:
    mixture = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "mlp_only_layers": [0],
    }
    own_names = assert_same_names(mapped("Qwen3MoeForCausalLM", **mixture))
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in own_names
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in own_names
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in own_names
    assert "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight" in own_names
    assert not any("experts" in name and "layer_norm" in name for name in own_names)
