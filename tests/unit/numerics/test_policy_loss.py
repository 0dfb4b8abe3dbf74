"""The policy loss against hand-made numbers, one variant at a time; test_loss_invariants.py has properties.

Numbers are given to four digits; a loss must agree to half a unit of the last one.
"""

from __future__ import annotations

import math

import pytest
import torch
from microbatch import DTYPE, Microbatch, metrics_of, one_sequence, with_ratios

from megatron_ppo.numerics.losses import LossCounts, PolicyLossSettings

FOUR_DIGITS = 5e-5
# A handful of float64 operations.
EXACT = 1e-12

A = [1.0, -1.0, 2.0]
RATIOS = [0.5, 1.0, 1.5]
GENERATION = [-0.5, -1.5, -0.8]

PLAIN = PolicyLossSettings(use_importance_sampling_correction=False)


def plain(**changes: object) -> PolicyLossSettings:
    return PolicyLossSettings(use_importance_sampling_correction=False, **changes)  # type: ignore[arg-type]


def truncated(kind: str, high: float, low: float | None = None, **changes: object) -> PolicyLossSettings:
    return PolicyLossSettings(
        truncated_importance_sampling_type=kind,  # type: ignore[arg-type]
        truncated_importance_sampling_ratio=high,
        truncated_importance_sampling_ratio_min=low,
        **changes,  # type: ignore[arg-type]
    )


def gradient(batch: Microbatch, settings: PolicyLossSettings) -> list[float]:
    """Of the loss with respect to the response tokens' log-probs, of a batch made by `one_sequence`."""
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    batch.replace(logprobs_BT=logprobs_BT).loss(settings).loss.backward()
    assert logprobs_BT.grad is not None
    return logprobs_BT.grad[0, 1:].tolist()


def test_clipped_loss_is_the_worse_of_the_clipped_and_the_plain_branch() -> None:
    batch = with_ratios(RATIOS, advantages=A)
    assert float(batch.loss(PLAIN).loss) == pytest.approx((-0.5 + 1.0 - 2.4) / 3, abs=EXACT)
    # Token 3 is clipped, so nothing pulls on it; the others move with -A ρ.
    assert gradient(batch, PLAIN) == pytest.approx([-0.5 / 3, 1.0 / 3, 0.0], abs=EXACT)


def test_clip_bounds_may_differ() -> None:
    batch = with_ratios([0.5, 1.5], advantages=[-1.0, 1.0])
    loss = batch.loss(plain(ratio_clip_min=0.3, ratio_clip_max=0.1)).loss
    assert float(loss) == pytest.approx((0.7 - 1.1) / 2, abs=EXACT)


def test_dual_clip_bounds_the_loss_of_negative_advantages() -> None:
    batch = with_ratios([0.5, 1.0, 10.0], advantages=[1.0, -1.0, -4.0])
    settings = plain(ratio_clip_c=3.0)
    assert float(batch.loss(settings).loss) == pytest.approx((-0.5 + 1.0 + 12.0) / 3, abs=EXACT)
    assert gradient(batch, settings)[2] == 0.0


def test_dual_clip_leaves_positive_advantages_alone() -> None:
    batch = with_ratios([0.1, 10.0], advantages=[2.0, 2.0])
    assert torch.equal(batch.loss(plain(ratio_clip_c=3.0)).loss, batch.loss(PLAIN).loss)


def test_reinforce_weights_logprobs_by_advantages() -> None:
    batch = one_sequence(advantages=A, logprobs=[-0.5, -1.0, -1.5], old=[-9.0, -9.0, -9.0])
    output = batch.loss(plain(disable_ppo_ratio=True))
    assert float(output.loss) == pytest.approx(0.8333, abs=FOUR_DIGITS)
    assert metrics_of(output)["train/clip_fraction"] == 0.0
    assert gradient(batch, plain(disable_ppo_ratio=True)) == pytest.approx([-1 / 3, 1 / 3, -2 / 3], abs=EXACT)


