"""Sections of the trained models: initial weights, layout on the ranks, optimizer, learning-rate schedule."""

from __future__ import annotations

from typing import Any, Literal

from megatron_ppo.config.base import BuiltSection, Section, setting, target_field
from megatron_ppo.config.recipe_sections import Recipe


class ModelShapeSection(Section):
    """Sizes of a model, in the names of the config check's own table."""

    architecture: str = setting(doc="As in the folder's config.json, e.g. Qwen2ForCausalLM.", min_length=1)
    num_layers: int = setting(doc="Transformer layers.", unit="layers", ge=1)
    hidden_size: int = setting(doc="Width.", unit="channels", ge=1)
    num_heads: int = setting(doc="Attention heads.", unit="heads", ge=1)
    num_kv_heads: int = setting(doc="Key-value heads.", unit="heads", ge=1)
    head_dim: int = setting(doc="Width of a head.", unit="channels", ge=1)
    ffn_hidden_size: int = setting(doc="Width of the MLP.", unit="channels", ge=1)
    vocab_size: int = setting(doc="Rows of the embedding.", unit="tokens", ge=1)
    context_length: int = setting(doc="Longest sequence.", unit="tokens", ge=1)
    tie_word_embeddings: bool = setting(doc="Embedding and output layer share their weights.")
    num_experts: int = setting(0, "Experts of a layer; 0 is a dense model.", unit="experts", ge=0)
    moe_ffn_hidden_size: int = setting(0, "Width of an expert; 0 is a dense model.", unit="channels", ge=0)
    has_dense_layers: bool = setting(
        True, "Whether any layer has a dense MLP; in a mixture of experts all layers may have experts."
    )


class ModelSource(Section):
    """Exactly one of `path` and `recipe`; for the critic, neither means the policy's."""

    path: str | None = setting(
        None,
        "Folder with config.json, safetensors weights and tokenizer files; for the critic also a reward or value "
        "model (ForTokenClassification or ForSequenceClassification with one label), whose head is taken over.",
    )
    recipe: Recipe | None = setting(
        None, "How to prepare such a folder; it is cached under a key of the recipe."
    )
    expected: ModelShapeSection | None = setting(
        None,
        "Sizes that the folder must have. With them a configuration can be checked where the folder is not.",
    )


class ParallelismSection(Section):
    """Layout over the trainer ranks: world size = tensor * pipeline * context * data."""

    tensor_model_parallel_size: int | None = setting(
        None,
        "Ranks that share each layer. null is the largest size that divides ranks, heads and KV heads; a size that "
        "does not divide the KV heads fills them up with zeros.",
        unit="ranks",
        ge=1,
    )
    pipeline_model_parallel_size: int = setting(1, "Stages that the layers are cut into.", unit="ranks", ge=1)
    virtual_pipeline_model_parallel_size: int | None = setting(
        None,
        "Model chunks per pipeline stage (interleaved schedule); pipeline * chunks must divide the layers. null is 1.",
        unit="chunks",
        ge=1,
    )
    context_parallel_size: int = setting(
        1,
        "Ranks that share each sequence, for long ones. Lengths are padded to a multiple of 2 * this (* tensor size "
        "under sequence_parallel).",
        unit="ranks",
        ge=1,
    )
    expert_model_parallel_size: int = setting(
        1,
        "Ranks that the experts of a mixture are shared out over; divides data * context and the number of experts.",
        unit="ranks",
        ge=1,
    )
    sequence_parallel: bool = setting(
        False, "Split activations over the tensor ranks; needs tensor size > 1."
    )
    data_parallel_size: int | None = setting(
        None, "Replicas of the model. null is world size / (tensor * pipeline * context).", unit="ranks", ge=1
    )


class OptimizerSection(Section):
    """AdamW in Megatron's distributed optimizer."""

    lr: float = setting(1e-6, "Peak learning rate.", gt=0.0)
    min_lr: float = setting(0.0, "Learning rate that a decaying schedule ends at.", ge=0.0)
    adam_beta1: float = setting(0.9, "Decay of the first moment.", ge=0.0, lt=1.0)
    adam_beta2: float = setting(0.95, "Decay of the second moment.", ge=0.0, lt=1.0)
    adam_eps: float = setting(1e-8, "Added to the root of the second moment.", gt=0.0)
    weight_decay: float = setting(0.0, "Decoupled weight decay.", ge=0.0)
    clip_grad: float = setting(1.0, "Largest global gradient norm. 0 is no clipping.", ge=0.0)


class SchedulerSection(Section):
    """Learning-rate schedule. It ticks once per epoch of a step in which the model is trained."""

    lr_decay_style: Literal["constant", "linear", "cosine", "inverse-square-root"] = setting(
        "constant", "Shape after warm-up."
    )
    lr_warmup_steps: int = setting(0, "Ticks of linear warm-up from 0.", unit="ticks", ge=0)
    lr_decay_steps: int | None = setting(
        None,
        "Ticks until min_lr. null is every tick of the run in which the model is trained.",
        unit="ticks",
        ge=1,
    )


