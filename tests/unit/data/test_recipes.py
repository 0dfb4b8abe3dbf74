"""Warm-start recipes, model facts and the cache around them. No model is built here."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

from megatron_ppo.protocol.errors import CheckpointError, ConfigError, WaitTimeoutError
from megatron_ppo.warm_start.cache import damage, file_digest, prepare, prepared_path, read_facts
from megatron_ppo.warm_start.facts import SMOLLM2_135M, model_facts
from megatron_ppo.warm_start.recipe import (
    RECIPES,
    SmolLM2Recipe,
    WarmStartRecipe,
    code_digest,
    override,
)


def test_equal_recipes_have_equal_keys_in_every_process() -> None:
    code = "from megatron_ppo.warm_start.recipe import *; print(WarmStartRecipe(sft_seed=3).cache_key())"
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == WarmStartRecipe(sft_seed=3).cache_key()


def test_every_field_is_part_of_the_key() -> None:
    base = WarmStartRecipe(num_heads=4, num_kv_heads=4)
    changed = {
        "task": "count_long",
        "num_kv_heads": 2,
        "tie_word_embeddings": True,
        **{
            field.name: getattr(base, field.name) * 2
            for field in dataclasses.fields(base)
            if field.name not in ("task", "num_kv_heads", "tie_word_embeddings", "sft_seed")
        },
        "sft_seed": 1,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(base)}
    keys = {dataclasses.replace(base, **{name: value}).cache_key() for name, value in changed.items()}
    assert len(keys | {base.cache_key()}) == len(changed) + 1


def test_the_two_kinds_of_recipe_never_share_a_folder(tmp_path: Path) -> None:
    folders = {prepared_path(recipe, tmp_path) for recipe in RECIPES.values()}
    folders.add(prepared_path(SmolLM2Recipe(dtype="float32"), tmp_path))
    assert len(folders) == len(RECIPES) + 1


def test_the_key_follows_the_code_that_builds_the_model() -> None:
    assert code_digest(("warm_start/sft.py",)) != code_digest(("warm_start/smollm2.py",))
    assert code_digest(("data/*.py",)) == code_digest(("data/*.py",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 65}, "recipe.hidden_size must be a multiple of num_heads 2, got 65"),
        ({"num_heads": 4, "num_kv_heads": 3}, "recipe.num_kv_heads must divide num_heads 4, got 3"),
        ({"num_layers": 0}, "recipe.num_layers must be >= 1, got 0"),
        ({"sft_steps": -1}, "recipe.sft_steps must be >= 0, got -1"),
    ],
)
def test_impossible_shapes_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        WarmStartRecipe(**fields)  # type: ignore[arg-type]
    assert str(caught.value) == message


def test_an_unknown_number_format_is_refused() -> None:
    with pytest.raises(ConfigError, match="must be bfloat16 or float32, got 'float16'"):
        SmolLM2Recipe(dtype="float16")  # type: ignore[arg-type]


def test_overrides_take_the_type_of_the_field() -> None:
    recipe = override(override(WarmStartRecipe(), "sft_lr=1e-3"), "tie_word_embeddings=true")
    assert recipe == WarmStartRecipe(sft_lr=1e-3, tie_word_embeddings=True)
    for bad in ("sft_lrr=1", "sft_lr", "sft_steps=1.5", "tie_word_embeddings=maybe"):
        with pytest.raises(ConfigError, match="recipe"):
            override(WarmStartRecipe(), bad)


def test_facts_of_a_recipe_are_those_of_its_fields() -> None:
    facts = model_facts(WarmStartRecipe(hidden_size=96, num_heads=3, num_kv_heads=1))
    assert (facts.architecture, facts.head_dim, facts.num_kv_heads) == ("Qwen2ForCausalLM", 32, 1)
    assert (facts.context_length, facts.vocab_size) == (256, 64)
    assert model_facts(SmolLM2Recipe()) == SMOLLM2_135M


def test_facts_of_a_folder_come_from_its_config(tmp_path: Path) -> None:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_facts(tmp_path) == model_facts(str(tmp_path)) == SMOLLM2_135M
    del config["hidden_size"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        ConfigError, match=r"config\.json cannot be read as a decoder model: KeyError\('hidden_size"
    ):
        model_facts(tmp_path)


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no readable config\.json"):
        model_facts(tmp_path / "nothing")


def fake_prepared(recipe: WarmStartRecipe, cache_dir: Path) -> Path:
    """A complete folder, as far as the cache can tell."""
    folder = prepared_path(recipe, cache_dir)
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    files = {"model.safetensors": file_digest(folder / "model.safetensors")}
    (folder / "manifest.json").write_text(json.dumps({"files": files, "measured": {"seconds": 1.5}}))
    return folder


def test_a_complete_folder_is_reused_as_it_is(tmp_path: Path) -> None:
    folder = fake_prepared(WarmStartRecipe(), tmp_path)
    assert prepare(WarmStartRecipe(), tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert read_facts(folder) == {"seconds": 1.5}


def test_reuse_loads_no_torch(tmp_path: Path) -> None:
    fake_prepared(WarmStartRecipe(), tmp_path)
    code = (
        "import sys\n"
        "from megatron_ppo.warm_start.cache import prepare\n"
        "from megatron_ppo.warm_start.facts import model_facts\n"
        "from megatron_ppo.warm_start.recipe import WarmStartRecipe\n"
        f"prepare(WarmStartRecipe(), {str(tmp_path)!r}); model_facts(WarmStartRecipe())\n"
        "print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    output = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert output.strip() == "[]"


def test_damage_is_named(tmp_path: Path) -> None:
    folder = fake_prepared(WarmStartRecipe(), tmp_path)
    assert damage(folder) is None
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert damage(folder) == "model.safetensors differs from its recorded SHA-256"
    (folder / "model.safetensors").unlink()
    assert damage(folder) == "model.safetensors is missing"
    (folder / "manifest.json").write_text("{")
    assert "no readable manifest.json" in str(damage(folder))
    with pytest.raises(CheckpointError, match="is not the manifest of a prepared model"):
        read_facts(folder)


def test_a_wait_for_another_process_ends_with_what_it_waited_for(tmp_path: Path) -> None:
    folder = fake_prepared(WarmStartRecipe(), tmp_path)
    with (
        FileLock(folder.with_name(folder.name + ".lock")),
        pytest.raises(WaitTimeoutError, match=f"for another process to prepare the model {folder.name}"),
    ):
        prepare(WarmStartRecipe(), tmp_path, timeout_s=0.3)
    assert prepare(WarmStartRecipe(), tmp_path, timeout_s=0.3) == folder
