"""The whole model on every rank, each from its own copy: what tests compare, by other collectives than the product's.

`weight_export` brings the weights of one copy of the model to rank 0. Layouts are compared over all ranks, so that two
copies of the model that drift apart are noticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.mcore.hf_map import WeightPiece
from megatron_ppo.mcore.weight_export import full_tensors
from megatron_ppo.mcore.weights import WeightMap, named_parameters


def weights_on_every_rank(chunks: Sequence[Any], weight_map: WeightMap) -> Iterator[Tensor]:
    """Full Hugging Face tensors in the order of `hf_weight_metadata`. Collective."""
    parallel = weight_map.parallel
    parameters = {name: parameter.detach() for name, parameter in named_parameters(chunks)}
    dtype = next(iter(parameters.values())).dtype
    for piece in weight_map.pieces():
        stage, owner = weight_map.stage_of(piece), weight_map.owner_of(piece)
        parts: Iterator[Tensor] = iter(())
        if stage == parallel.pp_rank and owner in (None, parallel.ep_rank):
            shards = _shards(parameters[piece.name], piece, weight_map)
            parts = full_tensors(shards, piece, weight_map.model)
        for _, shape in piece.outputs:
            tensor = next(parts, None)
            if owner is not None and stage == parallel.pp_rank:
                tensor = _from(owner, tensor, shape, dtype, parallel.expert)
            tensor = _from(stage, tensor, shape, dtype, parallel.pipeline)
            yield tensor


def _shards(shard: Tensor, piece: WeightPiece, weight_map: WeightMap) -> list[Tensor]:
    """Of all tensor ranks; a parameter that is whole on every rank is its own."""
    parallel = weight_map.parallel
    if piece.cut == "whole" or parallel.tp_size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(parallel.tp_size)]
    dist.all_gather(shards, shard.contiguous(), group=parallel.tensor)
    return shards


def _from(
    source: int, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype, group: dist.ProcessGroup
) -> Tensor:
    """The tensor of the group's rank `source`, on every rank of the group."""
    tensor = torch.empty(shape, dtype=dtype) if tensor is None else tensor.contiguous()
    if group.size() > 1:
        dist.broadcast(tensor, group_src=source, group=group)
    return tensor