def test_forced_ratio_is_exactly_one_with_gradient_whatever_the_old_logprobs() -> None:
    batch = one_sequence(advantages=A, logprobs=[-0.5, -1.0, -1.5], old=[-10.0, -10.0, -10.0])
    settings = plain(force_on_policy_ratio=True)
    output = batch.loss(settings)
    assert float(output.loss) == pytest.approx(-0.6667, abs=FOUR_DIGITS)
    metrics = metrics_of(output)
    for name in ("probs_ratio", "probs_ratio_clamped"):
        for suffix in ("", "_min", "_max"):
            assert metrics[f"train/{name}{suffix}"] == 1.0
    assert gradient(batch, settings) == pytest.approx([-1 / 3, 1 / 3, -2 / 3], abs=EXACT)
    ignored = batch.replace(old_logprobs_BT=torch.full_like(batch.old_logprobs_BT, math.nan))
    assert torch.equal(ignored.loss(settings).loss, output.loss)


def test_k3_penalty_without_advantages_is_the_mean_estimate_times_beta() -> None:
    batch = one_sequence(advantages=[0.0] * 3, logprobs=[0.0, -1.0, -2.0], reference=[-1.0] * 3)
    output = batch.loss(plain(reference_policy_kl_penalty=0.1))
    assert float(output.loss) == pytest.approx(0.0362, abs=FOUR_DIGITS)
    expected = (1.0 / math.e + 0.0 + math.e - 2.0) / 3
    assert metrics_of(output)["train/kl_penalty"] == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize(
    ("kind", "expected"), [("k1", (1.0, -1.0)), ("k2", (0.5, 0.5)), ("k3", (0.3679, 0.7183))]
)
def test_each_kl_type_has_its_known_value(kind: str, expected: tuple[float, float]) -> None:
    for logprob, value in zip((0.0, -2.0), expected, strict=True):  # ref - lp = -1, then +1
        batch = one_sequence(advantages=[0.0], logprobs=[logprob], reference=[-1.0])
        settings = plain(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
        assert float(batch.loss(settings).loss) == pytest.approx(value, abs=FOUR_DIGITS)


def test_kl_gradient_is_that_of_the_expectation_under_the_policy() -> None:
    """The estimate's gradient, summed over a small vocabulary with its probabilities, is that of KL."""
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=DTYPE, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.3], dtype=DTYPE).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    (exact,) = torch.autograd.grad((logprobs.exp() * (logprobs - reference)).sum(), logits, retain_graph=True)
    for kind in ("k1", "k3"):
        estimate = torch.zeros_like(logits)
        for token in range(3):
            batch = one_sequence(advantages=[0.0], logprobs=[0.0], reference=[float(reference[token])])
            logprobs_BT = torch.stack([torch.zeros((), dtype=DTYPE), logprobs[token]])[None]
            settings = plain(reference_policy_kl_penalty=1.0, reference_policy_kl_type=kind)
            loss = batch.replace(logprobs_BT=logprobs_BT).loss(settings).loss
            (part,) = torch.autograd.grad(loss, logits, retain_graph=True)
            estimate += float(logprobs[token].detach().exp()) * part
        assert estimate.tolist() == pytest.approx(exact.tolist(), abs=EXACT)


def test_kl_clamps_bound_the_value_and_cut_the_gradient() -> None:
    batch = one_sequence(advantages=[0.0], logprobs=[-50.0], reference=[-1.0])
    settings = plain(reference_policy_kl_penalty=1.0)
    assert float(batch.loss(settings).loss) == 10.0
    assert gradient(batch, settings) == [0.0]
    wide = plain(reference_policy_kl_penalty=1.0, reference_policy_kl_type="k1", kl_output_clamp_value=None)
    assert float(batch.loss(wide).loss) == -20.0
    assert gradient(batch, wide) == [0.0]  # the input clamp bites, so the sampling weight is detached as well
    free = plain(
        reference_policy_kl_penalty=1.0,
        reference_policy_kl_type="k1",
        kl_input_clamp_value=None,
        kl_output_clamp_value=None,
    )
    assert float(batch.loss(free).loss) == -49.0
    assert gradient(batch, free) == [-49.0 + 1.0]


