"""Which tokens count, and sums over them that nothing at an excluded token can poison.

Selection (`where`) always comes before arithmetic: multiplying by a mask turns NaN or inf at an excluded
token into NaN, in the loss as well as in the gradient.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor


def trainable_mask(response_mask_BT: Tensor, sample_mask_B: Tensor) -> Tensor:
    """bool [B, T]; True on response tokens of kept sequences. Position 0 has no logits and never counts.

    Raises: ValueError if a mask is not bool or the shapes differ.
    """
    for name, mask in (("response_mask_BT", response_mask_BT), ("sample_mask_B", sample_mask_B)):
        if mask.dtype != torch.bool:
            raise ValueError(f"{name} must be bool, got {mask.dtype}")
    if response_mask_BT.dim() != 2 or sample_mask_B.shape != response_mask_BT.shape[:1]:
        raise ValueError(
            f"masks must be [B, T] and [B], got {tuple(response_mask_BT.shape)} "
            f"and {tuple(sample_mask_B.shape)}"
        )
    mask_BT = response_mask_BT & sample_mask_B[:, None]
    mask_BT[:, :1] = False
    return mask_BT


def select(x_BT: Tensor, mask_BT: Tensor, *, name: str) -> Tensor:
    """`x_BT` where the mask is True, 0 elsewhere; the gradient is exactly 0 elsewhere.

    Raises: ValueError naming `name` if the shapes differ.
    """
    if x_BT.shape != mask_BT.shape:
        raise ValueError(f"{name} must have the mask's shape {tuple(mask_BT.shape)}, got {tuple(x_BT.shape)}")
    return torch.where(mask_BT, x_BT, 0.0)


def sequence_mean(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """[B]; mean over each sequence's masked-in tokens, 0 for a sequence that has none."""
    total_B = torch.where(mask_BT, x_BT, 0.0).sum(dim=1)
    return total_B / mask_BT.sum(dim=1).clamp(min=1)


def last_index(mask_BT: Tensor) -> Tensor:
    """int64 [B]; last masked-in position. Only meaningful for sequences that have one."""
    return mask_BT.shape[1] - 1 - mask_BT.flip(dims=(1,)).int().argmax(dim=1)
