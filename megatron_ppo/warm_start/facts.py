"""Shape of a model, from its recipe or its folder, without torch: what the config check needs."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.recipe import Recipe, WarmStartRecipe


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Attributes: names as in the recipe; `context_length` in tokens. 0 experts is a dense model."""

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_hidden_size: int
    vocab_size: int
    context_length: int
    tie_word_embeddings: bool
    num_experts: int = 0
    moe_ffn_hidden_size: int = 0
    has_dense_layers: bool = True


SMOLLM2_135M = ModelFacts(
    architecture="LlamaForCausalLM",
    hidden_size=576,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn_hidden_size=1536,
    vocab_size=49152,
    context_length=8192,
    tie_word_embeddings=True,
)


def model_facts(model: Recipe | str | Path) -> ModelFacts:
    """Facts of a recipe, or of a folder with a config.json.

    Raises: ConfigError if the folder or a needed key is missing.
    """
    if isinstance(model, WarmStartRecipe):
        return ModelFacts(
            architecture="Qwen2ForCausalLM",
            hidden_size=model.hidden_size,
            num_layers=model.num_layers,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            ffn_hidden_size=model.ffn_hidden_size,
            vocab_size=model.vocab_size,
            context_length=model.max_position_embeddings,
            tie_word_embeddings=model.tie_word_embeddings,
        )
    if isinstance(model, str | Path):
        return _folder_facts(Path(model))
    return SMOLLM2_135M


def _has_dense_layers(config: dict[str, Any]) -> bool:
    """Of a mixture; as `mcore.hf_config` reads it."""
    layers = range(int(config["num_hidden_layers"]))
    step = int(config.get("decoder_sparse_step") or 1)
    listed = config.get("mlp_only_layers") or ()
    return any(layer in listed or (layer + 1) % step for layer in layers)


def _folder_facts(folder: Path) -> ModelFacts:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {folder} has no readable config.json: {error}") from error
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        experts = int(config.get("num_experts") or config.get("num_local_experts") or 0)
        return ModelFacts(
            architecture=str(config["architectures"][0]),
            hidden_size=hidden,
            num_layers=int(config["num_hidden_layers"]),
            num_heads=heads,
            num_kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn_hidden_size=int(config["intermediate_size"]),
            vocab_size=int(config["vocab_size"]),
            context_length=int(config["max_position_embeddings"]),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            num_experts=experts,
            moe_ffn_hidden_size=int(config.get("moe_intermediate_size") or 0),
            has_dense_layers=experts == 0 or _has_dense_layers(config),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a decoder model: {error!r}") from error
