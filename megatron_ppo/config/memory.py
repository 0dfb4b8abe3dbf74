"""How much memory a configuration needs, per trainer rank and per engine rank: what can be counted is counted.

Parameters, gradients and optimizer state are exact numbers of elements (test: against real models). Activations are an
estimate: the tensors that a layer keeps for its backward pass, at the longest sequence. Not counted: the CUDA context
and communication buffers (about 2 GiB a GPU), fragmentation, Python processes (about 1 GiB each on a CPU).

Driven by `scripts/check_config.py`. Invariant: a function of configuration and derived numbers; nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from megatron_ppo.config.batching import token_budgets
from megatron_ppo.config.derived import Derived, ModelFacts, ParallelSizes
from megatron_ppo.config.model_sections import PolicySection, TrainedModelSection
from megatron_ppo.config.schema import RunConfig

GIB = 2**30
_BYTES = {"fp32": 4, "bf16": 2, "float32": 4, "bfloat16": 2, "float16": 2}
_FLOAT32 = 4
# Biases of q, k and v; norms of q and k.
_WITH_QKV_BIAS, _WITH_QK_NORM = ("Qwen2",), ("Qwen3",)


def in_words(size: int) -> str:
    """Bytes as GiB, below a tenth of one as MiB."""
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:.1f} MiB"


def num_parameters(model: ModelFacts, *, value_head: bool = False) -> int:
    """Parameters of a model as its folder has them: tied embeddings count once.

    Args:
        value_head: with the critic's scalar head (and its bias) instead of a language-model head.
    """
    attention, mlp, norms = _layer(model, model.num_heads, model.num_kv_heads)
    embedding = model.vocab_size * model.hidden_size
    if value_head:
        head = model.hidden_size + 1
    else:
        head = 0 if model.tie_word_embeddings else embedding
    return model.num_layers * (attention + mlp + norms) + model.hidden_size + embedding + head


def _layer(model: ModelFacts, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Parameters of attention, MLP or experts, and what is not cut, of one layer with so many heads."""
    hidden, width = model.hidden_size, model.head_dim
    qkv_rows = (heads + 2 * kv_heads) * width
    bias = qkv_rows if model.architecture.startswith(_WITH_QKV_BIAS) else 0
    qk_norms = 2 * width if model.architecture.startswith(_WITH_QK_NORM) else 0
    attention = qkv_rows * hidden + bias + heads * width * hidden
    if model.num_experts:
        # As if every layer had experts; the router is whole on every rank, like the norms.
        mlp = model.num_experts * 3 * hidden * model.moe_ffn_hidden_size
        return attention, mlp, 2 * hidden + qk_norms + model.num_experts * hidden
    return attention, 3 * hidden * model.ffn_hidden_size, 2 * hidden + qk_norms


