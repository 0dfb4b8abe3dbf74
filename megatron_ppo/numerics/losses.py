"""The policy loss. Driven by the model adapter, once per microbatch; `value_losses.py` holds the critic's.

Everything that a caller of either loss needs is importable from here: settings, `LossCounts`, `LossOutput`,
`policy_loss`, `value_loss`.

Invariant: every term is divided by a *global* count of the minibatch (`LossCounts`), so the losses of any
split of a minibatch into microbatches and data-parallel shares add up to the loss of the whole, gradients
included. The caller must sum, never average. Excluded tokens are selected away before any arithmetic
(`masking.py`).

Symbols: lp = current, old = at the start of the step, gen = by the engine when sampled, ref = reference
log-prob; ρ = exp(lp - old) the PPO ratio, w = exp(old - gen) the importance weight, A = advantage.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ppo.numerics.kl import clamp_symmetric, kl_of_log_ratio
from megatron_ppo.numerics.loss_output import LossCounts, LossOutput, extremum, share
from megatron_ppo.numerics.loss_settings import KLType, PolicyLossSettings, TruncationType, ValueLossSettings
from megatron_ppo.numerics.masking import select, sequence_mean, trainable_mask
from megatron_ppo.numerics.reduce import MetricPart
from megatron_ppo.numerics.value_losses import value_loss

__all__ = [
    "KLType",
    "LossCounts",
    "LossOutput",
    "PolicyLossSettings",
    "TruncationType",
    "ValueLossSettings",
    "policy_loss",
    "value_loss",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tokens:
    """The inputs after selection: finite zeros at excluded tokens."""

    mask: Tensor
    logprob: Tensor
    old: Tensor
    generation: Tensor
    advantage: Tensor
    reference: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ratio:
    """ρ and clipped ρ of every token; [B, T], with gradient."""

    plain: Tensor
    clipped: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class _Weight:
    """w of every token as applied, [B, T], detached; whether it was out of bounds, bool [B, T]."""

    applied: Tensor
    out_of_bounds: Tensor
    per_sequence: bool


def policy_loss(
    *,
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    generation_logprobs_BT: Tensor,
    ref_logprobs_BT: Tensor | None,
    advantages_BT: Tensor,
    response_mask_BT: Tensor,
    sample_mask_B: Tensor,
    reward_B: Tensor,
    settings: PolicyLossSettings,
    counts: LossCounts,
) -> LossOutput:
    """This microbatch's share of the clipped policy-gradient loss of its minibatch.

    L = reduce(w · l) + β · reduce(KL(policy || reference)) + μ · mean(-lp where reward > 0)
    l = max(-A ρ, -A clip(ρ, 1 - ratio_clip_min, 1 + ratio_clip_max)); variants: see `PolicyLossSettings`.

    `reduce` is the mean over the minibatch's tokens (token_level_loss), or the mean over its sequences of
    their token means.

    Args:
        logprobs_BT: float [B, T] nats, with gradient; log-prob of token j at position j; 0 ignored.
        old_logprobs_BT, generation_logprobs_BT, ref_logprobs_BT: float [B, T] nats, detached.
        advantages_BT: float [B, T], detached.   reward_B: float [B]; only its sign is used, for the NLL term.
        response_mask_BT: bool [B, T].   sample_mask_B: bool [B].
        counts: of the whole minibatch over all microbatches and data-parallel ranks.
    Returns:
        The loss and the metrics `train/...`; see `LossOutput`.
    Raises: ValueError if shapes differ, or the settings have a KL term and `ref_logprobs_BT` is None.
    Source: PPO arXiv:1707.06347 eq. 7; decoupled weight arXiv:2110.00641; dual clip arXiv:1912.09729; GSPO
        arXiv:2507.18071; CISPO arXiv:2506.13585; NLL term VAPO arXiv:2504.05118 eq. 10.
    """
    mask_BT = trainable_mask(response_mask_BT, sample_mask_B)
    logprob_BT = select(logprobs_BT, mask_BT, name="logprobs_BT")
    old_BT = select(old_logprobs_BT, mask_BT, name="old_logprobs_BT")
    tokens = _Tokens(
        mask=mask_BT,
        logprob=logprob_BT,
        old=logprob_BT.detach() if settings.force_on_policy_ratio else old_BT.detach(),
        generation=select(generation_logprobs_BT, mask_BT, name="generation_logprobs_BT").detach(),
        advantage=select(advantages_BT, mask_BT, name="advantages_BT").detach(),
        reference=None
        if ref_logprobs_BT is None
        else select(ref_logprobs_BT, mask_BT, name="ref_logprobs_BT").detach(),
    )
    ratio = _ratio(tokens, settings)
    weight = _importance_weight(tokens, settings)
    loss_BT = _surrogate(tokens, ratio, settings)
    if settings.use_importance_sampling_correction:
        loss_BT = loss_BT * weight.applied
    loss_B = _reduce(loss_BT, mask_BT, settings, counts)
    metrics = _ratio_metrics(tokens, ratio, settings, counts)
    metrics |= _weight_metrics(tokens, weight, settings, counts)
    metrics |= _mismatch_metrics(tokens, settings, counts)

    has_kl_term = settings.reference_policy_kl_penalty > 0.0 and not settings.use_kl_in_reward
    if tokens.reference is not None:
        kl_B = _reduce(_kl_BT(tokens, tokens.reference, settings), mask_BT, settings, counts)
        metrics["train/kl_penalty"] = MetricPart(value=kl_B.detach().double().sum(), kind="sum")
        if has_kl_term:
            loss_B = loss_B + settings.reference_policy_kl_penalty * kl_B
    elif has_kl_term:
        raise ValueError(
            f"loss.reference_policy_kl_penalty is {settings.reference_policy_kl_penalty} "
            "but ref_logprobs_BT is None"
        )
    if settings.positive_example_nll_weight > 0.0:
        nll_B = _positive_nll(tokens, reward_B, counts)
        metrics["train/positive_nll_loss"] = MetricPart(value=nll_B.detach().double().sum(), kind="sum")
        loss_B = loss_B + settings.positive_example_nll_weight * nll_B
    metrics["train/loss"] = MetricPart(value=loss_B.detach().double().sum(), kind="sum")
    return LossOutput(loss=loss_B.sum(), sequence_loss_B=loss_B.detach(), metrics=metrics)


def _reduce(x_BT: Tensor, mask_BT: Tensor, settings: PolicyLossSettings, counts: LossCounts) -> Tensor:
    """[B]; each sequence's share of the minibatch's reduction."""
    if settings.token_level_loss:
        return torch.where(mask_BT, x_BT, 0.0).sum(dim=1) / max(counts.valid_tokens, 1)
    return sequence_mean(x_BT, mask_BT) / max(counts.valid_sequences, 1)


def _ratio(tokens: _Tokens, settings: PolicyLossSettings) -> _Ratio:
    log_ratio_BT = tokens.logprob - tokens.old
    if settings.sequence_level_importance_ratios:
        log_ratio_BT = sequence_mean(log_ratio_BT, tokens.mask)[:, None].expand_as(log_ratio_BT)
    if settings.disable_ppo_ratio:
        # The ratio is only watched then; a gradient through it could only do harm.
        log_ratio_BT = log_ratio_BT.detach()
    ratio_BT = log_ratio_BT.exp()
    clipped_BT = ratio_BT.clamp(1.0 - settings.ratio_clip_min, 1.0 + settings.ratio_clip_max)
    return _Ratio(plain=ratio_BT, clipped=clipped_BT)


def _surrogate(tokens: _Tokens, ratio: _Ratio, settings: PolicyLossSettings) -> Tensor:
    """[B, T]; loss of each token before the importance weight."""
    advantage_BT = tokens.advantage
    if settings.disable_ppo_ratio:
        return -advantage_BT * tokens.logprob
    if settings.use_cispo:
        return -advantage_BT * ratio.clipped.detach() * tokens.logprob
    loss_BT = torch.maximum(-advantage_BT * ratio.plain, -advantage_BT * ratio.clipped)
    if settings.ratio_clip_c is not None:
        capped_BT = torch.minimum(loss_BT, -advantage_BT * settings.ratio_clip_c)
        loss_BT = torch.where(advantage_BT < 0.0, capped_BT, loss_BT)
    return loss_BT


def _importance_weight(tokens: _Tokens, settings: PolicyLossSettings) -> _Weight:
    """w = exp(old - gen) per token, or exp of its sum over the sequence where the ratio is per sequence.

    A weight that is NaN or infinite becomes 0, which drops the token. Truncation follows the settings.
    """
    log_weight_BT = tokens.old - tokens.generation
    per_sequence = settings.sequence_level_importance_ratios
    if per_sequence:
        log_weight_BT = log_weight_BT.sum(dim=1, keepdim=True).expand_as(log_weight_BT)
    weight_BT = log_weight_BT.exp()
    finite_BT = torch.isfinite(weight_BT)
    weight_BT = torch.where(finite_BT, weight_BT, 0.0)
    kind, high = settings.truncated_importance_sampling_type, settings.truncated_importance_sampling_ratio
    if kind is None or high is None:
        return _Weight(
            applied=weight_BT, out_of_bounds=torch.zeros_like(tokens.mask), per_sequence=per_sequence
        )
    low = settings.truncated_importance_sampling_ratio_min or 0.0
    judged_BT = weight_BT
    if kind == "seq-mask-tis":
        per_sequence = True
        judged_BT = sequence_mean(log_weight_BT, tokens.mask).exp()[:, None].expand_as(weight_BT)
    # Written as "not inside" so that NaN counts as outside.
    outside_BT = ~((judged_BT >= low) & (judged_BT <= high)) | ~finite_BT
    if kind == "tis":
        applied_BT = torch.where(finite_BT, weight_BT.clamp(low, high), 0.0)
    else:
        applied_BT = torch.where(outside_BT, 0.0, weight_BT)
    return _Weight(applied=applied_BT, out_of_bounds=outside_BT, per_sequence=per_sequence)


def _kl_BT(tokens: _Tokens, reference_BT: Tensor, settings: PolicyLossSettings) -> Tensor:
    """[B, T] nats; KL(policy || reference), with the gradient of an expectation under the policy.

    The sampling weight exp(lp - stop_grad(lp)) has the value 1 and adds the score-function gradient; with
    use_on_policy_kl_approximation it is exp(lp - gen), the weight from the engine's to the current policy.
    """
    log_ratio_BT = reference_BT - tokens.logprob
    clamped_BT = clamp_symmetric(log_ratio_BT, settings.kl_input_clamp_value)
    origin_BT = tokens.generation if settings.use_on_policy_kl_approximation else tokens.logprob.detach()
    exponent_BT = tokens.logprob - origin_BT
    # Selected before exp: the gradient of an overflow that is selected away later would be 0 · inf = NaN.
    finite_BT = torch.isfinite(exponent_BT.detach().exp())
    weight_BT = torch.where(finite_BT, torch.where(finite_BT, exponent_BT, 0.0).exp(), 0.0)
    # Where the clamp bites nothing may pull on the policy, so the weight's gradient goes as well.
    weight_BT = torch.where(clamped_BT == log_ratio_BT, weight_BT, weight_BT.detach())
    kl_BT = weight_BT * kl_of_log_ratio(clamped_BT, settings.reference_policy_kl_type)
    return clamp_symmetric(kl_BT, settings.kl_output_clamp_value)


def _positive_nll(tokens: _Tokens, reward_B: Tensor, counts: LossCounts) -> Tensor:
    """[B]; shares of the mean of -lp over the tokens of sequences with reward > 0; exactly 0 for others."""
    positive_BT = tokens.mask & (reward_B > 0.0)[:, None]
    return torch.where(positive_BT, -tokens.logprob, 0.0).sum(dim=1) / max(counts.positive_tokens, 1)


def _ratio_metrics(
    tokens: _Tokens, ratio: _Ratio, settings: PolicyLossSettings, counts: LossCounts
) -> dict[str, MetricPart]:
    mask_BT, plain_BT, clipped_BT = tokens.mask, ratio.plain.detach(), ratio.clipped.detach()
    is_clipped_BT = torch.zeros_like(mask_BT) if settings.disable_ppo_ratio else plain_BT != clipped_BT
    return {
        "train/probs_ratio": share(plain_BT, mask_BT, counts.valid_tokens),
        "train/probs_ratio_min": extremum(plain_BT, mask_BT, kind="min"),
        "train/probs_ratio_max": extremum(plain_BT, mask_BT, kind="max"),
        "train/probs_ratio_clamped": share(clipped_BT, mask_BT, counts.valid_tokens),
        "train/probs_ratio_clamped_min": extremum(clipped_BT, mask_BT, kind="min"),
        "train/probs_ratio_clamped_max": extremum(clipped_BT, mask_BT, kind="max"),
        "train/clip_fraction": share(is_clipped_BT, mask_BT, counts.valid_tokens),
        "train/global_valid_toks": share(mask_BT, mask_BT, 1),
        "train/global_valid_seqs": share(mask_BT.any(dim=1), mask_BT.any(dim=1), 1),
        "train/num_valid_samples": share(mask_BT.any(dim=1), mask_BT.any(dim=1), 1),
    }


def _weight_metrics(
    tokens: _Tokens, weight: _Weight, settings: PolicyLossSettings, counts: LossCounts
) -> dict[str, MetricPart]:
    """Means over tokens, or over sequences where the weight, or the decision to drop, is per sequence."""
    mask_BT = tokens.mask
    metrics: dict[str, MetricPart] = {}
    if settings.sequence_level_importance_ratios:
        per_sequence_B = sequence_mean(weight.applied, mask_BT)
        metrics["train/sampling_importance_ratio"] = share(
            per_sequence_B, mask_BT.any(dim=1), counts.valid_sequences
        )
    else:
        metrics["train/sampling_importance_ratio"] = share(weight.applied, mask_BT, counts.valid_tokens)
    if settings.truncated_importance_sampling_type is not None:
        if weight.per_sequence:
            outside_B = (weight.out_of_bounds & mask_BT).any(dim=1)
            part = share(outside_B, mask_BT.any(dim=1), counts.valid_sequences)
        else:
            part = share(weight.out_of_bounds, mask_BT, counts.valid_tokens)
        metrics["train/is_oob_ratio"] = part
    return metrics


def _mismatch_metrics(
    tokens: _Tokens, settings: PolicyLossSettings, counts: LossCounts
) -> dict[str, MetricPart]:
    """How far the engine's log-probs are from the trainer's at the start of the step, unclamped."""
    mask_BT, count = tokens.mask, counts.valid_tokens
    kind = settings.reference_policy_kl_type
    logprob_BT, old_BT, generation_BT = tokens.logprob.detach(), tokens.old, tokens.generation
    gap_BT = old_BT - generation_BT
    log_mixture_BT = torch.logaddexp(old_BT, generation_BT) - math.log(2.0)
    divergence_BT = 0.5 * (
        kl_of_log_ratio(log_mixture_BT - old_BT, "k3") + kl_of_log_ratio(log_mixture_BT - generation_BT, "k3")
    )
    # E over the current policy of -lp, reweighted from the engine's samples.
    entropy_BT = -(logprob_BT - generation_BT).exp() * logprob_BT
    return {
        "train/token_mult_prob_error": share(gap_BT.abs().exp(), mask_BT, count),
        "train/gen_kl_error": share(kl_of_log_ratio(gap_BT, kind), mask_BT, count),
        "train/policy_kl_error": share(kl_of_log_ratio(-gap_BT, kind), mask_BT, count),
        "train/js_divergence_error": share(divergence_BT, mask_BT, count),
        "train/approx_entropy": share(entropy_BT, mask_BT, count),
    }
