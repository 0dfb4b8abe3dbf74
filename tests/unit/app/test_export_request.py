"""What an export takes from a run directory, and what it refuses before torch is imported."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from megatron_ppo.app.companions import model_files_in, read_companions
from megatron_ppo.app.export import ExportRequest, export_request, parse_size
from megatron_ppo.config import compose
from megatron_ppo.mcore.hf_export import appearing_folder, exported_config, plan_files
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.weights import TensorMeta
from megatron_ppo.telemetry.run_dir import RunDirectory
from tests.unit.hf_folder import TINY_QWEN2, write_model_folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with two checkpoints and an initial model next to it."""
    write_model_folder(tmp_path / "initial", TINY_QWEN2)
    path = tmp_path / "run"
    for step in (9, 10):
        (path / "checkpoints" / f"step_{step}" / "models").mkdir(parents=True)
    (path / "checkpoints" / "tmp_step_11" / "models").mkdir(parents=True)
    values = compose.compose_values(["+experiment=cpu_smoke"])
    values["policy"]["model"] = {"path": str(tmp_path / "initial"), "recipe": None}
    (path / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(values))))
    manifest = {"run_id": "x", "name": "x", "config_digest": "x", "state": "running"}
    (path / "run.json").write_text(json.dumps({**manifest, "created_unix_s": 0.0, "updated_unix_s": 0.0}))
    return path


def request(source: Path, **changes: Any) -> ExportRequest:
    defaults: dict[str, Any] = {"step": None, "name": "policy", "base": None, "max_file_bytes": 1}
    return export_request(source, changes.pop("output", source.parent / "out"), **{**defaults, **changes})


@pytest.mark.parametrize(("step", "expected"), [(None, "step_10"), (9, "step_9")])
def test_a_run_gives_its_newest_checkpoint_or_the_named_one(
    run: Path, step: int | None, expected: str
) -> None:
    found = request(run, step=step)
    assert found.checkpoint == run / "checkpoints" / expected
    assert found.base == run.parent / "initial"
    assert (found.dtype, found.model.num_layers) == ("float32", 2)


def test_a_checkpoint_folder_finds_its_run(run: Path) -> None:
    found = request(run / "checkpoints" / "step_9", output=run.parent / "out")
    assert found.checkpoint == run / "checkpoints" / "step_9"
    assert found.base == run.parent / "initial"


def test_the_critic_starts_from_the_policys_folder_unless_it_has_its_own(run: Path) -> None:
    assert request(run, name="critic").base == run.parent / "initial"


@pytest.mark.parametrize(
    ("source", "changes", "words"),
    [
        ("absent", {}, "absent is not an existing folder"),
        ("initial", {}, "run.json"),
        ("run", {"step": 11}, "has no step_11; it has 9, 10"),
        ("run/checkpoints/step_9", {"step": 9}, "--step may be given with a run directory only"),
        ("run", {"name": "value"}, "--model: got 'value'; allowed: policy, critic"),
        ("run", {"output": "initial"}, "exists and is not empty"),
        ("run", {"base": "run"}, "has no config.json"),
    ],
)
def test_what_cannot_be_exported_is_refused(
    run: Path, source: str, changes: dict[str, Any], words: str
) -> None:
    changes = {
        key: run.parent / value if key in ("output", "base") else value for key, value in changes.items()
    }
    with pytest.raises(ConfigError) as error:
        request(run.parent / source, **changes)
    assert words in str(error.value)


def test_an_initial_model_that_has_moved_is_asked_for(run: Path) -> None:
    (run.parent / "initial").rename(run.parent / "moved")
    with pytest.raises(ConfigError, match="name its folder with --base"):
        request(run)
    assert request(run, base=run.parent / "moved").base == run.parent / "moved"


@pytest.mark.parametrize("name", ["policy", "critic"])
def test_a_checkpoint_that_was_carried_elsewhere_is_enough(run: Path, name: str) -> None:
    """What the run writes into each checkpoint is what an export reads when run and initial model are gone."""
    initial = run.parent / "initial"
    (initial / "tokenizer.json").write_text("{}")
    found = read_companions(RunDirectory(path=run), policy_folder=initial, critic_folder=initial)
    assert sorted(found) == ["config.yaml", "hf/policy/config.json", "hf/policy/tokenizer.json"]
    copy = run.parent / "step_9"
    (copy / "models").mkdir(parents=True)
    for file, content in found.items():
        (copy / file).parent.mkdir(parents=True, exist_ok=True)
        (copy / file).write_bytes(content)
    shutil.rmtree(run)
    shutil.rmtree(initial)
    exported = request(copy, name=name)
    assert (exported.checkpoint, exported.base) == (copy, copy / "hf" / "policy")
    assert exported.model.num_layers == 2


def test_a_critic_with_a_folder_of_its_own_has_its_own_files_in_the_checkpoint(run: Path) -> None:
    initial, critic = run.parent / "initial", run.parent / "critic"
    write_model_folder(critic, TINY_QWEN2)
    found = read_companions(RunDirectory(path=run), policy_folder=initial, critic_folder=critic)
    assert sorted(found) == ["config.yaml", "hf/critic/config.json", "hf/policy/config.json"]
    for file in found:
        (run / file).parent.mkdir(parents=True, exist_ok=True)
    assert model_files_in(run, "critic") == run / "hf" / "critic"


def test_the_command_refuses_with_one_message_and_code_2(tmp_path: Path) -> None:
    for words, message in (
        ([str(tmp_path / "x"), str(tmp_path / "out")], f"{tmp_path / 'x'} is not an existing folder"),
        (["a", "b", "--max-shard-size", "many"], "a size is a whole number with KB, MB or GB"),
    ):
        command = [sys.executable, "scripts/export_hf.py", *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith(message)
        assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("text", "expected"), [("5GB", 5 * 10**9), ("200 mb", 2 * 10**8), ("1000", 1000)])
def test_sizes_are_read(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1.5GB", "0"])
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a size is a whole number"):
        parse_size(text)


def test_files_are_filled_in_order_up_to_the_limit() -> None:
    metadata = [TensorMeta(name=name, shape=(25,), dtype="float32") for name in "abc"]
    huge = TensorMeta(name="d", shape=(1000,), dtype="float32")
    files = plan_files([*metadata, huge], 200)
    assert [[meta.name for meta in part] for part in files.values()] == [["a", "b"], ["c"], ["d"]]
    assert next(iter(files)) == "model-00001-of-00003.safetensors"
    assert list(plan_files(metadata, 10**6)) == ["model.safetensors"]


def test_a_critic_becomes_a_token_classifier_with_one_label() -> None:
    raw = {**TINY_QWEN2, "torch_dtype": "bfloat16", "num_labels": 2, "rope_theta": 5.0}
    config = exported_config(raw, value_head=True, dtype=torch.float32)
    assert config["architectures"] == ["Qwen2ForTokenClassification"]
    assert (config["id2label"], config["torch_dtype"]) == ({"0": "value"}, "float32")
    assert config["rope_theta"] == 5.0
    assert "num_labels" not in config
    policy = exported_config(TINY_QWEN2, value_head=False, dtype=torch.bfloat16)
    assert policy == {**TINY_QWEN2, "dtype": "bfloat16"}


def test_a_folder_appears_only_when_it_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(RuntimeError), appearing_folder(target) as folder:
        (folder / "a").write_text("x")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with appearing_folder(target) as folder:
        (folder / "a").write_text("x")
        assert not target.exists()
    assert [path.name for path in target.iterdir()] == ["a"]
    with pytest.raises(ConfigError, match="exists and is not empty"), appearing_folder(target):
        pass
