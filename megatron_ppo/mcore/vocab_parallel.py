"""Log-probs and entropy over a vocabulary that is cut over the tensor group, in bounded memory.

Driven by the policy, in training and in scoring. Own functions instead of Megatron's
`vocab_parallel_cross_entropy`: that one overwrites the logits, keeps a float32 softmax of every position, takes
its group from global state, and its fused variant rounds the gradient to bfloat16.

Invariant: beyond its inputs and the gradients it returns, a call holds the vocabulary of `chunk_size` positions
at a time, in float32, and keeps three numbers per position for the backward pass, which computes the rest again.
Each rank reduces its own vocabulary first; the tensor group joins those figures once per call, so the number of
collectives does not depend on the chunk size.

Shape legend: P positions (any leading shape), V vocabulary entries of this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabShard:
    """The entries of the vocabulary that this rank holds.

    Attributes:
        start: id of the first.   size: how many are tokens; rows and columns beyond are padding, and are
            neither read nor given a gradient.
    """

    group: dist.ProcessGroup
    start: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Attributes:
    logprobs_P: float32 nats of the targets, differentiable.
    entropy_P: float32 nats of the whole distribution, without gradient; None if not asked for.
    """

    logprobs_P: Tensor
    entropy_P: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    shard: VocabShard
    temperature: float
    chunk_size: int
    entropy: bool

    def chunks(self, positions: int) -> Iterator[slice]:
        return (slice(at, at + self.chunk_size) for at in range(0, positions, self.chunk_size))


def scores_of_logits(
    logits_PV: Tensor,
    target_P: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
) -> TokenScores:
    """log softmax(logits / temperature) at the targets, and the entropy of that distribution.

    Args:
        logits_PV: any float format; computed in float32 (float64 stays). The gradient has its format.
        target_P: int64, on every rank of the group the same.
        chunk_size: positions at a time; None = all.
    Raises: ValueError if the shapes do not fit.
    """
    if logits_PV.shape[:-1] != target_P.shape or logits_PV.shape[-1] < shard.size:
        raise ValueError(
            f"logits {list(logits_PV.shape)} do not fit targets {list(target_P.shape)} and {shard.size} "
            "vocabulary entries"
        )
    options = _options(target_P, shard, temperature, chunk_size, entropy)
    rows = logits_PV.reshape(-1, logits_PV.shape[-1])
    return _shaped(_LogitScores.apply(rows, target_P.reshape(-1), options), target_P, entropy)


def scores_of_hidden(
    hidden_PH: Tensor,
    weight_VH: Tensor,
    target_P: Tensor,
    *,
    shard: VocabShard,
    temperature: float = 1.0,
    chunk_size: int | None = None,
    entropy: bool = False,
) -> TokenScores:
    """The same for logits = hidden @ weight^T, of which no more than `chunk_size` positions ever exist.

    The backward pass computes the logits once more. The gradient of `hidden_PH` is this rank's part of the
    sum over the vocabulary: the caller's input must sum it over the tensor group, as the input of Megatron's
    column-parallel layers does.

    Raises: ValueError if the shapes do not fit.
    """
    if (
        hidden_PH.shape[:-1] != target_P.shape
        or hidden_PH.shape[-1] != weight_VH.shape[1]
        or weight_VH.shape[0] < shard.size
    ):
        raise ValueError(
            f"hidden states {list(hidden_PH.shape)}, output weight {list(weight_VH.shape)}, targets "
            f"{list(target_P.shape)} and {shard.size} vocabulary entries do not fit"
        )
    options = _options(target_P, shard, temperature, chunk_size, entropy)
    rows = hidden_PH.reshape(-1, hidden_PH.shape[-1])
    return _shaped(_HiddenScores.apply(rows, weight_VH, target_P.reshape(-1), options), target_P, entropy)


def _options(
    target_P: Tensor, shard: VocabShard, temperature: float, chunk_size: int | None, entropy: bool
) -> _Options:
    if chunk_size is not None and chunk_size < 1:
        raise ValueError(f"chunk_size must be >= 1, got {chunk_size}")
    return _Options(
        shard=shard,
        temperature=temperature,
        chunk_size=max(1, target_P.numel()) if chunk_size is None else chunk_size,
        entropy=entropy,
    )


