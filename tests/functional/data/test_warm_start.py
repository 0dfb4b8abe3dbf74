"""Warm starts built for real: same bytes, safe under concurrency, loadable by transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ppo.data import char_tokenizer as chars
from megatron_ppo.data.sort3_5 import sort3_5_task
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.cache import damage, prepare, prepared_path, read_facts
from megatron_ppo.warm_start.facts import model_facts
from megatron_ppo.warm_start.recipe import WarmStartRecipe

FEW_STEPS = WarmStartRecipe(sft_steps=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(FEW_STEPS, tmp_path_factory.mktemp("first"))


def weights(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def test_the_same_recipe_gives_the_same_bytes_whatever_the_callers_random_state(
    folder: Path, tmp_path: Path
) -> None:
    torch.manual_seed(12345)
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        again = prepare(FEW_STEPS, tmp_path)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert weights(again) == weights(folder)
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (again / name).read_bytes() == (folder / name).read_bytes()


def test_another_seed_gives_other_weights(folder: Path, tmp_path: Path) -> None:
    assert weights(prepare(WarmStartRecipe(sft_steps=5, sft_seed=1), tmp_path)) != weights(folder)


def test_transformers_loads_what_the_facts_say(folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    facts = model_facts(folder)
    assert facts == model_facts(FEW_STEPS)
    assert model.config.num_key_value_heads == facts.num_kv_heads == 2
    assert sum(p.numel() for p in model.parameters()) == read_facts(folder)["num_parameters"] == 115392
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("35142=").input_ids == list(chars.encode_prompt("35142="))
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    task = sort3_5_task(tokenizer_dir=folder)
    logits = model(torch.tensor([list(task.train[0].token_ids)])).logits
    assert logits.shape[-1] == 64
    assert torch.isfinite(logits).all()


def test_tied_embeddings_are_stored_once(tmp_path: Path) -> None:
    folder = prepare(WarmStartRecipe(sft_steps=1, tie_word_embeddings=True), tmp_path)
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert not loading["missing_keys"]
    assert sum(p.numel() for p in model.parameters()) == 115392 - 64 * 64


def test_a_damaged_folder_is_rebuilt_to_the_same_bytes(tmp_path: Path) -> None:
    folder = prepare(FEW_STEPS, tmp_path)
    good = weights(folder)
    (folder / "model.safetensors").write_bytes(good[:-1] + bytes([good[-1] ^ 1]))
    assert damage(folder) is not None
    assert prepare(FEW_STEPS, tmp_path) == folder
    assert weights(folder) == good


def test_what_a_killed_builder_left_is_not_taken_for_a_model(folder: Path, tmp_path: Path) -> None:
    final = prepared_path(FEW_STEPS, tmp_path)
    partial = final.with_name(final.name + ".partial")
    partial.mkdir(parents=True)
    (partial / "model.safetensors").write_bytes(b"half")
    (partial / "stray").write_bytes(b"")
    assert prepare(FEW_STEPS, tmp_path) == final
    assert weights(final) == weights(folder)
    assert not (final / "stray").exists()
    assert not partial.exists()


def test_processes_that_start_together_build_once_and_get_the_same_folder(tmp_path: Path) -> None:
    code = (
        "import logging, sys\n"
        "logging.basicConfig(level=logging.INFO, stream=sys.stderr)\n"
        "from megatron_ppo.warm_start.cache import prepare\n"
        "from megatron_ppo.warm_start.recipe import WarmStartRecipe\n"
        f"print(prepare(WarmStartRecipe(sft_steps=5), {str(tmp_path)!r}))"
    )
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=240) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], results
    assert len({out.strip() for out, _ in results}) == 1
    # The loser of the race waits and then finds the model, so the build is announced once.
    assert sum(err.count("preparing the model") for _, err in results) == 1


def test_a_context_too_short_for_the_task_is_refused(tmp_path: Path) -> None:
    recipe = WarmStartRecipe(task="count_long", max_position_embeddings=128)
    with pytest.raises(
        ConfigError, match="max_position_embeddings must be >= 132 for task 'count_long', got 128"
    ):
        prepare(recipe, tmp_path)
    assert not prepared_path(recipe, tmp_path).exists()


def test_the_script_prints_the_folder_and_refuses_bad_input(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "scripts/prepare_model.py", *arguments, "--cache-dir", str(tmp_path)],
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )

    good = run("sort3_5", "--set", "sft_steps=5")
    assert (good.returncode, good.stdout.strip()) == (0, str(prepared_path(FEW_STEPS, tmp_path)))
    assert json.loads((Path(good.stdout.strip()) / "manifest.json").read_text())["recipe"]["sft_steps"] == 5
    unknown = run("sort3_6")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "recipe 'sort3_6' is unknown; known: sort3_5, count_long, smollm2_135m" in unknown.stderr
    assert run("sort3_5", "--set", "sft_stepz=5").returncode == 2
