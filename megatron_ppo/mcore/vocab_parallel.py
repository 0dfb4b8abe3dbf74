"""Log-probs and entropy of logits whose vocabulary is cut over the tensor group.

Own functions instead of Megatron's `vocab_parallel_cross_entropy`: that one overwrites the logits, takes its
group from global state, and its fused variant rounds the gradient to bfloat16.

Shape legend: B sequences, T token positions, V vocabulary entries of this rank.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def vocab_parallel_logprobs(
    logits_BTV: Tensor, target_BT: Tensor, *, group: dist.ProcessGroup, vocab_start: int
) -> Tensor:
    """float32 [B, T] nats; log softmax of the logits over the whole vocabulary, at the targets.

    Args:
        logits_BTV: float32, this rank's vocabulary entries [vocab_start, vocab_start + V); temperature
            applied.
        target_BT: int64, on every rank the same.
    Differentiable with respect to the logits; the gradient of the others is not needed on this rank.
    """
    result: Tensor = _VocabParallelLogProbs.apply(logits_BTV, target_BT, group, vocab_start)
    return result


@torch.no_grad()
def vocab_parallel_entropy(logits_BTV: Tensor, *, group: dist.ProcessGroup) -> Tensor:
    """float32 [B, T] nats; the exact entropy of each position's distribution. No gradient.

    H = log Z - Σ_v p_v x_v with x the logits less their maximum and Z = Σ_v exp(x_v).
    """
    centred_BTV = logits_BTV - _global_maximum(logits_BTV, group)[..., None]
    weight_BTV = centred_BTV.exp()
    sums = torch.stack([weight_BTV.sum(-1), (weight_BTV * centred_BTV).sum(-1)])
    dist.all_reduce(sums, group=group)
    return sums[0].log() - sums[1] / sums[0]


def _global_maximum(logits_BTV: Tensor, group: dist.ProcessGroup) -> Tensor:
    maximum_BT = logits_BTV.amax(dim=-1)
    dist.all_reduce(maximum_BT, op=dist.ReduceOp.MAX, group=group)
    return maximum_BT


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits_BTV: Tensor, target_BT: Tensor, group: dist.ProcessGroup, vocab_start: int
    ) -> Tensor:
        maximum_BT = _global_maximum(logits_BTV, group)
        local_BT = target_BT - vocab_start
        inside_BT = (local_BT >= 0) & (local_BT < logits_BTV.shape[-1])
        local_BT = torch.where(inside_BT, local_BT, 0)
        picked_BT = logits_BTV.gather(-1, local_BT[..., None])[..., 0] - maximum_BT
        sums = torch.stack(
            [
                (logits_BTV - maximum_BT[..., None]).exp().sum(-1),
                # Exactly one rank holds the target.
                torch.where(inside_BT, picked_BT, 0.0),
            ]
        )
        dist.all_reduce(sums, group=group)
        log_partition_BT = sums[0].log()
        ctx.save_for_backward(logits_BTV, maximum_BT + log_partition_BT, local_BT, inside_BT)
        return sums[1] - log_partition_BT

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None, None]:
        """∂ log p_target / ∂ x_v = [v = target] - p_v."""
        (grad_BT,) = grad_outputs
        logits_BTV, log_partition_BT, local_BT, inside_BT = ctx.saved_tensors
        grad_BTV = (logits_BTV - log_partition_BT[..., None]).exp_().mul_(-grad_BT[..., None])
        at_target_BT1 = torch.where(inside_BT, grad_BT, 0.0)[..., None]
        return grad_BTV.scatter_add_(-1, local_BT[..., None], at_target_BT1), None, None, None