def test_on_policy_kl_approximation_weights_by_current_over_generation() -> None:
    batch = one_sequence(advantages=[0.0], logprobs=[-1.0], generation=[-1.5], reference=[-2.0])
    settings = plain(reference_policy_kl_penalty=1.0, use_on_policy_kl_approximation=True)
    assert float(batch.loss(settings).loss) == pytest.approx(math.exp(0.5) / math.e, abs=EXACT)
    overflow = one_sequence(advantages=[0.0], logprobs=[-1.0], generation=[-2000.0], reference=[-2.0])
    assert float(overflow.loss(settings).loss) == 0.0
    assert gradient(overflow, settings) == [0.0]


def test_kl_in_the_reward_adds_no_loss_term() -> None:
    batch = one_sequence(advantages=A, logprobs=[-1.0] * 3, reference=[-2.0] * 3)
    settings = plain(reference_policy_kl_penalty=0.5, use_kl_in_reward=True)
    assert torch.equal(batch.loss(settings).loss, batch.loss(PLAIN).loss)


def test_kl_term_without_reference_logprobs_is_refused() -> None:
    batch = one_sequence(advantages=A, logprobs=[-1.0] * 3)
    with pytest.raises(
        ValueError, match=r"loss.reference_policy_kl_penalty is 0.1 but ref_logprobs_BT is None"
    ):
        batch.loss(plain(reference_policy_kl_penalty=0.1))


def test_cispo_takes_its_gradient_through_the_logprob_only() -> None:
    batch = with_ratios(RATIOS, advantages=A)
    settings = plain(use_cispo=True)
    assert float(batch.loss(settings).loss) == pytest.approx(0.5938, abs=FOUR_DIGITS)
    # -A · clip(ρ) / 3: also for the clipped token, and no factor from the ratio itself.
    assert gradient(batch, settings) == pytest.approx([-0.8 / 3, 1.0 / 3, -2.4 / 3], abs=EXACT)


def test_cispo_with_the_staleness_correction() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    assert float(batch.loss(PolicyLossSettings(use_cispo=True)).loss) == pytest.approx(
        0.1137, abs=FOUR_DIGITS
    )


def test_untruncated_correction_multiplies_each_token_by_old_over_generation() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    weights = [math.exp(-1.0 - generation) for generation in GENERATION]
    tokens = [-0.5, 1.0, -2.4]
    output = batch.loss(PolicyLossSettings())
    assert float(output.loss) == pytest.approx(sum(w * x for w, x in zip(weights, tokens, strict=True)) / 3)
    assert metrics_of(output)["train/sampling_importance_ratio"] == pytest.approx(sum(weights) / 3)
    assert "train/is_oob_ratio" not in metrics_of(output)


def test_correction_off_still_reports_the_weight() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    off, on = metrics_of(batch.loss(PLAIN)), metrics_of(batch.loss(PolicyLossSettings()))
    assert off["train/sampling_importance_ratio"] == on["train/sampling_importance_ratio"]
    assert float(batch.loss(PLAIN).loss) == pytest.approx(-0.6333, abs=FOUR_DIGITS)


def test_weight_carries_no_gradient_into_generation_or_old_logprobs() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    old_BT = batch.old_logprobs_BT.clone().requires_grad_()
    generation_BT = batch.generation_logprobs_BT.clone().requires_grad_()
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    batch = batch.replace(
        logprobs_BT=logprobs_BT, old_logprobs_BT=old_BT, generation_logprobs_BT=generation_BT
    )
    batch.loss(PolicyLossSettings()).loss.backward()
    assert logprobs_BT.grad is not None
    assert old_BT.grad is None
    assert generation_BT.grad is None