def rank_parameters(model: ModelFacts, sizes: ParallelSizes, *, value_head: bool) -> int:
    """Parameters on the fullest rank: heads and vocabulary padded to equal shares, the larger of the outer stages."""
    tensor, pipeline = sizes.tensor, sizes.pipeline
    kv_heads = _rounded_up(model.num_kv_heads, tensor)
    attention, mlp, norms = _layer(model, model.num_heads // model.num_kv_heads * kv_heads, kv_heads)
    mlp //= sizes.expert
    layers = model.num_layers // pipeline * ((attention + mlp) // tensor + norms)
    embedding = _rounded_up(model.vocab_size, tensor) // tensor * model.hidden_size
    last = model.hidden_size
    if value_head:
        last += model.hidden_size + 1
    elif pipeline > 1 or not model.tie_word_embeddings:
        last += embedding  # with stages, the last one has a copy of tied embeddings
    return layers + (embedding + last if pipeline == 1 else max(embedding, last))


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerMemory:
    """Bytes on one trainer rank for one model.

    Attributes:
        num_parameters: elements on this rank.
        parameters: weights in the model's precision.   gradients: float32, whole (Megatron's gradient buffer).
        optimizer: this rank's share of two moments, and of main parameters for bfloat16, all float32.
        activations: kept for the backward pass of the microbatches in flight.
        logits: of one microbatch, or one chunk of it, with their gradient and a float32 copy; 0 for the critic.
        reference: frozen copy of the initial weights.
    """

    num_parameters: int
    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    reference: int = 0

    @property
    def total(self) -> int:
        """Bytes while the model is trained, without the reference."""
        return self.parameters + self.gradients + self.optimizer + self.working

    @property
    def working(self) -> int:
        """Bytes that exist during an update only."""
        return self.activations + self.logits

    def __str__(self) -> str:
        parts = {
            "parameters": self.parameters,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "logits": self.logits,
        }
        listed = " + ".join(f"{name} {in_words(value)}" for name, value in parts.items() if value)
        return f"{in_words(self.total)} = {listed} ({self.num_parameters / 1e6:.1f}M parameters)"


def trainer_memory(
    model: ModelFacts,
    sizes: ParallelSizes,
    section: TrainedModelSection,
    *,
    sequence_tokens: int,
    value_head: bool,
    reference: bool = False,
) -> TrainerMemory:
    """What one rank needs for one model. Args: sequence_tokens: prompt and response of the longest sequence."""
    parameters = rank_parameters(model, sizes, value_head=value_head)
    width = _BYTES[section.precision]
    state = (2 if section.precision == "fp32" else 3) * _FLOAT32
    budgets, _ = token_budgets(section, sizes, key="", max_model_len=sequence_tokens)
    positions = section.train_micro_batch_size * sequence_tokens if budgets is None else budgets.train
    tokens = -(-positions // sizes.context)
    logits = 0
    if not value_head:
        columns = _rounded_up(model.vocab_size, sizes.tensor) // sizes.tensor
        at_a_time = section.logprob_chunk_size if isinstance(section, PolicySection) else None
        logits = min(tokens, at_a_time or tokens) * columns * (2 * width + _FLOAT32)
    return TrainerMemory(
        num_parameters=parameters,
        parameters=parameters * width,
        gradients=parameters * _FLOAT32,
        optimizer=-(-parameters * state // (sizes.data * sizes.context)),
        activations=int(tokens * width * _kept_per_token(model, sizes, section)),
        logits=logits,
        reference=parameters * width if reference else 0,
    )


def _kept_per_token(model: ModelFacts, sizes: ParallelSizes, section: TrainedModelSection) -> float:
    """Elements that a rank keeps per token, over its layers and the microbatches in flight.

    Counted tensor by tensor as in Korthikanti et al., arXiv:2205.05198, for a gated MLP, grouped key/value heads and
    fused attention (no matrix of scores). The first stage has as many microbatches in flight as there are stages;
    chunks add a part of one.
    """
    virtual = section.parallelism.virtual_pipeline_model_parallel_size or 1
    in_flight = sizes.pipeline + (sizes.pipeline - 1) / virtual * (virtual > 1)
    layers = model.num_layers / sizes.pipeline
    whole, inner = _kept_in_a_layer(model, sizes, section)
    recompute = section.recompute
    if recompute.granularity != "full":
        return in_flight * layers * (whole + inner)
    unit = recompute.num_layers or 1
    layer_input = model.hidden_size * _replicated_share(sizes, section)
    if recompute.method == "block":
        again = min(unit, layers)
        kept = again * layer_input + (layers - again) * (whole + inner)
        return in_flight * kept + whole + inner
    return in_flight * layers / unit * layer_input + unit * (whole + inner)


def _kept_in_a_layer(
    model: ModelFacts, sizes: ParallelSizes, section: TrainedModelSection
) -> tuple[float, float]:
    """Elements per token: of tensors of the model's width, and of those that are cut over the tensor ranks."""
    again = section.recompute.modules if section.recompute.granularity == "selective" else []
    norms_out = 0 if "layernorm" in again else 2
    whole = (2 + norms_out) * model.hidden_size * _replicated_share(sizes, section)
    kv_heads = _rounded_up(model.num_kv_heads, sizes.tensor)
    heads = model.num_heads // model.num_kv_heads * kv_heads
    # q, k and v before the rotation, q and k after it, the output of attention.
    attention = ((heads + 2 * kv_heads) + (heads + kv_heads) + heads) * model.head_dim
    mlp = 0 if "mlp" in again else 4 * model.ffn_hidden_size
    return whole, (attention + mlp) / sizes.tensor


def _replicated_share(sizes: ParallelSizes, section: TrainedModelSection) -> float:
    return 1 / sizes.tensor if section.parallelism.sequence_parallel else 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Bytes on one rank of an engine.

    Attributes:
        weights: in the engine's format.
        kv_cache: as configured; None leaves it to the engine.
        kv_for_all: what `max_num_seqs` sequences of `max_model_len` tokens would fill.
    """

    weights: int
    kv_cache: int | None
    kv_for_all: int

    def __str__(self) -> str:
        cache = "what is left" if self.kv_cache is None else in_words(self.kv_cache)
        return (
            f"weights {in_words(self.weights)} + KV cache {cache} (every request at its longest: "
            f"{in_words(self.kv_for_all)})"
        )


def engine_memory(config: RunConfig, derived: Derived) -> EngineMemory:
    """What one rank of an engine needs. A KV head that ranks cannot share is on several of them."""
    model, inference = derived.policy_model, config.inference
    tensor, width = inference.tensor_parallel_size, _BYTES[inference.dtype]
    kv_heads = max(1, -(-model.num_kv_heads // tensor))
    kv_width = 1 if inference.kv_cache_dtype.startswith("fp8") else width
    per_token = 2 * kv_heads * model.head_dim * model.num_layers * kv_width
    return EngineMemory(
        weights=-(-num_parameters(model) * width // tensor),
        kv_cache=inference.kv_cache_memory_bytes,
        kv_for_all=per_token * inference.max_num_seqs * derived.max_model_len,
    )


def memory_rows(config: RunConfig, derived: Derived) -> Iterator[tuple[str, str]]:
    """Name and text of each estimate, for a table."""
    longest = config.data.max_prompt_tokens + config.inference.max_new_tokens
    policy = trainer_memory(
        derived.policy_model,
        derived.policy,
        config.policy,
        sequence_tokens=longest,
        value_head=False,
        reference=derived.needs_reference,
    )
    critic = trainer_memory(
        derived.critic_model, derived.critic, config.critic, sequence_tokens=longest, value_head=True
    )
    yield "policy, per trainer rank", str(policy)
    yield "critic, per trainer rank", str(critic)
    if policy.reference:
        yield "reference, per trainer rank", in_words(policy.reference)
    largest = max(policy.total, critic.total, policy.reference)
    # Only one of them is trained at a time.
    together = policy.total + critic.total + policy.reference - min(policy.working, critic.working)
    yield (
        "trainer rank",
        f"{in_words(largest)} on its device where the models take turns, {in_words(together)} where not",
    )
    yield "refit, trainer rank 0", in_words(_refit_bytes(config, derived))
    yield "engine rank", str(engine_memory(config, derived))


def _refit_bytes(config: RunConfig, derived: Derived) -> int:
    """Two buckets (one is filled while the other travels) and the largest tensor, gathered in full."""
    model = derived.policy_model
    largest = max(model.vocab_size, model.ffn_hidden_size) * model.hidden_size
    return 2 * config.refit.bucket_bytes + largest * _BYTES[config.policy.precision]
