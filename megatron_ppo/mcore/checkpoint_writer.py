"""One save in Megatron's torch_dist format, cut into the part that needs the models and the part that needs the disk.

`stage` plans the save with the other ranks and copies what this rank has to write; it touches no file. `StagedSave`
then writes this rank's files in whatever thread calls `write`, and completes the checkpoint in `commit`, together with
the other ranks. So a synchronous and an asynchronous save are the same three steps, nothing is forked or spawned, and a
disk that fails on one rank is met by all ranks as one error instead of leaving the others in a collective.

Invariant: after `stage` no later change of a parameter or an optimizer state reaches the files.

Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config

from megatron_ppo.mcore import platform
from megatron_ppo.protocol.errors import CheckpointError, with_causes

logger = logging.getLogger(__name__)


class StagedSave:
    """What this rank has to write, copied.

    Args:
        writer: Megatron's, after planning.   metadata: of the whole checkpoint; on rank 0 only.
        common: content of common.pt, where rank 0 writes such a file (see `platform.plan_checkpoint`).
    """

    def __init__(self, path: Path, *, writer: Any, metadata: Any, common: bytes | None) -> None:
        self._path = path
        self._writer = writer
        self._metadata = metadata
        self._common = common
        self._buckets: list[Any] = list(writer.write_buckets)
        self._results: list[Any] = []
        self._error: Exception | None = None

    def write(self) -> None:
        """Write and flush this rank's files; in any thread, without the other ranks. A failure is kept for `commit`."""
        try:
            if self._common is not None:
                _write_durably(self._path / platform.COMMON_FILE, self._common)
            while self._buckets:  # each is let go as soon as it is on disk
                self._results += platform.write_checkpoint_bucket(self._writer, self._buckets.pop(0))
        except Exception as error:  # the border of the writing thread: raised on every rank by `commit`
            logger.exception("this rank's part of %s could not be written", self._path)
            self._error = error
            self._buckets.clear()

    def commit(self) -> None:
        """Complete the checkpoint after every rank's `write`. Collective.

        Raises: CheckpointError on every rank, with the cause and its rank, if a file could not be written.
        """
        mine = None if self._error is None else with_causes(self._error)
        shares: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(shares, (mine, self._results))
        failed = [f"rank {rank}: {error}" for rank, (error, _) in enumerate(shares) if error is not None]
        if failed:
            raise CheckpointError(f"{self._path} could not be written: {'; '.join(failed)}") from self._error

        def complete() -> None:
            self._writer.finish(self._metadata, [results for _, results in shares])
            save_config(
                CheckpointingConfig(platform.CHECKPOINT_BACKEND, platform.CHECKPOINT_VERSION), str(self._path)
            )

        on_rank_zero(complete)


class ThreadedSave:
    """A staged save whose files are written by a thread (loop port BackgroundSave)."""

    def __init__(self, staged: StagedSave) -> None:
        self._staged = staged
        # A daemon: a process that ends in a hurry does not wait for the disk, the previous checkpoint is whole.
        self._thread = threading.Thread(target=staged.write, name="checkpoint", daemon=True)
        self._thread.start()

    def is_written(self) -> bool:
        """Whether every rank's thread has ended. Collective."""
        flag = torch.tensor([int(not self._thread.is_alive())], device=platform.device())
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        return bool(flag.item())

    def finish(self) -> None:
        """Wait for the threads of all ranks and complete the checkpoint. Collective. Raises: CheckpointError."""
        self._thread.join()
        self._staged.commit()


def stage(state: Mapping[str, Any], path: Path, *, live: Sequence[torch.Tensor]) -> StagedSave:
    """Plan the save of a sharded `state` into the empty folder `path` and copy this rank's part. Collective.

    Args:
        live: tensors that training goes on changing. What the plan holds of them is copied to host memory; what was
            gathered or cloned for this save already (the optimizer's state, on the first data-parallel rank) is not
            copied again.
    """
    writer, metadata, common = platform.plan_checkpoint(state, path)
    writer.write_buckets = _copied(writer, {tensor.untyped_storage().data_ptr() for tensor in live})
    return StagedSave(path, writer=writer, metadata=metadata, common=_serialised(common))


def _copied(writer: Any, live: set[int]) -> list[Any]:
    """The planned buckets with tensors in host memory that nobody else writes to."""

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type != "cpu":
            return tensor.to("cpu")
        return tensor.clone() if tensor.untyped_storage().data_ptr() in live else tensor

    return [
        (file, key, (data, [(item, copy(tensor)) for item, tensor in tensors]))
        for file, key, (data, tensors) in writer.write_buckets
    ]


def _serialised(common: list[Any]) -> bytes | None:
    if not common or dist.get_rank() != 0:
        return None
    stream = io.BytesIO()
    torch.save(common[0], stream)
    return stream.getvalue()


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def on_rank_zero(action: Callable[[], None]) -> None:
    """Run `action` on rank 0 while the others wait; its CheckpointError or OSError is raised on every rank."""
    box: list[Any] = [None]
    if dist.get_rank() == 0:
        try:
            action()
        except CheckpointError as error:
            box[0] = str(error)
        except (OSError, RuntimeError) as error:  # torch reports some failed writes as the latter
            box[0] = with_causes(error)
    dist.broadcast_object_list(box, src=0)
    if box[0] is not None:
        raise CheckpointError(box[0])
