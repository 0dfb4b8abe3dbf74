"""Token rewards, generalised advantage estimation and whitening. Driven by `loop.advantage` once per step.

Invariant: a masked-out token, whatever stands there (NaN included), changes nothing: it is skipped as if cut
out of the sequence.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo.numerics.masking import last_index, select

# Keeps the division finite when all advantages are equal; far below the variance of any real batch.
WHITEN_EPSILON = 1e-8


def place_terminal_reward(reward_B: Tensor, mask_BT: Tensor) -> Tensor:
    """[B, T] reward units; the sequence's reward at its last masked-in token, 0 elsewhere.

    A sequence without masked-in tokens gets no reward. A trailing tool or user turn is masked out, so the
    reward goes to the last token that the policy itself sampled.

    Raises: ValueError if the shapes differ.
    """
    if reward_B.shape != mask_BT.shape[:1]:
        raise ValueError(f"reward_B must have shape {tuple(mask_BT.shape[:1])}, got {tuple(reward_B.shape)}")
    position_T = torch.arange(mask_BT.shape[1], device=mask_BT.device)
    is_last_BT = mask_BT & (position_T == last_index(mask_BT)[:, None])
    return torch.where(is_last_BT, reward_B[:, None], 0.0)


def gae(
    reward_BT: Tensor, value_BT: Tensor, mask_BT: Tensor, *, discount: float, gae_lambda: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimation over response tokens.

    Â_t = δ_t + γλ Â_{t+1},   δ_t = r_t + γ V_{t+1} - V_t,   V = Â = 0 after the last response token
    (no bootstrap, also for a truncated response). t + 1 is the next masked-in token.

    Args:
        reward_BT: float [B, T], reward units. Ignored where the mask is False.
        value_BT: float [B, T], reward units; V of the state *before* token t, detached. Ignored likewise.
        mask_BT: bool [B, T]; True on response tokens. False positions are skipped, not bootstrapped through.
        discount: γ per token, in (0, 1].
        gae_lambda: λ in [0, 1], one for all or [B] one per sequence; 1 = Monte-Carlo, 0 = one-step TD.
    Returns:
        advantage_BT and return_BT = advantage + value, in the dtype of the values, 0 where the mask is False.
    Raises: ValueError if the shapes differ.
    Source: Schulman et al., arXiv:1506.02438, eq. 16. Oracle: tests/unit/numerics/test_gae.py.
    """
    reward_BT = select(reward_BT, mask_BT, name="reward_BT")
    value_BT = select(value_BT, mask_BT, name="value_BT")
    advantage_BT = torch.zeros_like(value_BT)
    next_value_B = value_BT.new_zeros(mask_BT.shape[0])
    next_advantage_B = torch.zeros_like(next_value_B)
    for t in range(mask_BT.shape[1] - 1, -1, -1):
        delta_B = reward_BT[:, t] + discount * next_value_B - value_BT[:, t]
        advantage_B = delta_B + discount * gae_lambda * next_advantage_B
        # Carried forward unchanged over masked-out tokens, which cuts them out of the recursion.
        next_advantage_B = torch.where(mask_BT[:, t], advantage_B, next_advantage_B)
        next_value_B = torch.where(mask_BT[:, t], value_BT[:, t], next_value_B)
        advantage_BT[:, t] = torch.where(mask_BT[:, t], advantage_B, 0.0)
    return advantage_BT, advantage_BT + value_BT


def length_adaptive_lambda(mask_BT: Tensor, *, alpha: float) -> Tensor:
    """float32 [B]; λ = 1 - 1 / max(α · length, 1), within [0, 1]; length counts the masked-in tokens.

    Long responses get a λ near 1, so that the terminal reward still reaches their first tokens.

    Raises: ValueError if alpha is not positive.
    Source: VAPO, Yue et al., arXiv:2504.05118, section 4.2.
    """
    if alpha <= 0.0:
        raise ValueError(f"length_adaptive_alpha must be > 0, got {alpha}")
    length_B = mask_BT.sum(dim=1).to(torch.float32)
    return (1.0 - 1.0 / (alpha * length_B).clamp(min=1.0)).clamp(0.0, 1.0)


def whiten(x_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """(x - mean) / sqrt(var + 1e-8) over all masked-in tokens of the step, unbiased variance; 0 elsewhere.

    A single token has no variance: it becomes 0, like every token of a batch of equal values.
    """
    # The sums run over a whole step's tokens, where float32 would lose digits of small differences.
    selected_BT = select(x_BT, mask_BT, name="x_BT").double()
    count = int(mask_BT.sum())
    mean = selected_BT.sum() / max(count, 1)
    centred_BT = torch.where(mask_BT, selected_BT - mean, 0.0)
    variance = centred_BT.square().sum() / max(count - 1, 1)
    return (centred_BT / (variance + WHITEN_EPSILON).sqrt()).to(x_BT.dtype)
