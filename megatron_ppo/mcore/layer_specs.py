"""What a layer is made of: Transformer Engine's modules, or Megatron's local ones with two parts of our own.

Our own are an RMSNorm that knows sequence parallelism (Megatron's local one refuses it) and the core attention of
`mcore.attention`. Which of the two specs is used is decided by `telemetry.accelerators`. Transformer Engine has only
been read, not run: it needs a GPU.

Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import TransformerConfig

from megatron_ppo.mcore.attention import SDPACoreAttention
from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.telemetry.accelerators import Layers


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm whose gradient is summed over the tensor group when the sequence is cut over it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        # Read by megatron.core's finalize_model_grads.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def layer_spec(model: HFModelConfig, layers: Layers, *, num_experts: int | None) -> Any:
    """Megatron's specification of one layer, dense or with experts that run one after another."""
    if layers == "transformer_engine":
        # The norms before attention and a dense MLP are inside the linear layers that follow them, which is where
        # `weights.named_parameters` looks for their weights. The arguments are those of 0.16.x and 0.19.x alike.
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=num_experts, moe_grouped_gemm=False, qk_layernorm=model.qk_norm
        )
    spec = get_gpt_layer_local_spec(
        num_experts=num_experts,
        # Grouped kernels need CUDA packages.
        moe_grouped_gemm=False,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
    )
    parts = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = RMSNorm
    attention = parts.self_attention.submodules
    attention.core_attention = SDPACoreAttention
    if model.qk_norm:
        attention.q_layernorm = attention.k_layernorm = RMSNorm
    return spec


def final_norm(layers: Layers) -> Any:
    """The norm after the last layer."""
    if layers == "transformer_engine":
        # Only importable where Transformer Engine is.
        return import_module("megatron.core.extensions.transformer_engine").TENorm
    return RMSNorm
