"""Recipes of initial models: how to prepare a Hugging Face folder when none is given.

Field names equal those of the records in `megatron_ppo.warm_start.recipe`, which own the rules between them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from megatron_ppo.config.base import BuiltSection, setting, target_field


class WarmStartRecipeSection(BuiltSection):
    """A small Qwen2 model, trained from scratch on demonstrations that are imperfect on purpose."""

    target: Literal["megatron_ppo.warm_start.recipe.WarmStartRecipe"] = target_field(
        "megatron_ppo.warm_start.recipe.WarmStartRecipe"
    )
    task: str = setting("sort3_5", "Task whose demonstrations are learnt and whose tokenizer the model has.")
    hidden_size: int = setting(64, "Width.", unit="channels")
    num_layers: int = setting(2, "Transformer layers.", unit="layers")
    num_heads: int = setting(2, "Attention heads.", unit="heads")
    num_kv_heads: int = setting(2, "Key-value heads; must divide num_heads.", unit="heads")
    ffn_hidden_size: int = setting(192, "Width of the MLP.", unit="channels")
    vocab_size: int = setting(64, "Rows of the embedding.", unit="tokens", ge=1)
    max_position_embeddings: int = setting(256, "Context length.", unit="tokens", ge=1)
    rope_theta: float = setting(10000.0, "Base of the rotary embedding.", gt=0.0)
    tie_word_embeddings: bool = setting(False, "Embedding and output layer share their weights.")
    sft_steps: int = setting(300, "Optimizer steps of the fine-tuning.", unit="steps")
    sft_batch_size: int = setting(64, "Demonstrations per step.", unit="sequences")
    sft_lr: float = setting(2e-3, "Peak learning rate of the fine-tuning.", gt=0.0)
    sft_warmup_steps: int = setting(20, "Linear warm-up of the learning rate.", unit="steps", ge=0)
    sft_weight_decay: float = setting(0.01, "Decoupled weight decay.", ge=0.0)
    sft_clip_grad: float = setting(1.0, "Largest gradient norm.", gt=0.0)
    sft_seed: int = setting(0, "Seed of initial weights and demonstrations.", ge=0)


class SmolLM2RecipeSection(BuiltSection):
    """SmolLM2-135M-Instruct out of the Python package that bundles it, converted to a Hugging Face folder."""

    target: Literal["megatron_ppo.warm_start.recipe.SmolLM2Recipe"] = target_field(
        "megatron_ppo.warm_start.recipe.SmolLM2Recipe"
    )
    dtype: Literal["bfloat16", "float32"] = setting(
        "bfloat16", "Number format of the stored weights; loaders widen them to float32 either way."
    )


Recipe = Annotated[WarmStartRecipeSection | SmolLM2RecipeSection, Field(discriminator="target")]
