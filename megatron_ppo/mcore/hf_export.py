"""Writes a model as a Hugging Face folder that transformers and vLLM load, shard by shard.

Driven by `app.export`. The weights arrive one tensor at a time; the writing rank holds one file's worth of them and no
rank holds the whole model besides its shards of it. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_ppo.mcore.hf_preflight import INDEX, SINGLE
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.weights import TensorMeta

logger = logging.getLogger(__name__)

# What a folder holds besides weights and config.json; whichever of them the initial model has are copied.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def check_output_folder(folder: Path) -> None:
    """Raises: ConfigError if `folder` exists and is not an empty folder."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"output folder {folder} exists and is not empty; name another one")


@contextmanager
def appearing_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder next to `folder` that takes its name if the block succeeds, and is deleted if not."""
    check_output_folder(folder)
    temporary = folder.with_name(f".{folder.name}.tmp-{os.getpid()}")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        _flush(temporary)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def plan_files(metadata: Sequence[TensorMeta], max_file_bytes: int) -> dict[str, list[TensorMeta]]:
    """Names of the weight files and what goes into each, in order; a file exceeds the limit for one tensor only."""
    files: list[list[TensorMeta]] = [[]]
    size = 0
    for meta in metadata:
        if files[-1] and size + _bytes(meta) > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(meta)
        size += _bytes(meta)
    if len(files) == 1:
        return {SINGLE: files[0]}
    return {f"model-{i:05d}-of-{len(files):05d}.safetensors": part for i, part in enumerate(files, start=1)}


def write_weights(
    folder: Path, metadata: Sequence[TensorMeta], tensors: Iterable[Tensor], *, max_file_bytes: int
) -> None:
    """Write the weight files, and an index if there are several, next to config.json.

    Args:
        tensors: in the order of `metadata`.
    """
    arriving = iter(tensors)
    files = plan_files(metadata, max_file_bytes)
    for name, part in files.items():
        content = {meta.name: _checked(meta, next(arriving)) for meta in part}
        save_file(content, folder / name, metadata={"format": "pt"})
        # safetensors makes files that only their owner may read; a server often runs as someone else.
        shutil.copymode(folder / "config.json", folder / name)
        logger.info("wrote %s, %d tensors", name, len(part))
    if next(arriving, None) is not None:
        raise AssertionError("more tensors than metadata")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(map(_bytes, metadata))},
            "weight_map": {meta.name: name for name, part in files.items() for meta in part},
        }
        _write_json(folder / INDEX, index)


def write_companions(folder: Path, base: Path, *, value_head: bool, dtype: torch.dtype) -> None:
    """Copy tokenizer and generation settings of the initial model `base`, and write config.json after its own."""
    for name in COMPANIONS:
        if (base / name).is_file():
            shutil.copyfile(base / name, folder / name)
    raw = json.loads((base / "config.json").read_text(encoding="utf-8"))
    _write_json(folder / "config.json", exported_config(raw, value_head=value_head, dtype=dtype))


def exported_config(raw: Mapping[str, object], *, value_head: bool, dtype: torch.dtype) -> dict[str, object]:
    """config.json of the exported model: that of the initial one, with its number format, and a critic's head.

    A critic becomes a `...ForTokenClassification` with one label: a value per token, weight and bias in `score`.
    """
    config = dict(raw)
    config["torch_dtype" if "torch_dtype" in raw else "dtype"] = str(dtype).removeprefix("torch.")
    if value_head:
        architectures = raw["architectures"]
        assert isinstance(architectures, list)
        family = str(architectures[0]).partition("For")[0]
        config["architectures"] = [f"{family}ForTokenClassification"]
        config["id2label"], config["label2id"] = {"0": "value"}, {"value": 0}
        config.pop("num_labels", None)
    return config


def _checked(meta: TensorMeta, tensor: Tensor) -> Tensor:
    if tuple(tensor.shape) != tuple(meta.shape):
        raise AssertionError(f"{meta.name} has shape {tuple(tensor.shape)}, expected {tuple(meta.shape)}")
    return tensor.detach().to("cpu").contiguous()


def _bytes(meta: TensorMeta) -> int:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    return prod(meta.shape) * dtype.itemsize


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
