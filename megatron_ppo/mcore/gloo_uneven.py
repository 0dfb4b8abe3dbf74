"""Gather and reduce-scatter of unequal shares on gloo, whose own collectives of these names need equal ones.

Tensor ranks that share experts receive different numbers of tokens. Both directions are built on `all_to_all_single`,
which gloo has for any sizes. Installed by `mcore.platform` into Megatron's token dispatcher where there is no CUDA;
NCCL takes unequal shares as they are.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def gather(share: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """All ranks' shares one after another, [sum(sizes), ...]; `sizes[r]` rows come from rank r.

    The backward pass sums every rank's gradient of a share on the rank that it came from.
    """
    gathered: Tensor = _Gather.apply(share, sizes, group)
    return gathered


def reduce_scatter(whole: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    """Sum over ranks of this rank's `sizes[rank]` rows; the backward pass gathers."""
    share: Tensor = _ReduceScatter.apply(whole, sizes, group)
    return share


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, share: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _gathered(share, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _reduced(gradient, ctx.sizes, ctx.group), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes, ctx.group = sizes, group
        return _reduced(whole, sizes, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _gathered(gradient, ctx.sizes, ctx.group), None, None


def _gathered(share: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    ranks, rows = group.size(), share.shape[0]
    copies = torch.cat([share] * ranks)
    whole = share.new_empty((sum(sizes), *share.shape[1:]))
    dist.all_to_all_single(whole, copies, sizes, [rows] * ranks, group=group)
    return whole


def _reduced(whole: Tensor, sizes: list[int], group: dist.ProcessGroup) -> Tensor:
    ranks, rows = group.size(), sizes[group.rank()]
    parts = whole.new_empty((ranks * rows, *whole.shape[1:]))
    dist.all_to_all_single(parts, whole.contiguous(), [rows] * ranks, sizes, group=group)
    return parts.view(ranks, rows, *whole.shape[1:]).sum(dim=0)
