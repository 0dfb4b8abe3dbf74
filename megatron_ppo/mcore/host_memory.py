"""Parameters of other ranks of the same host, read straight from their memory.

Over gloo a shard costs two passes through a socket, each of which keeps a core busy on both sides. Ranks of one host
need no socket: Linux lets a process read the memory of another one of the same user (process_vm_readv(2), "cross
memory attach", which MPI libraries use for the same reason). Driven by `weight_export.export_hf_weights` on the CPU
backend; between GPUs NCCL is faster.

Invariant: either every rank uses this way or none does, and nothing is assumed about permissions: each exchange begins
with a trial read of every rank, and where one fails, sockets are used. Addresses are exchanged anew each time, so a
parameter that has moved is read where it is. Who reads is settled once, when the job's ranks meet (`let_rank_0_read`).
"""

from __future__ import annotations

import ctypes
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from megatron_ppo.mcore import platform
from megatron_ppo.transport import process_memory

logger = logging.getLogger(__name__)

_READER = 0
_TRIAL = bytes(range(64))
_SPANS = 1024
"""Most that the system takes in one call (IOV_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    """Where a contiguous parameter lies in its process."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class _Offer:
    """What one rank lets rank 0 read.

    Attributes:
        namespace: the same on ranks that can name each other's processes.
        position: of the rank's shards in the stack of a parameter.
        trial: address of `_TRIAL` in this process.
    """

    namespace: str
    process: int
    position: int
    trial: int
    parameters: Mapping[str, _Address]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """A shard of a parameter."""

    position: int
    process: int
    address: _Address


class SharedParameters:
    """One exchange; rank 0 reads, the others only wait in `release`."""

    def __init__(self, own: Mapping[str, Tensor], places: Mapping[str, list[_Place]]) -> None:
        self.reader = dist.get_rank() == _READER
        self._own = own
        self._places = places

    def shards(self, name: str) -> list[Tensor | RemoteShard]:
        """The shards of all ranks that hold the parameter, by position; this rank's own as it is."""
        return [
            self._own[name]
            if place.process == os.getpid()
            else RemoteShard(place.process, place.address.start, place.address.shape, place.address.dtype)
            for place in self._places[name]
        ]

    def release(self) -> None:
        """Let all ranks go on. Collective."""
        dist.barrier()


