"""What goes in and out of both losses besides tensors of tokens: global counts, the loss share, metric parts.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from megatron_ppo.numerics.masking import trainable_mask
from megatron_ppo.numerics.reduce import MetricPart


class MaskedSequences(Protocol):
    """The part of `data.batch.TrainBatch` that counting needs."""

    @property
    def response_mask_BT(self) -> Tensor: ...

    @property
    def sample_mask_B(self) -> Tensor: ...

    @property
    def reward_B(self) -> Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCounts:
    """Denominators of one optimizer step, over all its microbatches and data-parallel ranks.

    Attributes:
        valid_tokens: response tokens of kept sequences, position 0 excluded.
        valid_sequences: kept sequences with at least one such token.
        positive_tokens: such tokens of sequences with reward > 0; the denominator of the NLL term.
    """

    valid_tokens: int
    valid_sequences: int
    positive_tokens: int

    @classmethod
    def of(cls, batch: MaskedSequences) -> LossCounts:
        """The counts of a *whole* minibatch; never of a microbatch or of one rank's share."""
        mask_BT = trainable_mask(batch.response_mask_BT, batch.sample_mask_B)
        return cls(
            valid_tokens=int(mask_BT.sum()),
            valid_sequences=int(mask_BT.any(dim=1).sum()),
            positive_tokens=int((mask_BT & (batch.reward_B > 0.0)[:, None]).sum()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """A loss of one microbatch.

    Attributes:
        loss: scalar with gradient; this microbatch's share, already divided by global counts. Shares *sum* to
            the minibatch's loss. Exactly 0 when every token is masked out.
        sequence_loss_B: float [B], detached; each sequence's share, to name the sequence when one is not
            finite.
        metrics: parts to be joined by `reduce.combine`; names carry their `train/` prefix.
    """

    loss: Tensor
    sequence_loss_B: Tensor
    metrics: Mapping[str, MetricPart]


def share(x: Tensor, mask: Tensor, count: int) -> MetricPart:
    """Sum over the mask divided by a global count; float64, because one step sums many small numbers."""
    selected = torch.where(mask, x.detach(), torch.zeros_like(x))
    return MetricPart(value=selected.double().sum() / max(count, 1), kind="sum")


def extremum(x: Tensor, mask: Tensor, *, kind: Literal["min", "max"]) -> MetricPart:
    """Smallest or largest masked-in entry; infinite, so neutral when parts are joined, if there is none."""
    if kind == "min":
        value = torch.where(mask, x.detach(), math.inf).amin()
    else:
        value = torch.where(mask, x.detach(), -math.inf).amax()
    return MetricPart(value=value.double(), kind=kind)
