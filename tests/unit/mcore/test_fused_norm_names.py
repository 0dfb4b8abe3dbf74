"""Parameters go by the same names whether Megatron's local layers hold them or Transformer Engine's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_ppo.mcore.hf_config import HFModelConfig, map_hf_config
from megatron_ppo.mcore.hf_map import weight_pieces
from megatron_ppo.mcore.weights import named_parameters

# What Transformer Engine's spec names otherwise, as Megatron 0.16 and 0.19 build it: the norm before a dense layer is
# inside of that layer.
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
    for piece in weight_pieces(model):
        name = piece.name
        module, _, leaf = piece.parameter.rpartition(".")
        if fused and module in MOVED:
            name = name.replace(f"{module}.{leaf}", f"{MOVED[module]}.layer_norm_{leaf}")
        parameters[name] = torch.nn.Parameter(torch.zeros(1))
    chunk: Any = module_of(parameters)
    layers = chunk.decoder.layers
    chunk.decoder.layers = torch.nn.ModuleList(getattr(layers, str(i)) for i in range(model.num_layers))
    for number, layer in enumerate(chunk.decoder.layers, start=1):
        layer.layer_number = number
    return chunk


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "LlamaForCausalLM"])
def test_both_specs_name_the_same_parameters(architecture: str) -> None:
    model = map_hf_config(
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
        },
        source="config.json",
    )
    expected = {piece.name for piece in weight_pieces(model)}
    fused = chunk_of(model, fused=True)
    own_names = {name for name, _ in fused.named_parameters()}
    assert "decoder.layers.1.self_attention.linear_qkv.layer_norm_weight" in own_names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in own_names
    assert not any("input_layernorm" in name or "pre_mlp_layernorm" in name for name in own_names)
    assert {name for name, _ in named_parameters([fused])} == expected
    assert {name for name, _ in named_parameters([chunk_of(model, fused=False)])} == expected
