"""Reads a checkpoint in Megatron's torch_dist format, after making sure that it is whole and of these models.

Everything that can be wrong with the files is looked for first, on rank 0, so that every rank raises the same error,
naming the file or the tensor, before a parameter has changed.

Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedBase, ShardedTensor, ShardedTensorFactory
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from megatron_ppo.mcore import platform
from megatron_ppo.mcore.checkpoint_safety import METADATA_FILE, check_objects, read_metadata
from megatron_ppo.mcore.checkpoint_writer import on_rank_zero
from megatron_ppo.protocol.errors import CheckpointError

# What torch and pickle raise for a file that ends too early or holds something else.
_UNREADABLE = (
    OSError,
    ValueError,
    EOFError,
    KeyError,
    RuntimeError,
    pickle.UnpicklingError,
    CheckpointingException,
)


def read_about(path: Path, wanted: Mapping[str, str]) -> dict[str, Any]:
    """Check the files, and that the saved models are the `wanted` ones: name -> description. Collective.

    Returns: what the save says of itself.
    Raises: CheckpointError on every rank.
    """
    on_rank_zero(lambda: _check_files(path))
    about: dict[str, Any] = _common(path)["about"]
    for name, description in wanted.items():
        saved = about["models"].get(name)
        if saved != description:
            raise CheckpointError(f"{path}: {name} was {saved} when it was saved, the run has {description}")
    return about


def load(template: dict[str, Any], path: Path) -> dict[str, Any]:
    """The saved state in the layout of `template`. Collective.

    Raises: CheckpointError on every rank, naming a tensor that is missing, of another shape or unreadable.
    """
    metadata = read_metadata(path)
    problems: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(problems, sorted(set(_mismatches(template, metadata))))
    found = sorted({problem for part in problems for problem in part})
    if found:
        more = f" (and {len(found) - 3} more)" if len(found) > 3 else ""
        raise CheckpointError(f"{path} does not fit the models of this run: {'; '.join(found[:3])}{more}")
    try:
        loaded: dict[str, Any] = dist_checkpointing.load(template, str(path))
    except (CheckpointingException, CheckpointException) as error:  # raised on every rank together
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return loaded


def _common(path: Path) -> dict[str, Any]:
    common: dict[str, Any] = dist_checkpointing.load_common_state_dict(str(path))
    return common


def _check_files(path: Path) -> None:
    """Raises: CheckpointError naming the file that is missing, cut or unreadable, and a tensor that it holds."""
    for name in (CONFIG_FNAME, METADATA_FILE):
        if not (path / name).is_file():
            raise CheckpointError(f"{path} is not a complete checkpoint of models: {name} is missing")
    try:
        json.loads((path / CONFIG_FNAME).read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is torn: {CONFIG_FNAME} is no JSON: {error}") from error
    try:
        metadata = read_metadata(path)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is torn: {METADATA_FILE} cannot be read: {error!r}") from error
    for index, stored in metadata.storage_data.items():
        file, end = path / stored.relative_path, stored.offset + stored.length
        if not file.is_file():
            raise CheckpointError(f"{path} is torn: {file.name} is missing; it holds {index.fqn}")
        if file.stat().st_size < end:
            raise CheckpointError(
                f"{path} is torn: {file.name} has {file.stat().st_size} bytes; {index.fqn} ends at {end}"
            )
    try:
        check_objects(path, metadata)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is torn: a stored object cannot be read: {error!r}") from error
    if platform.lacks_common_file(path, metadata.state_dict_metadata):
        raise CheckpointError(f"{path} is torn: {platform.COMMON_FILE} is missing")
    try:
        _common(path)
    except _UNREADABLE as error:
        raise CheckpointError(f"{path} is torn: the common state cannot be read: {error!r}") from error


def _mismatches(template: dict[str, Any], metadata: Metadata) -> Iterator[str]:
    for shard in _shards(template):
        if not isinstance(shard, ShardedTensor):
            continue
        saved = metadata.state_dict_metadata.get(shard.key)
        size = getattr(saved, "size", None)
        if saved is None:
            yield f"it has no tensor {shard.key}"
        elif size is not None and tuple(size) != tuple(shard.global_shape) and not shard.allow_shape_mismatch:
            yield f"tensor {shard.key} has shape {tuple(size)}, this run needs {tuple(shard.global_shape)}"


def _shards(template: Any) -> Iterator[ShardedBase]:
    for value in nested_values(template):
        if isinstance(value, ShardedTensorFactory):
            yield from _shards(value.build())
        elif isinstance(value, ShardedBase):
            yield value
        elif isinstance(value, dict | list):
            yield from _shards(value)