def test_tis_caps_the_weight() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    output = batch.loss(truncated("tis", 0.8))
    assert float(output.loss) == pytest.approx(-0.4744, abs=FOUR_DIGITS)
    metrics = metrics_of(output)
    assert metrics["train/sampling_importance_ratio"] == pytest.approx(
        (0.6065 + 0.8 + 0.8) / 3, abs=FOUR_DIGITS
    )
    assert metrics["train/is_oob_ratio"] == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("low", "weights", "out_of_bounds"), [(None, (0.1, 1.0, 2.0), 1 / 3), (0.5, (0.5, 1.0, 2.0), 2 / 3)]
)
def test_tis_counts_and_clamps_weights_out_of_bounds(
    low: float | None, weights: tuple[float, ...], out_of_bounds: float
) -> None:
    generation = [-1.0 - math.log(weight) for weight in (0.1, 1.0, 3.0)]
    for token in range(3):
        # REINFORCE with lp = -1 and the advantage on one token makes the loss a third of that token's weight.
        advantages = [float(j == token) for j in range(3)]
        batch = one_sequence(advantages=advantages, logprobs=[-1.0] * 3, generation=generation)
        output = batch.loss(truncated("tis", 2.0, low, disable_ppo_ratio=True))
        assert float(output.loss) == pytest.approx(weights[token] / 3, abs=EXACT)
    assert metrics_of(output)["train/is_oob_ratio"] == pytest.approx(out_of_bounds)
    assert metrics_of(output)["train/sampling_importance_ratio"] == pytest.approx(sum(weights) / 3)


def test_icepop_drops_tokens_out_of_bounds() -> None:
    batch = with_ratios([1.0] * 3, advantages=A, generation=[-0.5, -3.5, -0.8])
    output = batch.loss(truncated("icepop", 5.0, 0.5))
    assert float(output.loss) == pytest.approx(-0.7480, abs=FOUR_DIGITS)
    metrics = metrics_of(output)
    assert metrics["train/sampling_importance_ratio"] == pytest.approx((0.6065 + 0.8187) / 3, abs=FOUR_DIGITS)
    assert metrics["train/is_oob_ratio"] == pytest.approx(1 / 3)
    assert gradient(batch, truncated("icepop", 5.0, 0.5))[1] == 0.0


def test_seq_mask_tis_drops_sequences_by_their_geometric_mean_and_keeps_raw_weights() -> None:
    near = with_ratios(RATIOS, advantages=A, generation=[-0.5, -1.5, -1.0])  # mean of old - gen is 0
    settings = truncated("seq-mask-tis", 1.002, 0.999)
    weights = [math.exp(-0.5), math.exp(0.5), 1.0]
    expected = sum(w * x for w, x in zip(weights, (-0.5, 1.0, -2.4), strict=True)) / 3
    assert float(near.loss(settings).loss) == pytest.approx(expected, abs=EXACT)
    assert metrics_of(near.loss(settings))["train/is_oob_ratio"] == 0.0
    far = with_ratios(RATIOS, advantages=A, generation=[-0.5, -1.5, -0.9])
    output = far.loss(settings)
    assert float(output.loss) == 0.0
    assert metrics_of(output)["train/is_oob_ratio"] == 1.0
    assert metrics_of(output)["train/sampling_importance_ratio"] == 0.0


@pytest.mark.parametrize("generation", [-2000.0, math.nan, -math.inf])
@pytest.mark.parametrize("low", [None, 0.5])
def test_weight_that_is_not_finite_drops_its_token(generation: float, low: float | None) -> None:
    batch = with_ratios([1.0, 1.0], advantages=[1.0, 1.0], generation=[generation, -1.0])
    output = batch.loss(truncated("tis", 2.0, low))
    assert float(output.loss) == pytest.approx(-0.5, abs=EXACT)
    assert metrics_of(output)["train/is_oob_ratio"] == 0.5


def gspo(**changes: object) -> PolicyLossSettings:
    return PolicyLossSettings(
        sequence_level_importance_ratios=True,
        token_level_loss=False,
        **changes,  # type: ignore[arg-type]
    )


def test_gspo_uses_the_geometric_mean_of_the_ratios() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    output = batch.loss(gspo(use_importance_sampling_correction=False))
    assert float(output.loss) == pytest.approx(-0.6057, abs=FOUR_DIGITS)
    metrics = metrics_of(output)
    assert metrics["train/probs_ratio_min"] == pytest.approx(0.9086, abs=FOUR_DIGITS)
    assert metrics["train/probs_ratio_max"] == pytest.approx(0.9086, abs=FOUR_DIGITS)


