"""Single-sample estimators of KL divergence between two policies.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo.numerics.loss_settings import KLType

# Bounds in nats of the penalty inside the reward, which no setting overrides: the loss term's defaults.
REWARD_INPUT_CLAMP = 20.0
REWARD_OUTPUT_CLAMP = 10.0


def kl_of_log_ratio(log_ratio: Tensor, kind: KLType) -> Tensor:
    """KL(p || q) in nats at tokens drawn from p, from x = log q - log p.

    k1 = -x (unbiased),  k2 = x² / 2 (biased, low variance),  k3 = exp(x) - 1 - x (unbiased, never negative).

    Source: Schulman, "Approximating KL Divergence" (2020).
    """
    if kind == "k1":
        return -log_ratio
    if kind == "k2":
        return 0.5 * log_ratio.square()
    return torch.expm1(log_ratio) - log_ratio


def clamp_symmetric(x: Tensor, bound: float | None) -> Tensor:
    """`x` within [-bound, bound]; unchanged if the bound is None."""
    return x if bound is None else x.clamp(-bound, bound)


def reward_kl(logprobs_BT: Tensor, ref_logprobs_BT: Tensor, kind: KLType) -> Tensor:
    """[B, T] nats; KL(policy || reference) per token for a penalty in the reward, clamped on both sides."""
    log_ratio_BT = clamp_symmetric(ref_logprobs_BT - logprobs_BT, REWARD_INPUT_CLAMP)
    return clamp_symmetric(kl_of_log_ratio(log_ratio_BT, kind), REWARD_OUTPUT_CLAMP)