class RecomputeSection(Section):
    """Activations that the backward pass computes again instead of keeping them. Changes no result."""

    granularity: Literal["full", "selective"] | None = setting(
        None, "null keeps all, full keeps the inputs of layers, selective recomputes `modules`."
    )
    method: Literal["uniform", "block"] | None = setting(
        None,
        "Of full: uniform keeps the input of every unit of num_layers layers; block recomputes the first num_layers "
        "layers of each pipeline chunk.",
    )
    num_layers: int | None = setting(None, "Of full: see method.", unit="layers", ge=1)
    modules: list[Literal["core_attn", "layernorm", "mlp", "moe"]] = setting(
        doc="Of selective: what is recomputed.", default_factory=list
    )

    def kwargs(self) -> dict[str, Any]:
        """Fields of `RecomputeSettings`."""
        return {**self.model_dump(), "modules": tuple(self.modules)}


class TokenBudgetSection(Section):
    """What both ways to cut microbatches by tokens have in common."""

    enabled: bool = setting(False, "Whether microbatches are cut this way. Does not change the gradient.")
    train_mb_tokens: int | None = setting(
        None,
        "Positions of a microbatch in training, padding included. null is max_model_len * train_micro_batch_size.",
        unit="tokens",
        ge=1,
    )
    logprob_mb_tokens: int | None = setting(
        None,
        "The same in forward-only passes. null is max_model_len * logprob_batch_size.",
        unit="tokens",
        ge=1,
    )


class DynamicBatchingSection(TokenBudgetSection):
    """Microbatches of as many sequences as a token budget holds, padded to the longest of them.

    Shares of data-parallel ranks are balanced. Replaces `train_micro_batch_size` and `logprob_batch_size`.
    """

    sequence_length_round: int = setting(
        64, "Padded lengths are multiples of it, so that few shapes occur.", unit="tokens", ge=1
    )


class SequencePackingSection(TokenBudgetSection):
    """Microbatches of sequences laid end to end, without padding but for what the layout needs to cut them.

    Shares of data-parallel ranks are balanced. Replaces `train_micro_batch_size` and `logprob_batch_size`.
    """


class TrainedModelSection(BuiltSection):
    """What policy and critic have in common."""

    model: ModelSource = setting(doc="Initial weights.", default_factory=ModelSource)
    parallelism: ParallelismSection = setting(
        doc="Layout over the ranks.", default_factory=ParallelismSection
    )
    optimizer: OptimizerSection = setting(doc="AdamW.", default_factory=OptimizerSection)
    scheduler: SchedulerSection = setting(doc="Learning-rate schedule.", default_factory=SchedulerSection)
    moe_aux_loss_coeff: float = setting(
        0.0,
        "Weight of the load-balancing loss of a mixture of experts. 0 is off, also where config.json has a "
        "router_aux_loss_coef: that one is for pre-training.",
        ge=0.0,
    )
    precision: Literal["fp32", "bf16"] = setting("fp32", "Number format of weights and activations.")
    transformer_impl: Literal["auto", "local", "transformer_engine"] = setting(
        "auto",
        "Whose layers. auto is Transformer Engine's where it can be used, otherwise Megatron's local ones; "
        "transformer_engine is refused where it cannot.",
    )
    train_micro_batch_size: int = setting(
        8,
        "Sequences per forward-backward pass and rank. Does not change the gradient.",
        unit="sequences",
        ge=1,
    )
    logprob_batch_size: int = setting(32, "Sequences per forward-only pass and rank.", unit="sequences", ge=1)
    overlap_grad_reduce: bool = setting(
        False, "Reduce gradients over the data-parallel ranks while the backward pass goes on."
    )
    overlap_param_gather: bool = setting(
        False,
        "Gather updated parameters in the next forward pass instead of at the end of the optimizer step; needs "
        "overlap_grad_reduce.",
    )
    ddp_bucket_size: int | None = setting(
        None,
        "Parameters per overlapped bucket. null is Megatron's choice, at least 40 million; needs overlap_grad_reduce.",
        unit="parameters",
        ge=1,
    )
    recompute: RecomputeSection = setting(
        doc="Activations computed twice to save memory.", default_factory=RecomputeSection
    )
    dynamic_batching: DynamicBatchingSection = setting(
        doc="Padded microbatches by a token budget.", default_factory=DynamicBatchingSection
    )
    sequence_packing: SequencePackingSection = setting(
        doc="Packed microbatches by a token budget.", default_factory=SequencePackingSection
    )


class PolicySection(TrainedModelSection):
    """The trained policy."""

    target: Literal["megatron_ppo.mcore.policy.MegatronPolicy"] = target_field(
        "megatron_ppo.mcore.policy.MegatronPolicy"
    )
    logprob_chunk_size: int | None = setting(
        None,
        "Positions whose logits exist at a time, in training and scoring. null is a whole microbatch. Bounds "
        "memory; training then computes the output layer twice.",
        unit="tokens",
        ge=1,
    )


class CriticSection(TrainedModelSection):
    """The value model: a backbone of its own with a scalar head, which starts at zero unless its folder has one."""

    target: Literal["megatron_ppo.mcore.critic.MegatronCritic"] = target_field(
        "megatron_ppo.mcore.critic.MegatronCritic"
    )
    warm_start: str | None = setting(
        None,
        "Run folder or checkpoint folder of another run, saved in any layout, whose critic's weights this one starts "
        "from; optimizer and schedule start anew. null starts from `model`.",
        min_length=1,
    )
