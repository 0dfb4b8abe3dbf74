"""Where the positions of padded or packed sequences lie when context ranks share every sequence.

Pure arithmetic on lengths, used by the model adapter to cut its inputs and to put its outputs back together,
and by the attention to order keys and values.

All sequences of a microbatch, each padded to its own length, laid end to end in the order of the batch, form
the *stream*. Each of R context ranks holds 2 of the 2 R equal chunks of every sequence, chunk r and chunk
2 R - 1 - r ("zigzag"), so that causal attention costs every rank the same. A rank's slots are its positions of
the first sequence, then those of the second, and so on. This is Megatron-Core's convention
(`get_batch_on_this_cp_rank` for padded batches, Transformer Engine's `thd_get_partitioned_indices` for packed
ones).

Invariant: every position of the stream is in exactly one slot of one rank, and all ranks have equally many.

Shape legend: R context ranks, N slots of a rank, P positions of the stream (P = R N).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamMap:
    """The stream of one microbatch and its cut over context ranks.

    Attributes:
        lengths: padded length of each sequence; a multiple of 2 R where R > 1.
        row_P, position_P: int64; the sequence of a position of the stream, and its place in it.
        order_RN: int64; the position of the stream that is in slot n of rank r.
        slot_P: int64; the inverse: where each position is when the ranks' slots are laid end to end.
    """

    lengths: tuple[int, ...]
    row_P: Tensor
    position_P: Tensor
    order_RN: Tensor
    slot_P: Tensor

    def next_token_slots(self, width: int) -> Tensor:
        """int64 [B, width - 1]; the slot whose output predicts token j + 1 of each sequence. Beyond the padded
        end of a sequence it is some slot.
        """
        length_B1 = torch.tensor(self.lengths)[:, None]
        start_B1 = length_B1.cumsum(0) - length_B1
        position_BT = torch.minimum(torch.arange(width - 1)[None], length_B1 - 1)
        return self.slot_P[start_B1 + position_BT]


def stream_map(lengths: Sequence[int], *, ranks: int) -> StreamMap:
    """The map for sequences of these padded lengths.

    Raises: ValueError if there are none, or if 2 R does not divide one of them and R > 1.
    """
    order_RN = zigzag_order(tuple(lengths), ranks)
    length_B = torch.tensor(tuple(lengths))
    start_B = length_B.cumsum(0) - length_B
    row_P = torch.repeat_interleave(torch.arange(len(length_B)), length_B)
    return StreamMap(
        lengths=tuple(lengths),
        row_P=row_P,
        position_P=torch.arange(len(row_P)) - start_B[row_P],
        order_RN=order_RN,
        slot_P=zigzag_slots(tuple(lengths), ranks),
    )


# Every layer of a pass asks for the same ones.
@functools.lru_cache(maxsize=64)
def zigzag_order(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """int64 [R, N]; the position of the stream that is in slot n of rank r.

    Raises: ValueError as `stream_map`.
    """
    parts = 2 * ranks if ranks > 1 else 1
    if not lengths or min(lengths) < 1 or any(length % parts for length in lengths):
        raise ValueError(
            f"sequences of {list(lengths)} positions cannot be cut over {ranks} context ranks: every length "
            f"must be a positive multiple of {parts}"
        )
    length_B = torch.tensor(lengths)
    if ranks == 1:
        return torch.arange(int(length_B.sum()))[None]
    chunk_B = length_B // parts
    row_N = torch.repeat_interleave(torch.arange(len(lengths)), 2 * chunk_B)
    chunk_N = chunk_B[row_N]
    start_N = (length_B.cumsum(0) - length_B)[row_N]
    local_start_N = ((2 * chunk_B).cumsum(0) - 2 * chunk_B)[row_N]
    offset_N = torch.arange(len(row_N)) - local_start_N
    rank_R1 = torch.arange(ranks)[:, None]
    # The first half of a rank's slots of a sequence is chunk r, the second half chunk 2 R - 1 - r.
    first_RN = rank_R1 * chunk_N + offset_N
    second_RN = (parts - 1 - rank_R1) * chunk_N + offset_N - chunk_N
    return start_N + torch.where(offset_N < chunk_N, first_RN, second_RN)


@functools.lru_cache(maxsize=64)
def zigzag_slots(lengths: tuple[int, ...], ranks: int) -> Tensor:
    """int64 [P]; the inverse of `zigzag_order`: where each position of the stream is in the ranks' slots, laid end
    to end.

    Raises: ValueError as `stream_map`.
    """
    order_P = zigzag_order(lengths, ranks).flatten()
    slot_P = torch.empty_like(order_P)
    slot_P[order_P] = torch.arange(len(order_P))
    return slot_P
