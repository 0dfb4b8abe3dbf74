"""An exported folder is the trained model: the same bits, and the same numbers in transformers."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.export_jobs:"
TP2: dict[str, Any] = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
# float32, other reduction orders; as for logits of an untrained model.
SCORES_ABSOLUTE = 1e-4


@pytest.mark.parametrize(
    ("kind", "saved", "exporting"),
    [
        ("qwen2", TP2, {}),
        ("qwen2_tied", {}, {"pipeline": 2}),
        ("qwen3_moe", {"expert_model_parallel_size": 2}, {"tensor": 2}),
    ],
)
def test_a_checkpoint_of_any_layout_exports_to_the_same_model_in_transformers(
    workers: WorkerGroup,
    tiny_model: Callable[[str], Path],
    tmp_path: Path,
    kind: str,
    saved: dict[str, Any],
    exporting: dict[str, int],
) -> None:
    run, folder = tmp_path / "run", tiny_model(kind)
    trained = workers.run(JOBS + "leave_run", folder=str(folder), run=str(run), layout=saved)[0]
    for name, scores in (("policy", "logprobs"), ("critic", "values")):
        output = str(tmp_path / name)
        export = {"source": str(run), "output": output, "name": name, "max_file_bytes": 100_000}
        if exporting:
            workers.run(JOBS + "export_model", **export, **exporting)
        else:
            workers.run_alone(JOBS + "export_model", **export)
        seen = workers.run_alone(JOBS + "exported_scores", folder=output, name=name)
        assert seen["missing"] == []
        assert seen["tensors"].keys() == trained[name].keys()
        for tensor_name, tensor in trained[name].items():
            assert torch.equal(seen["tensors"][tensor_name], tensor), tensor_name
        torch.testing.assert_close(seen["scores"], trained[scores][:, 1:], rtol=0.0, atol=SCORES_ABSOLUTE)
        index = json.loads((tmp_path / name / "model.safetensors.index.json").read_text())
        assert len(set(index["weight_map"].values())) > 1


def test_a_bf16_checkpoint_exports_the_weights_that_the_trainer_computes_with(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    run, folder = tmp_path / "run", tiny_model("llama3_rope")
    trained = workers.run(JOBS + "leave_run", folder=str(folder), run=str(run), layout=TP2, precision="bf16")[
        0
    ]
    for name in ("policy", "critic"):
        output = tmp_path / name
        export = {"source": str(run), "output": str(output), "name": name, "max_file_bytes": 100_000}
        workers.run(JOBS + "export_model", **export, pipeline=2)
        assert json.loads((output / "config.json").read_text())["dtype"] == "bfloat16"
        tensors = {
            key: tensor for path in output.glob("*.safetensors") for key, tensor in load_file(path).items()
        }
        assert tensors.keys() == trained[name].keys()
        for key, tensor in trained[name].items():
            assert tensors[key].dtype == tensor.dtype == torch.bfloat16
            assert torch.equal(tensors[key], tensor), key
    # The round trip: a trainer that starts from the folder computes with the same bits.
    assert workers.run_alone(JOBS + "bf16_mismatches", folder=str(tmp_path / "policy")) == []


def test_the_command_writes_a_folder_with_the_tokenizer_and_says_where(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    run, base, output = tmp_path / "run", tmp_path / "base", tmp_path / "out"
    base.mkdir()
    for path in tiny_model("qwen2").iterdir():
        (base / path.name).write_bytes(path.read_bytes())
    (base / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    workers.run_alone(JOBS + "leave_run", folder=str(base), run=str(run), layout={})
    command = [sys.executable, "scripts/export_hf.py", str(run / "checkpoints" / "step_1"), str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, str(output)), done.stderr
    assert (output / "tokenizer_config.json").read_text() == '{"eos_token": "<eos>"}'
    assert {oct(path.stat().st_mode)[-3:] for path in output.iterdir()} == {
        oct((output / "config.json").stat().st_mode)[-3:]
    }
    # Nothing is left of the temporary folder, and a second export does not overwrite.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out", "run"]
    again = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert again.returncode == 2
    assert again.stderr.strip() == f"output folder {output} exists and is not empty; name another one"


def test_a_torn_checkpoint_is_bad_input_and_leaves_nothing_behind(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    run, output = tmp_path / "run", tmp_path / "out"
    workers.run_alone(JOBS + "leave_run", folder=str(tiny_model("qwen2")), run=str(run), layout={})
    models = run / "checkpoints" / "step_1" / "models"
    (models / "metadata.json").unlink()
    error = workers.run_alone(JOBS + "export_error", source=str(run), output=str(output))
    assert str(models) in error
    assert "not a complete checkpoint" in error
    assert not output.exists()
