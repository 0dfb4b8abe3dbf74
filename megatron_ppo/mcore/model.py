"""Builds Megatron-Core GPT models, with a language-model head or a scalar value head, from an HFModelConfig.

Layers come from `mcore.layer_specs`. Parameters are left uninitialised: `mcore.weights` fills every one of them and
fails if it cannot.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: S sequence, B batch, D head dimension, H hidden.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor

from megatron_ppo.mcore import platform
from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.layer_specs import final_norm, layer_spec
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.settings import RecomputeSettings
from megatron_ppo.telemetry.accelerators import Kernels


class ValueHead(torch.nn.Linear):
    """Scalar output layer of the critic, replicated over the tensor group; weight and bias start at zero."""

    def __init__(self, config: TransformerConfig, tensor_group: torch.distributed.ProcessGroup) -> None:
        super().__init__(config.hidden_size, 1, bias=True, dtype=config.params_dtype)
        self.sequence_parallel, self.tensor_group = config.sequence_parallel, tensor_group
        torch.nn.init.zeros_(self.weight)
        torch.nn.init.zeros_(self.bias)
        for parameter in self.parameters():
            # Each rank sees its part of the sequence only: finalize_model_grads sums their gradients.
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(  # type: ignore[override]
        self, hidden_SBH: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """([S, B, 1] float32, None), in the signature of Megatron's output layers."""
        value_SB1 = super().forward(hidden_SBH).float()
        if self.sequence_parallel:
            # The loss is computed on every rank of the tensor group, so the backward pass cuts and must not
            # sum.
            value_SB1 = gather_from_sequence_parallel_region(
                value_SB1, tensor_parallel_output_grad=False, group=self.tensor_group
            )
        return value_SB1, None


def _leave_uninitialised(weight: Tensor) -> Tensor:
    return weight


def transformer_config(
    model: HFModelConfig,
    parallel: ParallelContext,
    kernels: Kernels,
    *,
    dtype: torch.dtype,
    recompute: RecomputeSettings,
    moe_aux_loss_coeff: float = 0.0,
) -> TransformerConfig:
    """Megatron's description of the model, in fields that 0.16.x and 0.19.x share. Dropout is 0."""
    return TransformerConfig(
        **_expert_settings(model, parallel, aux_loss_coeff=moe_aux_loss_coeff),
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_attention_heads=model.padded_heads(parallel.tp_size),
        num_query_groups=model.padded_kv_heads(parallel.tp_size),
        kv_channels=model.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=model.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=model.qkv_bias,
        qk_layernorm=model.qk_norm,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        tensor_model_parallel_size=parallel.tp_size,
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=parallel.virtual_size if parallel.virtual_size > 1 else None,
        # Megatron needs it to interleave with two stages: in a batch of sends and receives, messages to the next
        # and to the previous stage, which are the same rank then, would be taken for each other.
        overlap_p2p_comm=parallel.virtual_size > 1,
        batch_p2p_comm=parallel.virtual_size == 1,
        sequence_parallel=parallel.sequence_parallel,
        context_parallel_size=parallel.cp_size,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=not platform.on_cuda(),
        # On, although nothing is drawn: only then does Megatron mark the parameters that are cut over the
        # tensor group, without which the gradient norm counts rank 0's share alone.
        perform_initialization=True,
        init_method=_leave_uninitialised,
        output_layer_init_method=_leave_uninitialised,
        embedding_init_method=_leave_uninitialised,
        transformer_impl=kernels.layers,
        # Needs a kernel of NVIDIA Apex, with either kind of layers.
        gradient_accumulation_fusion=kernels.gradient_accumulation_fusion,
        # Off: compiled at the first call, or part of Transformer Engine's modules where those are used.
        persist_layer_norm=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        batch_p2p_sync=False,
        recompute_granularity=recompute.granularity,
        recompute_method=recompute.method,
        recompute_num_layers=recompute.num_layers,
        recompute_modules=list(recompute.modules) if recompute.modules else None,
        # Microbatches have their own lengths; Megatron allows that only with this MoE setting, dense models
        # included.
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
    )