def test_gspo_weights_by_the_product_of_the_sequences_importance_weights() -> None:
    batch = with_ratios(RATIOS, advantages=A, generation=GENERATION)
    output = batch.loss(gspo())
    assert float(output.loss) == pytest.approx(-0.4959, abs=FOUR_DIGITS)
    assert metrics_of(output)["train/sampling_importance_ratio"] == pytest.approx(0.8187, abs=FOUR_DIGITS)
    capped = gspo(truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=0.8)
    assert float(batch.loss(capped).loss) == pytest.approx(-0.4846, abs=FOUR_DIGITS)
    assert metrics_of(batch.loss(capped))["train/is_oob_ratio"] == 1.0


def test_sequence_level_loss_is_the_mean_over_sequences_of_their_token_means() -> None:
    mask_BT = torch.tensor([[False, True, True, True], [False, True, False, False]])
    zeros_BT = torch.zeros((2, 4), dtype=DTYPE)
    advantages_BT = torch.tensor([[0.0, 1.0, 2.0, 3.0], [0.0, 10.0, 99.0, 99.0]], dtype=DTYPE)
    batch = Microbatch(
        logprobs_BT=zeros_BT,
        old_logprobs_BT=zeros_BT,
        generation_logprobs_BT=zeros_BT,
        ref_logprobs_BT=None,
        advantages_BT=advantages_BT,
        response_mask_BT=mask_BT,
        sample_mask_B=torch.tensor([True, True]),
        reward_B=torch.zeros(2, dtype=DTYPE),
    )
    assert float(batch.loss(plain(token_level_loss=False)).loss) == -(2.0 + 10.0) / 2
    assert float(batch.loss(PLAIN).loss) == -(1.0 + 2.0 + 3.0 + 10.0) / 4


def test_entropy_estimate_of_known_logprobs() -> None:
    batch = one_sequence(advantages=A, logprobs=[-0.5, -1.0, -1.5], generation=[-0.6, -1.1, -1.6])
    assert metrics_of(batch.loss(PLAIN))["train/approx_entropy"] == pytest.approx(1.1052, abs=FOUR_DIGITS)


def test_nll_term_uses_sequences_with_positive_reward_only() -> None:
    settings = plain(positive_example_nll_weight=0.5, disable_ppo_ratio=True)
    good = one_sequence(advantages=[0.0] * 3, logprobs=[-1.0, -2.0, -3.0], reward=1.0)
    assert float(good.loss(settings).loss) == pytest.approx(0.5 * 2.0, abs=EXACT)
    assert metrics_of(good.loss(settings))["train/positive_nll_loss"] == pytest.approx(2.0, abs=EXACT)
    for reward in (0.0, -1.0):
        bad = one_sequence(advantages=[0.0] * 3, logprobs=[-1.0, -2.0, -3.0], reward=reward)
        assert float(bad.loss(settings).loss) == 0.0
        assert metrics_of(bad.loss(settings))["train/positive_nll_loss"] == 0.0
    assert "train/positive_nll_loss" not in metrics_of(good.loss(PLAIN))


def test_mismatch_metrics_of_known_logprobs() -> None:
    old, generation = [-1.0, -2.0], [-1.5, -1.7]
    metrics = metrics_of(one_sequence(advantages=[0.0] * 2, logprobs=old, generation=generation).loss(PLAIN))
    gaps = [0.5, -0.3]  # old - generation
    assert metrics["train/token_mult_prob_error"] == pytest.approx((math.exp(0.5) + math.exp(0.3)) / 2)
    assert metrics["train/gen_kl_error"] == pytest.approx(sum(math.exp(x) - 1 - x for x in gaps) / 2)
    assert metrics["train/policy_kl_error"] == pytest.approx(sum(math.exp(-x) - 1 + x for x in gaps) / 2)
    divergence = 0.0
    for p, q in ((math.exp(a), math.exp(b)) for a, b in zip(old, generation, strict=True)):
        for x in (math.log((p + q) / (2 * p)), math.log((p + q) / (2 * q))):
            divergence += 0.5 * (math.exp(x) - 1 - x) / 2
    assert metrics["train/js_divergence_error"] == pytest.approx(divergence)


