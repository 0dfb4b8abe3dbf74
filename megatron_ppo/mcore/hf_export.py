"""Writes a model as a Hugging Face folder that transformers and vLLM load, tensor by tensor.

Driven by `app.export`. The weights arrive one tensor at a time and go to their file at once: a safetensors file begins
with what is in it, and that is known before the first one is there. So no rank holds more than one tensor besides its
shards of the model. The folder appears under its name only when it is complete.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from megatron_ppo.mcore.hf_preflight import COMPANIONS, INDEX, SINGLE
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.weights import TensorMeta

logger = logging.getLogger(__name__)

_FORMATS = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_HEADER_ALIGNMENT = 8


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
        if files[-1] and size + meta.num_bytes > max_file_bytes:
            files.append([])
            size = 0
        files[-1].append(meta)
        size += meta.num_bytes
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
        _write_file(folder / name, part, arriving)
        logger.info("wrote %s, %d tensors", name, len(part))
    if next(arriving, None) is not None:
        raise AssertionError("more tensors than metadata")
    if len(files) > 1:
        index = {
            "metadata": {"total_size": sum(meta.num_bytes for meta in metadata)},
            "weight_map": {meta.name: name for name, part in files.items() for meta in part},
        }
        _write_json(folder / INDEX, index)


def _write_file(path: Path, part: Sequence[TensorMeta], arriving: Iterator[Tensor]) -> None:
    """One safetensors file: the header's length in 8 bytes, little endian; the header, JSON; the tensors, in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for meta in part:
        start, end = end, end + meta.num_bytes
        header[meta.name] = {
            "dtype": _FORMATS[meta.dtype],
            "shape": list(meta.shape),
            "data_offsets": [start, end],
        }
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for meta in part:
            # Not bound to a name here: it is gone before the next one is gathered.
            file.write(_bytes_of(meta, next(arriving)))


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


def _bytes_of(meta: TensorMeta, tensor: Tensor) -> memoryview:
    if tuple(tensor.shape) != tuple(meta.shape) or tensor.dtype != getattr(torch, meta.dtype):
        raise AssertionError(
            f"{meta.name} has shape {tuple(tensor.shape)} and {tensor.dtype}, expected {tuple(meta.shape)} and "
            f"{meta.dtype}"
        )
    return memoryview(tensor.detach().to("cpu").contiguous().view(-1).view(torch.uint8).numpy())


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _flush(folder: Path) -> None:
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
