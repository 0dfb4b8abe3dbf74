"""The sequences of one forward pass, on this rank: what the model is fed, and how its outputs become [B, T].

Losses and metrics work on right-padded [B, T] tensors, whatever the model was fed: padded rows or one packed
stream, whole sequences or this context rank's part of each. `Microbatch` stands between the two. It is made
before a pass (`microbatch_of`), the schedule feeds it to the model, and a loss or a scoring function maps the
model's output per position to a number per token with `to_tokens`.

Invariant: every token's score comes from exactly one position of one context rank, and the gradient goes back
to that position only. All context ranks compute the same loss from the same [B, T] scores.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: B sequences, T token positions (right-padded); S rows that the model sees (B, or 1 when packed),
L positions of such a row on this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch, scores_of_tokens
from megatron_ppo.data.microbatch_plan import BatchPolicy, TokenBudget
from megatron_ppo.data.sequence_map import StreamMap, stream_map
from megatron_ppo.mcore.parallel import ParallelContext


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    """Attributes:
    batch: the sequences, right-padded; the same on all ranks of a data-parallel share.
    input_ids_SL, position_ids_SL: int64; what this rank's part of the model is fed.
    target_ids_SL: int64; the token after each position, 0 where there is none.
    packed: where sequences begin in a packed stream; None for padded rows.
    slot_BT: int64 [B, T - 1]; where the score of token j + 1 is among the positions of all context ranks.
    """

    batch: TrainBatch
    input_ids_SL: Tensor
    position_ids_SL: Tensor
    target_ids_SL: Tensor
    packed: PackedSeqParams | None
    slot_BT: Tensor
    context: dist.ProcessGroup

    def to_tokens(self, scores_SL: Tensor) -> Tensor:
        """float32 [B, T]; entry j is the score at position j - 1, 0 at j = 0 and beyond the sequence's end.

        Collective over the context group; differentiable.
        """
        scores_N = scores_SL.float().flatten()
        if self.context.size() > 1:
            # Every context rank computes the whole loss, so the backward pass cuts and must not sum.
            scores_N = gather_from_sequence_parallel_region(
                scores_N, tensor_parallel_output_grad=False, group=self.context
            )
        return scores_of_tokens(scores_N, slot_BT=self.slot_BT, length_B=self.batch.length_B)


def microbatches(
    batch: TrainBatch,
    plan: Sequence[Sequence[int]],
    parallel: ParallelContext,
    *,
    policy: BatchPolicy,
    pad_token_id: int,
) -> list[Microbatch]:
    """One microbatch per group of row indices of `batch`, on the model's device.

    Args:
        plan: the groups of this data-parallel rank.
        policy: what they were made by; says how sequences are laid out, and what lengths are rounded up to (the
            layout's `length_multiple`, or a multiple of that).
    """
    return [
        microbatch_of(batch.select(torch.tensor(rows)), parallel, policy=policy, pad_token_id=pad_token_id)
        for rows in plan
    ]


def microbatch_of(
    batch: TrainBatch, parallel: ParallelContext, *, policy: BatchPolicy, pad_token_id: int
) -> Microbatch:
    """All sequences of `batch` as one microbatch, padded to lengths that the layout can cut."""
    rows, width = batch.token_ids_BT.shape
    packed = isinstance(policy, TokenBudget) and policy.packed
    lengths = batch.length_B.tolist() if packed else [width] * rows
    multiple = policy.multiple
    stream = stream_map([-(-length // multiple) * multiple for length in lengths], ranks=parallel.cp_size)
    mine_N = stream.order_RN[parallel.cp_rank]
    row_N, position_N = stream.row_P[mine_N], stream.position_P[mine_N]
    streams = 1 if packed else rows

    def tokens(at_N: Tensor, fill: int) -> Tensor:
        token_N = batch.token_ids_BT[row_N, at_N.clamp(max=width - 1)]
        return torch.where(at_N < width, token_N, fill).view(streams, -1).to(parallel.device)

    return Microbatch(
        batch=_to_device(batch, parallel.device),
        input_ids_SL=tokens(position_N, pad_token_id),
        position_ids_SL=position_N.view(streams, -1).to(parallel.device),
        target_ids_SL=tokens(position_N + 1, 0),
        packed=_packed_parameters(stream, parallel.device) if packed else None,
        slot_BT=stream.next_token_slots(width).to(parallel.device),
        context=parallel.context,
    )


def _packed_parameters(stream: StreamMap, device: torch.device) -> PackedSeqParams:
    """Boundaries before the cut over context ranks, as Megatron and Transformer Engine expect them.

    Padding counts as the end of its sequence: causality keeps it out of real positions, and fused kernels then
    need no gaps between sequences.
    """
    boundaries = torch.tensor((0, *stream.lengths)).cumsum(0).to(dtype=torch.int32, device=device)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        cu_seqlens_q_padded=boundaries,
        cu_seqlens_kv_padded=boundaries,
        max_seqlen_q=max(stream.lengths),
        max_seqlen_kv=max(stream.lengths),
    )


def _to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    if device.type == "cpu":
        return batch
    moved = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch.replace(**{name: value.to(device) for name, value in moved.items() if value is not None})