def test_equal_logprobs_have_no_mismatch() -> None:
    metrics = metrics_of(one_sequence(advantages=[1.0] * 2, logprobs=[-1.0, -2.0]).loss(PLAIN))
    assert metrics["train/token_mult_prob_error"] == 1.0
    assert metrics["train/gen_kl_error"] == metrics["train/policy_kl_error"] == 0.0
    assert metrics["train/js_divergence_error"] == pytest.approx(0.0, abs=EXACT)


def test_ratio_metrics_and_clip_fraction() -> None:
    metrics = metrics_of(with_ratios(RATIOS, advantages=A).loss(PLAIN))
    assert metrics["train/probs_ratio"] == pytest.approx(1.0)
    assert metrics["train/probs_ratio_min"] == pytest.approx(0.5)
    assert metrics["train/probs_ratio_max"] == pytest.approx(1.5)
    assert metrics["train/probs_ratio_clamped"] == pytest.approx((0.8 + 1.0 + 1.2) / 3)
    assert metrics["train/probs_ratio_clamped_min"] == pytest.approx(0.8)
    assert metrics["train/probs_ratio_clamped_max"] == pytest.approx(1.2)
    assert metrics["train/clip_fraction"] == pytest.approx(2 / 3)
    assert metrics["train/global_valid_toks"] == 3.0
    assert metrics["train/global_valid_seqs"] == metrics["train/num_valid_samples"] == 1.0


def test_batch_without_valid_tokens_has_loss_zero_and_extrema_of_minus_one() -> None:
    batch = with_ratios(RATIOS, advantages=A).replace(response_mask_BT=torch.zeros((1, 4), dtype=torch.bool))
    counts = LossCounts.of(batch)
    assert counts == LossCounts(valid_tokens=0, valid_sequences=0, positive_tokens=0)
    output = batch.loss(PLAIN, counts)
    assert float(output.loss) == 0.0
    assert math.isinf(float(output.metrics["train/probs_ratio_min"].value))
    assert math.isinf(float(output.metrics["train/probs_ratio_max"].value))
    metrics = metrics_of(output)
    assert metrics["train/probs_ratio_min"] == metrics["train/probs_ratio_clamped_max"] == -1.0
    assert gradient(batch, PLAIN) == [0.0, 0.0, 0.0]


def test_position_zero_never_counts() -> None:
    batch = with_ratios(RATIOS, advantages=A)
    everywhere = batch.replace(response_mask_BT=torch.ones((1, 4), dtype=torch.bool))
    assert LossCounts.of(everywhere).valid_tokens == 3
    assert torch.equal(everywhere.loss(PLAIN).loss, batch.loss(PLAIN).loss)


def test_loss_of_nan_at_a_valid_token_is_nan_and_names_its_sequence() -> None:
    batch = with_ratios(RATIOS, advantages=A)
    batch.logprobs_BT[0, 2] = math.nan
    output = batch.loss(PLAIN)
    assert not torch.isfinite(output.loss)
    assert torch.isfinite(output.sequence_loss_B).tolist() == [False]


def test_wrong_shapes_and_mask_types_are_refused_by_name() -> None:
    batch = with_ratios(RATIOS, advantages=A)
    with pytest.raises(ValueError, match=r"advantages_BT must have the mask's shape \(1, 4\), got \(1, 3\)"):
        batch.replace(advantages_BT=batch.advantages_BT[:, 1:]).loss(PLAIN)
    with pytest.raises(ValueError, match=r"response_mask_BT must be bool, got torch\.float64"):
        batch.replace(response_mask_BT=batch.response_mask_BT.to(DTYPE)).loss(PLAIN, LossCounts.of(batch))
    with pytest.raises(ValueError, match=r"masks must be \[B, T\] and \[B\], got \(1, 4\) and \(2,\)"):
        batch.replace(sample_mask_B=torch.tensor([True, True])).loss(PLAIN, LossCounts.of(batch))
