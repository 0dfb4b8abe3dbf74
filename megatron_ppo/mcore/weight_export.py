"""Megatron shards to full Hugging Face tensors on rank 0, one parameter at a time.

Driven by whoever publishes or exports weights, on all ranks in one order. A route says how the shards of a parameter
come to rank 0: by messages, or out of the other ranks' memory (`host_memory`). Invariant: whatever the layout and the
route, the bits are those that `weights` loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.mcore import platform
from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.hf_map import WeightPiece, weight_pieces
from megatron_ppo.mcore.host_memory import RemoteShard, SharedParameters, share_parameters
from megatron_ppo.mcore.weights import WeightMap, named_parameters
from megatron_ppo.protocol.weights import TensorMeta


def hf_weight_metadata(
    model: HFModelConfig, dtype: torch.dtype, *, value_head: bool = False
) -> tuple[TensorMeta, ...]:
    """Names and full shapes in the order of `export_hf_weights`."""
    name = str(dtype).removeprefix("torch.")
    return tuple(
        TensorMeta(name=hf_name, shape=shape, dtype=name)
        for piece in weight_pieces(model, value_head=value_head)
        for hf_name, shape in piece.outputs
    )


def export_hf_weights(chunks: Sequence[Any], weight_map: WeightMap) -> Iterator[Tensor]:
    """Full Hugging Face tensors in the order of `hf_weight_metadata`, on rank 0 of the job alone.

    Collective over all ranks of the job, which all run it to its end; the others yield nothing. Every tensor goes to
    rank 0 alone: read from the memory of the ranks that have it where the host allows that (see `host_memory`), else
    over the tensor group of the one copy of the model that rank 0 belongs to, then from its stage to the first. What
    needs no gathering is yielded as a view of the parameter, which the next update changes.

    Between two yields rank 0 holds the tensor that is yielded and, while a parameter has further tensors, the
    gathered parameter; beyond its own shards and never more than one layer, as long as the caller keeps none.
    """
    parameters = {name: p.detach() for name, p in named_parameters(chunks)}
    dtype = next(iter(parameters.values())).dtype
    route = _route(weight_map, parameters)
    try:
        for piece in weight_map.pieces():
            parts = route.parts(piece) if route.holds(piece) else iter(())
            for _, shape in piece.outputs:
                tensor = route.delivered(next(parts, None), piece, shape, dtype)
                if tensor is not None:
                    yield tensor.contiguous()
                del tensor  # before the next one is gathered
    finally:
        route.end()


def full_tensors(
    shards: Sequence[Tensor | RemoteShard], piece: WeightPiece, model: HFModelConfig
) -> Iterator[Tensor]:
    """The Hugging Face tensors of a parameter, one at a time; views of its only shard where that is possible.

    Args:
        shards: of all T tensor ranks; one of them if all have the same.
    """
    first = shards[0]
    for index, (_, shape) in enumerate(piece.outputs):
        if len(shards) == 1 and isinstance(first, Tensor):
            yield _part(piece, model, index, first).reshape(shape)
            continue
        sample = first if isinstance(first, Tensor) else first.layout
        tensor = torch.empty(shape, dtype=sample.dtype, device=platform.device())
        places = _places(piece, model, index, sample, tensor, len(shards))
        for rank, (shard, place) in enumerate(zip(shards, places, strict=True)):
            if isinstance(shard, Tensor):
                place.copy_(_part(piece, model, index, shard, rank))
            else:
                shard.read(_part(piece, model, index, shard.layout, rank), place)
        yield tensor
        del tensor, places, place  # before memory for the next one is taken


def _part(piece: WeightPiece, model: HFModelConfig, index: int, shard: Tensor, rank: int = 0) -> Tensor:
    """What tensor rank `rank`'s shard has of the piece's tensor number `index`, without padding; a view."""
    shape = piece.outputs[index][1]
    if piece.cut == "whole":
        return shard
    if piece.cut == "columns":
        return shard[:, : _real(shape[1], shard.shape[1], rank)]
    if piece.cut == "rows":
        return shard[: _real(shape[0], shard.shape[0], rank)]
    if piece.cut == "gate_up":
        return shard.view(2, -1, *shard.shape[1:])[index]
    sizes = _head_rows(piece, model)
    groups = shard.view(-1, sum(sizes), *shard.shape[1:])
    first = sum(sizes[:index])
    return groups[: _real(model.num_kv_heads, groups.shape[0], rank), first : first + sizes[index]]


def _places(
    piece: WeightPiece, model: HFModelConfig, index: int, sample: Tensor, tensor: Tensor, size: int
) -> list[Tensor]:
    """Where the shards of `size` tensor ranks, each shaped like `sample`, have their parts in the whole tensor."""
    if piece.cut == "whole":
        return [tensor]
    if piece.cut == "columns":
        return _cut(tensor, 1, sample.shape[1], size)
    if piece.cut == "rows":
        return _cut(tensor, 0, sample.shape[0], size)
    if piece.cut == "gate_up":
        return _cut(tensor, 0, sample.shape[0] // 2, size)
    sizes = _head_rows(piece, model)
    groups = tensor.view(model.num_kv_heads, sizes[index], *tensor.shape[1:])
    return _cut(groups, 0, sample.shape[0] // sum(sizes), size)


def _cut(tensor: Tensor, dim: int, part: int, count: int) -> list[Tensor]:
    """`count` parts of the tensor of at most `part` each; the last ones may be short or empty."""
    length = tensor.shape[dim]
    starts = (min(index * part, length) for index in range(count))
    return [tensor.narrow(dim, start, min(part, length - start)) for start in starts]


def _real(length: int, part: int, rank: int) -> int:
    """How much of rank `rank`'s part of a padded length is not padding, which comes last."""
    return max(0, min(part, length - rank * part))


