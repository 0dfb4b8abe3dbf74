"""Makes sure that reading a checkpoint's files runs no code out of them.

Driven by `checkpoint_reader`, before Megatron reads anything. Two parts of the torch_dist format are pickles that torch
reads without restriction: the index `.metadata`, and the objects that are stored beside tensors. (Tensors and
Megatron's common state are read with `weights_only`.) Invariant: what passes here names no class or function beyond
those that torch itself writes. Imports torch only.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

from megatron_ppo.protocol.errors import CheckpointError

METADATA_FILE = ".metadata"

# What torch's index is made of, by module; seen in torch 2.13's, with the names that only other layouts need.
_ALLOWED: Mapping[str, frozenset[str]] = {
    "torch.distributed.checkpoint.metadata": frozenset(
        {
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        }
    ),
    "torch.distributed.checkpoint.filesystem": frozenset({"_StorageInfo", "_StoragePrefix"}),
    "torch.distributed.checkpoint.planner": frozenset(
        {"BytesIOWriteData", "SavePlan", "TensorWriteData", "WriteItem", "WriteItemType"}
    ),
    "torch.serialization": frozenset({"_get_layout"}),
    "torch": frozenset({"Size"}),
    "collections": frozenset({"OrderedDict"}),
    # The folder's own name; the module is `pathlib._local` from Python 3.13 on.
    "pathlib": frozenset({"PosixPath", "WindowsPath"}),
    "pathlib._local": frozenset({"PosixPath", "WindowsPath"}),
}


class ForbiddenGlobalError(Exception):
    """A pickle names something that no checkpoint needs."""


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        allowed = name in _ALLOWED.get(module, frozenset())
        if not allowed and not (module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)):
            raise ForbiddenGlobalError(f"{module}.{name}")
        return super().find_class(module, name)


def read_metadata(path: Path) -> Metadata:
    """The index of the checkpoint folder `path`.

    Raises: CheckpointError when it names code; what pickle and the file system raise for a file that is cut.
    """
    file = path / METADATA_FILE
    with file.open("rb") as stream:
        try:
            metadata = _IndexUnpickler(stream).load()
        except ForbiddenGlobalError as error:
            raise CheckpointError(
                f"{file} is refused: it would load {error}, which no checkpoint of torch needs; it may run code"
            ) from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} holds a {type(metadata).__name__}, must be torch's Metadata")
    return metadata


def check_objects(path: Path, metadata: Metadata) -> None:
    """Read every stored object as torch's `weights_only` allows, so that reading it again is safe.

    Raises: CheckpointError naming the object, when it holds a class or function or cannot be read.
    """
    for index, stored in metadata.storage_data.items():
        if not isinstance(metadata.state_dict_metadata.get(index.fqn), BytesStorageMetadata):
            continue
        with (path / stored.relative_path).open("rb") as stream:
            content = _slice(stream, stored)
        try:
            torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise CheckpointError(
                f"{path / stored.relative_path} is refused: object {index.fqn} cannot be read as plain data: {error}"
            ) from error


def _slice(stream: BinaryIO, stored: _StorageInfo) -> bytes:
    stream.seek(stored.offset)
    return stream.read(stored.length)
