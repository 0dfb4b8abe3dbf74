"""The critic's loss. Driven by the model adapter, once per microbatch; same invariants as `losses.py`.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo.numerics.loss_output import LossCounts, LossOutput, extremum, share
from megatron_ppo.numerics.loss_settings import ValueLossSettings
from megatron_ppo.numerics.masking import select, trainable_mask
from megatron_ppo.numerics.reduce import MetricPart


def value_loss(
    *,
    values_BT: Tensor,
    old_values_BT: Tensor,
    returns_BT: Tensor,
    response_mask_BT: Tensor,
    sample_mask_B: Tensor,
    settings: ValueLossSettings,
    counts: LossCounts,
) -> LossOutput:
    """This microbatch's share of the critic's clipped squared error.

    L = scale / 2 · mean over tokens of max((V - R)², (clip(V, V_old - c, V_old + c) - R)²)

    Args:
        values_BT: float [B, T] or [B, T, 1] reward units, with gradient; V of the state before token j.
        old_values_BT, returns_BT: float [B, T] reward units, detached.
        response_mask_BT: bool [B, T].   sample_mask_B: bool [B].
        counts: of the whole minibatch over all microbatches and data-parallel ranks.
    Returns:
        The loss and the metrics `train/critic/...`; `reduce.finalise` adds `explained_var` from the moments.
    Raises: ValueError if shapes differ.
    Source: PPO arXiv:1707.06347; value clipping as in arXiv:2005.12729, appendix.
    """
    if values_BT.dim() == 3 and values_BT.shape[-1] == 1:
        values_BT = values_BT.squeeze(-1)
    mask_BT = trainable_mask(response_mask_BT, sample_mask_B)
    value_BT = select(values_BT, mask_BT, name="values_BT")
    old_BT = select(old_values_BT, mask_BT, name="old_values_BT").detach()
    return_BT = select(returns_BT, mask_BT, name="returns_BT").detach()

    error_BT = (value_BT - return_BT).square()
    clip_wins_BT = torch.zeros_like(mask_BT)
    if settings.cliprange is not None:
        near_old_BT = old_BT + (value_BT - old_BT).clamp(-settings.cliprange, settings.cliprange)
        clipped_error_BT = (near_old_BT - return_BT).square()
        clip_wins_BT = clipped_error_BT > error_BT
        error_BT = torch.maximum(error_BT, clipped_error_BT)
    loss_B = 0.5 * settings.scale * error_BT.sum(dim=1) / max(counts.valid_tokens, 1)

    residual_BT = (return_BT - value_BT).detach().double()
    tokens = counts.valid_tokens
    return LossOutput(
        loss=loss_B.sum(),
        sequence_loss_B=loss_B.detach(),
        metrics={
            "train/critic/loss": MetricPart(value=loss_B.detach().double().sum(), kind="sum"),
            "train/critic/values_mean": share(value_BT, mask_BT, tokens),
            "train/critic/values_min": extremum(value_BT, mask_BT, kind="min"),
            "train/critic/values_max": extremum(value_BT, mask_BT, kind="max"),
            "train/critic/returns_mean": share(return_BT, mask_BT, tokens),
            "train/critic/returns_sq_mean": share(return_BT.double().square(), mask_BT, tokens),
            "train/critic/residual_sq_mean": share(residual_BT.square(), mask_BT, tokens),
            "train/critic/vf_clipfrac": share(clip_wins_BT, mask_BT, tokens),
        },
    )