def _head_rows(piece: WeightPiece, model: HFModelConfig) -> list[int]:
    """Rows of query, key and value that belong to one key/value head."""
    return [shape[0] // model.num_kv_heads for _, shape in piece.outputs]


class _ByMessages:
    """Rank 0 of the job gets every tensor, straight from the ranks that have it; the copies of the model that it is
    not part of do nothing.
    """

    def __init__(self, weight_map: WeightMap, parameters: Mapping[str, Tensor]) -> None:
        self._map = weight_map
        self._parallel = weight_map.parallel
        self._parameters = parameters

    def holds(self, piece: WeightPiece) -> bool:
        """Whether this rank is one of those that give their shards."""
        copies = self._parallel.data_context if piece.expert is None else self._parallel.expert_data
        here = copies.rank() == 0 and self._map.stage_of(piece) == self._parallel.pp_rank
        return here and self._map.owner_of(piece) in (None, self._parallel.ep_rank)

    def parts(self, piece: WeightPiece) -> Iterator[Tensor]:
        """The Hugging Face tensors of the piece, where it has been gathered. Collective of those that hold it."""
        shards = self._gathered(piece)
        return iter(()) if shards is None else full_tensors(shards, piece, self._map.model)

    def _gathered(self, piece: WeightPiece) -> Sequence[Tensor] | None:
        """The shards on the first rank of the tensor group, None on the others."""
        parallel, shard = self._parallel, self._parameters[piece.name]
        if piece.cut == "whole" or parallel.tp_size == 1:
            return [shard] if parallel.tp_rank == 0 else None
        if parallel.tp_rank != 0:
            dist.send(shard.contiguous(), group=parallel.tensor, group_dst=0)
            return None
        # Not dist.gather: over gloo it receives into a second copy of everything.
        others = [torch.empty_like(shard) for _ in range(1, parallel.tp_size)]
        arriving = [
            dist.irecv(other, group=parallel.tensor, group_src=rank) for rank, other in enumerate(others, 1)
        ]
        for work in arriving:
            assert work is not None
            work.wait()
        return [shard, *others]

    def delivered(
        self, tensor: Tensor | None, piece: WeightPiece, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """The tensor on rank 0: first from the expert rank to the first copy of the stage, then to stage 0."""
        stage, owner, parallel = self._map.stage_of(piece), self._map.owner_of(piece), self._parallel
        if parallel.tp_rank != 0:
            return None
        if owner is not None and stage == parallel.pp_rank and parallel.expert_data.rank() == 0:
            tensor = _to_first(tensor, shape, dtype, parallel.expert, owner)
        if parallel.data_context.rank() == 0:
            tensor = _to_first(tensor, shape, dtype, parallel.pipeline, stage)
        return tensor

    def end(self) -> None:
        """Called on every rank after the last tensor."""


class _FromHostMemory:
    """Rank 0 reads every shard where it lies, in the memory of the rank that holds it, while the others wait."""

    def __init__(self, shared: SharedParameters, model: HFModelConfig) -> None:
        self._shared = shared
        self._model = model

    def holds(self, piece: WeightPiece) -> bool:
        """Rank 0 has everything within reach."""
        return self._shared.reader

    def parts(self, piece: WeightPiece) -> Iterator[Tensor]:
        """The Hugging Face tensors of the piece."""
        shards = self._shared.shards(piece.name)
        return full_tensors(shards[:1] if piece.cut == "whole" else shards, piece, self._model)

    def delivered(
        self, tensor: Tensor | None, piece: WeightPiece, shape: tuple[int, ...], dtype: torch.dtype
    ) -> Tensor | None:
        """The tensor, which is where it belongs already."""
        return tensor

    def end(self) -> None:
        """No rank changes its parameters before rank 0 has read them all."""
        self._shared.release()


def _route(weight_map: WeightMap, parameters: Mapping[str, Tensor]) -> _ByMessages | _FromHostMemory:
    """Collective."""
    route = _ByMessages(weight_map, parameters)
    if dist.get_world_size() == 1:
        return route
    held = {piece.name: parameters[piece.name] for piece in weight_map.pieces() if route.holds(piece)}
    shared = share_parameters(held, position=weight_map.parallel.tp_rank)
    return route if shared is None else _FromHostMemory(shared, weight_map.model)


def _to_first(
    tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup, source: int
) -> Tensor | None:
    """The tensor of the group's rank `source`, on its rank 0; None on the others."""
    if source == 0:
        return tensor
    if group.rank() == source:
        assert tensor is not None
        dist.send(tensor.contiguous(), group=group, group_dst=0)
    elif group.rank() == 0:
        received = torch.empty(shape, dtype=dtype, device=platform.device())
        dist.recv(received, group=group, group_src=source)
        return received
    return None
