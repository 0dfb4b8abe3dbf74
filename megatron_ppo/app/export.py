"""From a run's checkpoint to a Hugging Face folder: finds the checkpoint and the initial model, then writes.

Driven by `scripts/export_hf.py`, in one process or on every rank under torchrun. Everything that can be wrong with the
command is found before torch is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from megatron_ppo.app.companions import CONFIG_NAME, model_files_in
from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.compose import validate
from megatron_ppo.config.model_sections import ModelSource
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.mcore.hf_config import HFModelConfig, read_hf_config
from megatron_ppo.protocol.errors import CheckpointError, ConfigError
from megatron_ppo.telemetry.run_dir import RunDirectory

MODELS = ("policy", "critic")
_STEP = re.compile(r"step_(\d+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportRequest:
    """What to write, checked.

    Attributes:
        checkpoint: folder of a step.   base: initial model's folder, for config.json and tokenizer.
        name: `policy` or `critic`.   dtype: of the parameters, as torch names it.
    """

    checkpoint: Path
    base: Path
    model: HFModelConfig
    name: str
    output: Path
    max_file_bytes: int
    dtype: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportLayout:
    """How the exporting ranks share the model; any layout reads any checkpoint."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1


def export_request(
    source: Path, output: Path, *, step: int | None, name: str, base: Path | None, max_file_bytes: int
) -> ExportRequest:
    """Find everything that an export needs.

    Args:
        source: a run directory, or a checkpoint (`.../checkpoints/step_20`), also one that was carried elsewhere.
        step: of the checkpoint to take from a run directory; None is the newest.
        base: folder of the initial model, if it is not where the run's configuration says.
    Raises: ConfigError naming the folder or option.
    """
    if name not in MODELS:
        raise ConfigError(f"--model: got {name!r}; allowed: {', '.join(MODELS)}")
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise ConfigError(f"output folder {output} exists and is not empty; name another one")
    directory, checkpoint = _checkpoint(source, step)
    config = _run_config(directory, checkpoint)
    folder = base or _initial_folder(config, name, checkpoint)
    return ExportRequest(
        checkpoint=checkpoint,
        base=folder,
        model=read_hf_config(folder),
        name=name,
        output=output,
        max_file_bytes=max_file_bytes,
        dtype={"fp32": "float32", "bf16": "bfloat16"}[getattr(config, name).precision],
    )


def export(request: ExportRequest, layout: ExportLayout) -> None:
    """Write the folder. Collective over all ranks; rank 0 writes.

    Raises: ConfigError for a layout that does not fit, CheckpointError for a checkpoint that does not.
    """
    import torch

    from megatron_ppo.mcore.hf_export import appearing_folder, write_companions, write_weights
    from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime

    dtype: torch.dtype = getattr(torch, request.dtype)
    with distributed_runtime() as runtime:
        parallel = ParallelContext.create(
            tensor_model_parallel_size=layout.tensor,
            pipeline_model_parallel_size=layout.pipeline,
            expert_model_parallel_size=layout.expert,
            # Nothing is computed; experts ask for it.
            sequence_parallel=layout.tensor > 1,
        )
        # Not before the groups, which prepare the process for Megatron.
        from megatron_ppo.mcore.bare_model import BareModel

        model = BareModel(
            name=request.name,
            checkpoint=request.checkpoint / "models",
            model=request.model,
            parallel=parallel,
            dtype=dtype,
        )
        if runtime.rank != 0:
            for _ in model.tensors():
                raise AssertionError("a tensor for rank 0 arrived elsewhere")
            return
        with appearing_folder(request.output) as folder:
            write_companions(folder, request.base, value_head=request.name == "critic", dtype=dtype)
            write_weights(folder, model.metadata(), model.tensors(), max_file_bytes=request.max_file_bytes)


def parse_size(text: str) -> int:
    """Bytes of a size such as `5GB`, `200MB` or `1000`. Raises: ConfigError."""
    units = {"GB": 10**9, "MB": 10**6, "KB": 10**3, "B": 1}
    number, unit = text.strip().upper(), 1
    for name, factor in units.items():
        if number.endswith(name):
            number, unit = number.removesuffix(name), factor
            break
    if not number.strip().isdecimal() or int(number) < 1:
        raise ConfigError(f"a size is a whole number with KB, MB or GB, such as 5GB; got {text!r}")
    return int(number) * unit


def _checkpoint(source: Path, step: int | None) -> tuple[RunDirectory, Path]:
    if not source.is_dir():
        raise ConfigError(f"{source} is not an existing folder")
    if _STEP.fullmatch(source.name) and (source / "models").is_dir():
        if step is not None:
            raise ConfigError(f"--step may be given with a run directory only; {source} is one checkpoint")
        return RunDirectory(path=source.resolve().parent.parent), source
    directory = RunDirectory(path=source)
    directory.read_manifest()
    saved = dict(_saved(directory))
    if not saved:
        raise ConfigError(f"{directory.checkpoints_dir} holds no checkpoint")
    if step is not None and step not in saved:
        raise ConfigError(
            f"--step: {directory.checkpoints_dir} has no step_{step}; it has {', '.join(map(str, sorted(saved)))}"
        )
    return directory, saved[max(saved) if step is None else step]


def _saved(directory: RunDirectory) -> Iterator[tuple[int, Path]]:
    if directory.checkpoints_dir.is_dir():
        for folder in directory.checkpoints_dir.iterdir():
            match = _STEP.fullmatch(folder.name)
            if match and (folder / "models").is_dir():
                yield int(match[1]), folder


def _run_config(directory: RunDirectory, checkpoint: Path) -> RunConfig:
    own = checkpoint / CONFIG_NAME
    path = own if own.exists() else directory.config_path
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold a mapping, got {type(values).__name__}")
    return validate(values)


def _initial_folder(config: RunConfig, name: str, checkpoint: Path) -> Path:
    section = getattr(config, name)
    source = config.policy.model if section.model == ModelSource() else section.model
    if source.path is not None and not Path(source.path).is_dir():
        kept = model_files_in(checkpoint, name)
        if kept.is_dir():
            return kept
        raise ConfigError(
            f"{name}.model.path: the run started from {source.path!r}, which is not there; name its folder with --base"
        )
    return model_folder(
        source,
        cache_dir=Path(config.cluster.model_cache_dir).expanduser(),
        timeout_s=config.cluster.prepare_timeout_s,
    )


@contextmanager
def bad_input() -> Iterator[None]:
    """Turn a checkpoint that does not fit the command into bad input."""
    try:
        yield
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