def _expert_settings(
    model: HFModelConfig, parallel: ParallelContext, *, aux_loss_coeff: float
) -> dict[str, Any]:
    """The router as in transformers: softmax over all experts, the largest `k`, scaled up to 1 if `normalised`.

    Softmax over the chosen logits alone gives exactly the scaled probabilities, which is Megatron's other order.
    """
    experts = model.experts
    if experts is None:
        return {}
    return {
        "num_moe_experts": experts.num_experts,
        "moe_ffn_hidden_size": experts.ffn_hidden_size,
        "moe_router_topk": experts.experts_per_token,
        "moe_router_pre_softmax": not experts.normalised,
        "moe_router_load_balancing_type": "aux_loss" if aux_loss_coeff > 0 else "none",
        "moe_aux_loss_coeff": aux_loss_coeff,
        # Read by checkpoints: layers of two kinds cannot share one tensor per parameter name.
        "moe_layer_freq": [int(layer in experts.layers) for layer in range(model.num_layers)]
        if model.dense_layers
        else 1,
        "expert_model_parallel_size": parallel.ep_size,
        "expert_tensor_parallel_size": parallel.tp_size,
    }


def build_model(
    model: HFModelConfig,
    config: TransformerConfig,
    parallel: ParallelContext,
    kernels: Kernels,
    *,
    value_head: bool,
) -> tuple[GPTModel, ...]:
    """This rank's chunks of the model, on its device, uninitialised except for the value head (zero).

    One chunk, or `parallel.virtual_size` of them; the first embeds tokens on the first stage, the last has the head on
    the last stage.
    """
    return tuple(
        _build_chunk(model, config, parallel, kernels, chunk, value_head=value_head)
        for chunk in range(parallel.virtual_size)
    )


def _build_chunk(
    model: HFModelConfig,
    config: TransformerConfig,
    parallel: ParallelContext,
    kernels: Kernels,
    chunk: int,
    *,
    value_head: bool,
) -> GPTModel:
    groups = parallel.process_groups()
    is_last = parallel.is_last_stage and chunk == parallel.virtual_size - 1
    stage = chunk if parallel.virtual_size > 1 else None
    count = get_num_layers_to_build(config, vp_stage=stage, pp_rank=parallel.pp_rank)
    first = get_transformer_layer_offset(config, vp_stage=stage, pp_rank=parallel.pp_rank)
    gpt = GPTModel(
        config,
        TransformerBlockSubmodules(
            layer_specs=[
                layer_spec(model, kernels.layers, num_experts=_experts_in(model, layer))
                for layer in range(first, first + count)
            ],
            layer_norm=final_norm(kernels.layers),
        ),
        vocab_size=model.padded_vocab_size(parallel.tp_size),
        max_sequence_length=model.max_position_embeddings,
        pre_process=parallel.is_first_stage and chunk == 0,
        post_process=is_last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tied and not value_head,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        pg_collection=groups,
        vp_stage=stage,
    )
    for name, parameter in gpt.named_parameters():
        if ".mlp.experts." in name:
            # Megatron gives experts an optimizer of their own where they are shared out; here always, so that a
            # checkpoint has the same parts in every layout.
            parameter.allreduce = False
    gpt.rotary_pos_emb.inv_freq = rope_inverse_frequencies(model)
    if value_head and is_last:
        gpt.output_layer = ValueHead(config, parallel.tensor)
    return gpt.to(parallel.device)


def _experts_in(model: HFModelConfig, layer: int) -> int | None:
    return model.experts.num_experts if model.experts is not None and layer in model.experts.layers else None


def rope_inverse_frequencies(model: HFModelConfig) -> Tensor:
    """float32 [D / 2]; θ^(-2i / D), scaled as in Llama 3.1 where the model says so.

    Megatron's own scaling fixes the original length and the two frequency factors, hence this one.
    Source: Su et al., arXiv:2104.09864, eq. 15; Llama 3.1's `rope_type: llama3` in transformers.
    """
    exponent = torch.arange(0, model.head_dim, 2, dtype=torch.int64).float() / model.head_dim
    frequency = 1.0 / (model.rope_theta**exponent)
    scaling = model.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    long = scaling.original_max_position_embeddings / scaling.low_freq_factor
    short = scaling.original_max_position_embeddings / scaling.high_freq_factor
    # 0 at the longest unscaled wavelength, 1 at the shortest scaled one.
    blend = (scaling.original_max_position_embeddings / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    blended = (1 - blend) * frequency / scaling.factor + blend * frequency
    scaled = torch.where(wavelength > long, frequency / scaling.factor, frequency)
    return torch.where((wavelength <= long) & (wavelength >= short), blended, scaled)
