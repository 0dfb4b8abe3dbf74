"""Reads a Hugging Face model folder's config.json into the few facts that Megatron-Core needs.

Pure standard library, so a model that cannot be mapped is refused before torch is imported.
Invariant: a config that this module accepts is mapped completely; a feature that would change the numbers
and is not mapped (sliding windows, other RoPE scalings, biases in places without one) is an error that names
the key.

Families differ in three facts (biases of q, k and v; norms of q and k; experts), so a family is one row of
`_FAMILIES`; docs/models.md says what else a new one needs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Family:
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: bool = False
    # What a missing head_dim means; None is hidden_size / num_attention_heads.
    default_head_dim: int | None = None


_FAMILIES = {
    "Llama": _Family(),
    "Qwen2": _Family(qkv_bias=True),
    "Qwen3": _Family(qk_norm=True, default_head_dim=128),
    "Qwen3Moe": _Family(qk_norm=True, experts=True),
}
SUPPORTED_ARCHITECTURES = tuple(f"{name}ForCausalLM" for name in _FAMILIES)
# Reward and value models: the same backbones, whose head `score` has one output. For the critic only.
VALUE_HEAD_SUFFIXES = ("ForTokenClassification", "ForSequenceClassification")


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3RopeScaling:
    """Frequency scaling of Llama 3.1: long wavelengths are divided by `factor`, short ones kept, blended
    between.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsConfig:
    """The mixture-of-experts layers of a model.

    Attributes:
        experts_per_token: how many of `num_experts` a token is sent to.
        ffn_hidden_size: width of one expert.
        normalised: the chosen experts' router probabilities are scaled up to a sum of 1.
        layers: which layers have experts; the others have a dense MLP.
    """

    num_experts: int
    experts_per_token: int
    ffn_hidden_size: int
    normalised: bool
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class HFModelConfig:
    """What a decoder-only model is made of, in the names of Hugging Face's config.json.

    Attributes:
        architecture: of the language model, also where the folder holds a reward or value model of that family.
        ffn_hidden_size: of dense layers.   experts: None for a dense model.
        has_value_head: whether the folder holds a trained scalar head (`score`) instead of a language-model head.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    rope_theta: float
    rope_scaling: Llama3RopeScaling | None
    experts: ExpertsConfig | None = None
    # Of the folder, not of the model: a critic is the same model wherever its first weights came from.
    has_value_head: bool = field(default=False, compare=False, repr=False)

    def padded_vocab_size(self, tensor_model_parallel_size: int) -> int:
        """Rows of the trainer's embedding: the vocabulary, rounded up so that TP ranks have equal shares."""
        return -(-self.vocab_size // tensor_model_parallel_size) * tensor_model_parallel_size

    def padded_kv_heads(self, tensor_model_parallel_size: int) -> int:
        """Key/value heads of the trainer's attention: rounded up so that TP ranks have equal shares.

        A further key/value head comes with as many query heads as the others. All of its weights are zero, and stay
        zero: it returns 0 whatever the scores are, since its values are 0, so the output projection's columns for it
        have no gradient; these columns are 0, so nothing before them has one either.
        """
        return -(-self.num_kv_heads // tensor_model_parallel_size) * tensor_model_parallel_size

    def padded_heads(self, tensor_model_parallel_size: int) -> int:
        """Query heads that go with `padded_kv_heads`."""
        return self.num_heads // self.num_kv_heads * self.padded_kv_heads(tensor_model_parallel_size)

    @property
    def dense_layers(self) -> bool:
        """Whether any layer has a dense MLP."""
        return self.experts is None or len(self.experts.layers) < self.num_layers

    def check_parallelism(
        self,
        *,
        tensor_model_parallel_size: int,
        pipeline_model_parallel_size: int,
        virtual_pipeline_model_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
    ) -> None:
        """Raises: ConfigError if the model cannot be cut this way."""
        tp, pp = tensor_model_parallel_size, pipeline_model_parallel_size
        virtual = virtual_pipeline_model_parallel_size
        self._check_experts(tp, expert_model_parallel_size, sequence_parallel)
        self._check_stages_have_experts(pp, virtual)
        for name, value in (
            ("intermediate_size", self.ffn_hidden_size if self.dense_layers else 0),
            ("moe_intermediate_size", 0 if self.experts is None else self.experts.ffn_hidden_size),
        ):
            if value % tp:
                raise ConfigError(
                    f"parallelism.tensor_model_parallel_size={tp} does not divide the model's {name}={value}"
                )
        if self.num_layers % pp:
            raise ConfigError(
                f"parallelism.pipeline_model_parallel_size={pp} does not divide the model's "
                f"num_hidden_layers={self.num_layers}"
            )
        if self.num_layers % (pp * virtual):
            raise ConfigError(
                f"parallelism: pipeline_model_parallel_size={pp} x "
                f"virtual_pipeline_model_parallel_size={virtual} does not divide the model's "
                f"num_hidden_layers={self.num_layers}"
            )
        if self.vocab_size <= (tp - 1) * (self.padded_vocab_size(tp) // tp):
            raise ConfigError(
                f"parallelism.tensor_model_parallel_size={tp} would leave a rank without any of the "
                f"vocabulary's {self.vocab_size} entries"
            )

    def _check_stages_have_experts(self, pp: int, virtual: int) -> None:
        if self.experts is None or self.num_layers % (pp * virtual):
            return
        of_chunk = self.num_layers // (pp * virtual)
        without = set(range(pp)) - {layer // of_chunk % pp for layer in self.experts.layers}
        if without:
            # Its optimizer would have other parts than those of the other stages, and no checkpoint could be loaded.
            raise ConfigError(
                f"parallelism.pipeline_model_parallel_size={pp} leaves stage {min(without)} without a layer that has "
                f"experts; the model's are {list(self.experts.layers)}"
            )

    def _check_experts(self, tp: int, ep: int, sequence_parallel: bool) -> None:
        if self.experts is None:
            if ep > 1:
                raise ConfigError(
                    f"parallelism.expert_model_parallel_size={ep} needs a model with experts; "
                    f"{self.architecture} has none"
                )
            return
        if self.experts.num_experts % ep:
            raise ConfigError(
                f"parallelism.expert_model_parallel_size={ep} does not divide the model's "
                f"num_experts={self.experts.num_experts}"
            )
        if tp > 1 and not sequence_parallel:
            # Megatron's dispatchers take every tensor rank's tokens as different ones.
            raise ConfigError(
                f"parallelism.tensor_model_parallel_size={tp} with experts needs "
                "parallelism.sequence_parallel=true"
            )


def read_hf_config(folder: str | Path) -> HFModelConfig:
    """Map `folder`/config.json.

    Raises: ConfigError if the file is missing, is not JSON, or describes a model that is not supported.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model folder {Path(folder)} has no config.json")
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    return map_hf_config(raw, source=str(path))


def map_hf_config(raw: Mapping[str, object], *, source: str) -> HFModelConfig:
    """Map the content of a config.json; `source` names it in messages. Raises: ConfigError."""
    architectures = raw.get("architectures")
    named = architectures[0] if isinstance(architectures, list) and architectures else None
    architecture = _language_model(named)
    if architecture not in SUPPORTED_ARCHITECTURES:
        raise ConfigError(
            f"{source}: architecture {named!r} is not supported; "
            f"supported: {', '.join(SUPPORTED_ARCHITECTURES)}, and for the critic the same with "
            f"{' or '.join(VALUE_HEAD_SUFFIXES)}"
        )
    if architecture != named:
        _check_value_head(raw, source)
    family = _FAMILIES[architecture.removesuffix("ForCausalLM")]
    _refuse_unmapped(raw, source)
    hidden, heads = _integer(raw, "hidden_size", source), _integer(raw, "num_attention_heads", source)
    kv_heads = _integer(raw, "num_key_value_heads", source, default=heads)
    if heads % kv_heads:
        raise ConfigError(
            f"{source}: num_attention_heads={heads} is no multiple of num_key_value_heads={kv_heads}"
        )
    if raw.get("head_dim") is None and family.default_head_dim is None and hidden % heads:
        raise ConfigError(
            f"{source}: hidden_size={hidden} is no multiple of num_attention_heads={heads} and head_dim is missing"
        )
    head_dim = _integer(raw, "head_dim", source, default=family.default_head_dim or hidden // heads)
    if head_dim % 2:
        raise ConfigError(f"{source}: head_dim={head_dim} must be even for rotary position embeddings")
    layers = _integer(raw, "num_hidden_layers", source)
    rope = _rope_parameters(raw, source)
    return HFModelConfig(
        architecture=architecture,
        vocab_size=_integer(raw, "vocab_size", source),
        hidden_size=hidden,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        ffn_hidden_size=_integer(raw, "intermediate_size", source),
        rms_norm_eps=_number(raw, "rms_norm_eps", source, default=1e-6),
        max_position_embeddings=_integer(raw, "max_position_embeddings", source),
        tied=bool(raw.get("tie_word_embeddings", False)),
        qkv_bias=family.qkv_bias,
        qk_norm=family.qk_norm,
        rope_theta=_number(rope, "rope_theta", source, default=10000.0),
        rope_scaling=_rope_scaling(rope, source),
        experts=_experts(raw, source, layers) if family.experts else None,
        has_value_head=architecture != named,
    )


def _experts(raw: Mapping[str, object], source: str, layers: int) -> ExpertsConfig:
    # transformers 5 writes num_local_experts, before it was num_experts.
    key = "num_experts" if "num_experts" in raw else "num_local_experts"
    experts = _integer(raw, key, source)
    chosen = _integer(raw, "num_experts_per_tok", source)
    if chosen > experts:
        raise ConfigError(f"{source}: num_experts_per_tok={chosen} is more than {key}={experts}")
    step = _integer(raw, "decoder_sparse_step", source, default=1)
    dense = raw.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
        raise ConfigError(f"{source}: mlp_only_layers must be a list of layer numbers, got {dense!r}")
    sparse = tuple(layer for layer in range(layers) if layer not in dense and (layer + 1) % step == 0)
    if not sparse:
        raise ConfigError(
            f"{source}: decoder_sparse_step={step} and mlp_only_layers={dense} leave no layer with experts"
        )
    normalised = bool(raw.get("norm_topk_prob", False))
    if normalised and chosen == 1:
        raise ConfigError(
            f"{source}: norm_topk_prob=true with num_experts_per_tok=1 makes every router probability 1, "
            "so the router cannot be trained; supported: num_experts_per_tok > 1, or norm_topk_prob=false"
        )
    return ExpertsConfig(
        num_experts=experts,
        experts_per_token=chosen,
        ffn_hidden_size=_integer(raw, "moe_intermediate_size", source),
        normalised=normalised,
        layers=sparse,
    )


def _language_model(architecture: object) -> object:
    """The family's language model: `Qwen2ForTokenClassification` is a `Qwen2ForCausalLM` with another head."""
    for suffix in VALUE_HEAD_SUFFIXES:
        if isinstance(architecture, str) and architecture.endswith(suffix):
            return architecture.removesuffix(suffix) + "ForCausalLM"
    return architecture


def _check_value_head(raw: Mapping[str, object], source: str) -> None:
    # transformers writes the labels' names instead of their number, and neither for its default of two.
    labels = raw.get("id2label")
    number = len(labels) if isinstance(labels, dict) else raw.get("num_labels", 2)
    if number != 1:
        raise ConfigError(f"{source}: num_labels is {number}; a value head has exactly 1 output")


def _refuse_unmapped(raw: Mapping[str, object], source: str) -> None:
    allowed: dict[str, tuple[object, ...]] = {
        "hidden_act": ("silu", None),
        "attention_bias": (False, None),
        "mlp_bias": (False, None),
        "use_sliding_window": (False, None),
        "partial_rotary_factor": (1.0, None),
    }
    for key, values in allowed.items():
        if raw.get(key) not in values:
            raise ConfigError(f"{source}: {key}={raw[key]!r} is not supported; supported: {values[0]!r}")


def _rope_parameters(raw: Mapping[str, object], source: str) -> dict[str, object]:
    # transformers 5 keeps everything in `rope_parameters`; before, theta stood alone next to `rope_scaling`.
    rope: dict[str, object] = {}
    if "rope_theta" in raw:
        rope["rope_theta"] = raw["rope_theta"]
    for key in ("rope_scaling", "rope_parameters"):
        nested = raw.get(key)
        if nested is None:
            continue
        if not isinstance(nested, dict):
            raise ConfigError(f"{source}: {key} must be a mapping, got {nested!r}")
        rope.update(nested)
    return rope


def _rope_scaling(rope: Mapping[str, object], source: str) -> Llama3RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise ConfigError(f"{source}: rope type {kind!r} is not supported; supported: default, llama3")
    return Llama3RopeScaling(
        factor=_number(rope, "factor", source),
        low_freq_factor=_number(rope, "low_freq_factor", source),
        high_freq_factor=_number(rope, "high_freq_factor", source),
        original_max_position_embeddings=_integer(rope, "original_max_position_embeddings", source),
    )


def _number(raw: Mapping[str, object], key: str, source: str, *, default: float | None = None) -> float:
    value = raw.get(key)
    if value is None:
        if default is None:
            raise ConfigError(f"{source}: {key} is missing")
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ConfigError(f"{source}: {key} must be a positive number, got {value!r}")
    return float(value)


def _integer(raw: Mapping[str, object], key: str, source: str, *, default: int | None = None) -> int:
    value = _number(raw, key, source, default=None if default is None else float(default))
    if value != int(value):
        raise ConfigError(f"{source}: {key} must be a whole number, got {value!r}")
    return int(value)