def _shaped(scores: tuple[Tensor, Tensor], target_P: Tensor, entropy: bool) -> TokenScores:
    logprobs, entropies = scores
    return TokenScores(
        logprobs_P=logprobs.view_as(target_P), entropy_P=entropies.view_as(target_P) if entropy else None
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Targets:
    """Where this rank finds the targets: local row, and whether it is one of this rank's."""

    local_P: Tensor
    inside_P: Tensor

    @classmethod
    def of(cls, target_P: Tensor, shard: VocabShard) -> _Targets:
        local_P = target_P - shard.start
        inside_P = (local_P >= 0) & (local_P < shard.size)
        return cls(local_P=torch.where(inside_P, local_P, 0), inside_P=inside_P)


def _working_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _working(values: Tensor, *, temperature: float) -> Tensor:
    """A copy to compute in: float32 or wider, divided by the temperature."""
    copy = values.to(_working_dtype(values), copy=True)
    return copy if temperature == 1.0 else copy.div_(temperature)


def _joined_scores(
    logits_of: Callable[[slice], Tensor], targets: _Targets, options: _Options, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """(log-probs, entropy, log partition), each [P].

    Per chunk and rank, with m the maximum of this rank's logits x: Σ exp(x - m), Σ exp(x - m)(x - m), and the
    target's x - m. The group's figures follow by moving each to the common maximum.
    H = log Z - Σ_v p_v x_v with x centred and Z = Σ_v exp(x_v).
    """
    positions = len(targets.local_P)
    # Made before the chunks: small tensors that outlive a chunk would be put where its logits were, and the C
    # library's heap would grow with every chunk.
    figures_4P = torch.empty((4, positions), dtype=dtype, device=targets.local_P.device)
    for chunk in options.chunks(positions):
        _own_figures(
            logits_of(chunk),
            targets.local_P[chunk],
            targets.inside_P[chunk],
            options.entropy,
            figures_4P[:, chunk],
        )
    mine_P, total_P, weighted_P, picked_P = figures_4P
    maximum_P = mine_P.clone()
    dist.all_reduce(maximum_P, op=dist.ReduceOp.MAX, group=options.shard.group)
    shift_P = mine_P - maximum_P
    factor_P = shift_P.exp()
    joined_3P = torch.stack(
        [
            total_P * factor_P,
            (weighted_P + shift_P * total_P) * factor_P,
            torch.where(targets.inside_P, picked_P + shift_P, 0.0),
        ]
    )
    dist.all_reduce(joined_3P, group=options.shard.group)
    total_P, weighted_P, picked_P = joined_3P
    log_total_P = total_P.log()
    return picked_P - log_total_P, log_total_P - weighted_P / total_P, maximum_P + log_total_P


def _own_figures(
    logits_PV: Tensor, local_P: Tensor, inside_P: Tensor, entropy: bool, figures_4P: Tensor
) -> None:
    """Write the maximum and the three sums over this rank's entries; overwrites the logits."""
    maximum_P, total_P, weighted_P, picked_P = figures_4P
    torch.amax(logits_PV, dim=-1, out=maximum_P)
    centred_PV = logits_PV.sub_(maximum_P[:, None])
    picked_P.copy_(torch.where(inside_P, centred_PV.gather(-1, local_P[:, None])[:, 0], 0.0))
    if not entropy:
        torch.sum(centred_PV.exp_(), -1, out=total_P)
        weighted_P.zero_()
        return
    weight_PV = centred_PV.exp()
    torch.sum(weight_PV, -1, out=total_P)
    torch.sum(weight_PV.mul_(centred_PV), -1, out=weighted_P)


def _gradient_in_place(
    logits_PV: Tensor, log_partition_P: Tensor, targets: _Targets, chunk: slice, grad_P: Tensor, scale: float
) -> Tensor:
    """g (∂ log p_target / ∂ x_v) = g ([v = target] - p_v) / temperature, where the logits were."""
    local_P, inside_P, grad_P = targets.local_P[chunk], targets.inside_P[chunk], grad_P[chunk]
    logits_PV.sub_(log_partition_P[chunk][:, None]).exp_().mul_(-grad_P[:, None])
    logits_PV.scatter_add_(-1, local_P[:, None], torch.where(inside_P, grad_P, 0.0)[:, None])
    return logits_PV if scale == 1.0 else logits_PV.div_(scale)


class _LogitScores(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits_PV: Tensor, target_P: Tensor, options: _Options) -> tuple[Tensor, Tensor]:
        targets = _Targets.of(target_P, options.shard)

        def logits_of(chunk: slice) -> Tensor:
            return _working(logits_PV[chunk, : options.shard.size], temperature=options.temperature)

        logprobs_P, entropy_P, log_partition_P = _joined_scores(
            logits_of, targets, options, _working_dtype(logits_PV)
        )
        ctx.save_for_backward(logits_PV, log_partition_P, targets.local_P, targets.inside_P)
        ctx.options = options
        ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor, _: Tensor) -> tuple[Tensor, None, None]:
        logits_PV, log_partition_P, local_P, inside_P = ctx.saved_tensors
        options: _Options = ctx.options
        targets = _Targets(local_P=local_P, inside_P=inside_P)
        size, temperature = options.shard.size, options.temperature
        grad_PV = torch.empty_like(logits_PV, memory_format=torch.contiguous_format)
        grad_PV[:, size:] = 0.0
        # Where the formats agree, the result is computed where it stays.
        in_place = _working_dtype(logits_PV) == logits_PV.dtype
        for chunk in options.chunks(len(logits_PV)):
            here_PV = grad_PV[chunk, :size]
            if in_place:
                work_PV = here_PV.copy_(logits_PV[chunk, :size])
                work_PV = work_PV if temperature == 1.0 else work_PV.div_(temperature)
            else:
                work_PV = _working(logits_PV[chunk, :size], temperature=temperature)
            _gradient_in_place(work_PV, log_partition_P, targets, chunk, grad_P, temperature)
            if not in_place:
                here_PV.copy_(work_PV)
        return grad_PV, None, None


class _HiddenScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_PH: Tensor, weight_VH: Tensor, target_P: Tensor, options: _Options
    ) -> tuple[Tensor, Tensor]:
        targets = _Targets.of(target_P, options.shard)
        logprobs_P, entropy_P, log_partition_P = _joined_scores(
            lambda chunk: _chunk_logits(hidden_PH[chunk], weight_VH, options),
            targets,
            options,
            _working_dtype(weight_VH),
        )
        ctx.save_for_backward(hidden_PH, weight_VH, log_partition_P, targets.local_P, targets.inside_P)
        ctx.options = options
        ctx.mark_non_differentiable(entropy_P)
        return logprobs_P, entropy_P

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_P: Tensor, _: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        hidden_PH, weight_VH, log_partition_P, local_P, inside_P = ctx.saved_tensors
        options: _Options = ctx.options
        targets = _Targets(local_P=local_P, inside_P=inside_P)
        real_VH = weight_VH[: options.shard.size]
        grad_PH = torch.empty_like(hidden_PH) if ctx.needs_input_grad[0] else None
        # Summed over chunks in float32: in bfloat16 small chunks would vanish beside the sum.
        wide = _working_dtype(weight_VH)
        grad_VH = torch.zeros_like(weight_VH, dtype=wide) if ctx.needs_input_grad[1] else None
        for chunk in options.chunks(len(hidden_PH)):
            work_PV = _chunk_logits(hidden_PH[chunk], weight_VH, options)
            _gradient_in_place(work_PV, log_partition_P, targets, chunk, grad_P, options.temperature)
            work_PV = work_PV.to(weight_VH.dtype)
            if grad_PH is not None:
                grad_PH[chunk] = work_PV @ real_VH
            if grad_VH is not None:
                chunk_PH = hidden_PH[chunk].to(weight_VH.dtype)
                if wide == weight_VH.dtype:
                    grad_VH[: options.shard.size].addmm_(work_PV.T, chunk_PH)
                else:
                    grad_VH[: options.shard.size].add_(work_PV.T @ chunk_PH)
        return grad_PH, None if grad_VH is None else grad_VH.to(weight_VH.dtype), None, None


def _chunk_logits(hidden_PH: Tensor, weight_VH: Tensor, options: _Options) -> Tensor:
    """[P, V] to compute in. Megatron hands the last stage's output out in float32; the weight's format rules."""
    logits_PV = hidden_PH.to(weight_VH.dtype) @ weight_VH[: options.shard.size].T
    # The product is nobody else's, so float32 needs no copy.
    logits_PV = logits_PV.to(_working_dtype(logits_PV))
    return logits_PV if options.temperature == 1.0 else logits_PV.div_(options.temperature)