class RemoteShard:
    """A contiguous tensor in another process. `layout` is a tensor without memory of the same shape and strides."""

    def __init__(self, process: int, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.layout = torch.empty(shape, dtype=dtype, device="meta")
        self._process = process
        self._start = start

    def read_all(self, into: Tensor) -> None:
        """Copy everything. Raises: OSError."""
        self.read(self.layout, into)

    def read(self, part: Tensor, into: Tensor) -> None:
        """Copy `part`, a view of `layout`, to `into`, of the same shape and dtype. Raises: OSError."""
        if part.numel() == 0:
            return
        inner = min(_contiguous_dims(part), _contiguous_dims(into))
        block = math.prod(part.shape[part.dim() - inner :]) * part.element_size()
        start = self._start + int(part.storage_offset()) * part.element_size()
        local = _spans(into, inner, start=into.data_ptr(), num_bytes=block)
        gapless = _contiguous_dims(part) == part.dim()
        remote = None if gapless else _spans(part, inner, start=start, num_bytes=block)
        for first in range(0, len(local), _SPANS):
            places = local[first : first + _SPANS]
            if remote is None:
                source = np.array([[start + first * block, len(places) * block]], dtype=np.int64)
            else:
                source = remote[first : first + _SPANS]
            process_memory.read_spans(self._process, places, source, num_bytes=len(places) * block)


def let_rank_0_read() -> None:
    """Let rank 0 read this process's memory from now on. Collective over all ranks, once in a job."""
    if platform.device().type != "cpu" or dist.get_world_size() == 1:
        return
    reader = [os.getpid()]
    dist.broadcast_object_list(reader, src=_READER)
    process_memory.let_process_in(reader[0])


def share_parameters(held: Mapping[str, Tensor], *, position: int) -> SharedParameters | None:
    """Offer the parameters that this rank gives to rank 0. Collective over all ranks.

    Args:
        held: by name of the whole model; empty where another copy of the model gives them.
        position: of this rank's shards in the tensor group.
    Returns: None on every rank if one of them cannot be read from.
    """
    if platform.device().type != "cpu":
        return None
    trial = ctypes.create_string_buffer(_TRIAL, len(_TRIAL))
    offers: list[_Offer | None] = [None] * dist.get_world_size()
    dist.all_gather_object(offers, _offer(held, position, ctypes.addressof(trial)))
    reason: list[str | None] = [None]
    if dist.get_rank() == _READER:
        reason[0] = _obstacle(offers)
    dist.broadcast_object_list(reason, src=_READER)
    del trial  # lives until rank 0 has tried to read it
    if reason[0] is not None:
        _say_once(reason[0])
        return None
    return SharedParameters(held, _by_name(offers) if dist.get_rank() == _READER else {})


def _offer(held: Mapping[str, Tensor], position: int, trial: int) -> _Offer | None:
    if not all(tensor.is_contiguous() for tensor in held.values()):
        return None
    return _Offer(
        namespace=process_memory.namespace(),
        process=os.getpid(),
        position=position,
        trial=trial,
        parameters={
            name: _Address(start=tensor.data_ptr(), shape=tuple(tensor.shape), dtype=tensor.dtype)
            for name, tensor in held.items()
        },
    )


def _obstacle(offers: list[_Offer | None]) -> str | None:
    """Why rank 0 cannot read from all the others; None if it can."""
    mine = offers[_READER]
    for rank, offer in enumerate(offers):
        if offer is None or mine is None:
            return f"a parameter of rank {rank} does not lie in one piece"
        if offer.namespace != mine.namespace:
            return f"rank {rank} is on another host or in another container"
        seen = torch.empty(len(_TRIAL), dtype=torch.uint8)
        try:
            RemoteShard(offer.process, offer.trial, tuple(seen.shape), seen.dtype).read_all(seen)
        except OSError as error:
            return f"rank 0 may not read the memory of rank {rank}: {error}"
        if bytes(seen.tolist()) != _TRIAL:
            return f"rank 0 reads something else at rank {rank} than what lies there"
    return None


def _by_name(offers: list[_Offer | None]) -> dict[str, list[_Place]]:
    places: dict[str, list[_Place]] = {}
    for offer in offers:
        assert offer is not None
        for name, address in offer.parameters.items():
            place = _Place(position=offer.position, process=offer.process, address=address)
            places.setdefault(name, []).append(place)
    return {name: sorted(found, key=lambda place: place.position) for name, found in places.items()}


def _contiguous_dims(tensor: Tensor) -> int:
    """How many of the last dimensions lie in one piece."""
    expected, count = 1, 0
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if size != 1 and stride != expected:
            break
        expected, count = expected * size, count + 1
    return count


def _spans(tensor: Tensor, inner: int, *, start: int, num_bytes: int) -> NDArray[np.int64]:
    """struct iovec [n, 2], address and length, of the blocks of the `inner` last dimensions, the first at `start`."""
    outer = tensor.dim() - inner
    offsets = _offsets(tuple(tensor.shape[:outer]), tuple(tensor.stride()[:outer]))
    spans = np.empty((len(offsets), 2), dtype=np.int64)
    spans[:, 0] = offsets * tensor.element_size() + start
    spans[:, 1] = num_bytes
    return spans


@lru_cache(maxsize=256)
def _offsets(shape: tuple[int, ...], stride: tuple[int, ...]) -> NDArray[np.int64]:
    """[n] elements from the first block to each. Kept: the layers of a model share their shapes."""
    offsets = np.zeros(1, dtype=np.int64)
    for size, step in zip(shape, stride, strict=True):
        offsets = (offsets[:, None] + np.arange(size, dtype=np.int64) * step).reshape(-1)
    return offsets


@cache
def _say_once(reason: str) -> None:
    logger.info("parameters are gathered over sockets: %s", reason)
