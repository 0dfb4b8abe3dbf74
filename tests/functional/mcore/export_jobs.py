"""Jobs that leave a run directory with a checkpoint, export from it, and read what was exported with transformers."""

from __future__ import annotations

import json
import logging
import runpy
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from megatron_ppo.app.export import ExportLayout, export, export_request
from megatron_ppo.config.compose import compose_values
from megatron_ppo.mcore.checkpoint import save_models
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.settings import Precision
from megatron_ppo.protocol.errors import MegatronPPOError
from tests.functional.mcore import jobs

SCRIPT = Path(__file__).parents[3] / "scripts" / "export_hf.py"


def leave_run(*, folder: str, run: str, layout: jobs.Layout, precision: Precision = "fp32") -> dict[str, Any]:
    """Train policy and critic once, save them as step 1 of a run; returns weights, log-probs and values."""
    path = Path(run)
    with distributed_runtime(timeout_s=60.0) as runtime:
        groups = [ParallelContext.create(**layout, timeout_s=60.0) for _ in range(2)]  # type: ignore[arg-type]
        policy = jobs.build("policy", folder, groups[0], precision=precision)
        critic = jobs.build("critic", folder, groups[1], precision=precision)
        batch = jobs.random_batch()
        policy.update([batch])
        critic.update([batch])
        if runtime.rank == 0:
            (path / "checkpoints" / "step_1").mkdir(parents=True)
            _write_run_files(path, folder, precision)
        torch.distributed.barrier()
        save_models(path / "checkpoints" / "step_1" / "models", {"policy": policy, "critic": critic})
        return {
            "policy": jobs.full_parameters(policy),
            "critic": jobs.full_parameters(critic),
            "logprobs": jobs.scored(policy, batch),
            "values": jobs.scored(critic, batch),
        }


def _write_run_files(run: Path, folder: str, precision: Precision) -> None:
    values = compose_values(["+experiment=cpu_smoke"])
    values["policy"]["precision"] = values["critic"]["precision"] = precision
    values["policy"]["model"] = {"path": folder, "recipe": None}
    (run / "config.yaml").write_text(yaml.safe_dump(json.loads(json.dumps(values))))
    manifest = {
        "run_id": "x",
        "name": "x",
        "config_digest": "x",
        "state": "running",
        "created_unix_s": 0.0,
        "updated_unix_s": 0.0,
    }
    (run / "run.json").write_text(json.dumps(manifest))


def export_model(
    *, source: str, output: str, name: str, max_file_bytes: int = 10**9, **layout: int
) -> list[str]:
    """Export; the names of the files."""
    request = export_request(
        Path(source), Path(output), step=None, name=name, base=None, max_file_bytes=max_file_bytes
    )
    export(request, ExportLayout(**layout))
    return sorted(path.name for path in Path(output).iterdir()) if Path(output).is_dir() else []


def export_by_command(*, arguments: list[str]) -> int | str | None:
    """`scripts/export_hf.py ARGUMENTS` on this rank, as torchrun would run it, without another import of Megatron.

    Returns: the exit status.
    """
    logger, arguments_here = logging.getLogger("megatron_ppo"), sys.argv
    level, sys.argv = logger.level, [str(SCRIPT), *arguments]
    try:
        with warnings.catch_warnings():  # the command silences the libraries
            runpy.run_path(str(SCRIPT), run_name="__main__")
    except SystemExit as ended:
        return ended.code
    finally:
        sys.argv = arguments_here
        logger.setLevel(level)
    raise AssertionError("the command did not end with an exit status")


def exported_scores(*, folder: str, name: str) -> dict[str, Any]:
    """Log-probs or values of transformers' model of an exported folder, and the folder's tensors."""
    import transformers
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors |= load_file(path)
    batch = jobs.random_batch()
    kind = "AutoModelForCausalLM" if name == "policy" else "AutoModelForTokenClassification"
    model, info = getattr(transformers, kind).from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    with torch.no_grad():
        output = model(batch.token_ids_BT).logits[:, :-1]
    if name == "policy":
        scores = output.log_softmax(-1).gather(-1, batch.token_ids_BT[:, 1:, None])[..., 0]
    else:
        scores = output[..., 0]
    missing = sorted(map(str, info["missing_keys"]))
    mask = batch.response_mask_BT[:, 1:]
    return {"scores": torch.where(mask, scores, 0.0), "tensors": tensors, "missing": missing}


def bf16_mismatches(*, folder: str) -> list[str]:
    """Names of the tensors that a bf16 policy which starts from the folder would publish with other bits."""
    from safetensors.torch import load_file

    files: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        files |= load_file(path)
    with jobs.context({}) as parallel:
        policy = jobs.build("policy", folder, parallel, precision="bf16")
        return [
            name
            for name, tensor in jobs.full_parameters(policy).items()
            if not torch.equal(tensor, files[name])
        ]


def export_error(*, source: str, output: str) -> str:
    """The message of the ConfigError or CheckpointError of an export."""
    try:
        export_model(source=source, output=output, name="policy")
    except MegatronPPOError as error:
        return str(error)
    return "no error"
