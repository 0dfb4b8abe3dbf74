"""What holds for every variant of the policy loss and for the value loss: how a minibatch is split, padded or
masked changes nothing, and nothing at an excluded token can be seen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from microbatch import DTYPE, Microbatch, random_microbatch
from torch import Tensor

from megatron_ppo.numerics.losses import (
    LossCounts,
    LossOutput,
    PolicyLossSettings,
    ValueLossSettings,
    policy_loss,
    value_loss,
)
from megatron_ppo.numerics.reduce import combine, finalise

# Another order of summing some 40 float64 terms of order 1.
REORDERED = 1e-12

VARIANTS = {
    "ppo": PolicyLossSettings(),
    "tis": PolicyLossSettings(
        truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.2, ratio_clip_c=3.0
    ),
    "icepop": PolicyLossSettings(
        truncated_importance_sampling_type="icepop",
        truncated_importance_sampling_ratio=1.3,
        truncated_importance_sampling_ratio_min=0.8,
    ),
    "seq-mask-tis": PolicyLossSettings(
        truncated_importance_sampling_type="seq-mask-tis",
        truncated_importance_sampling_ratio=1.1,
        truncated_importance_sampling_ratio_min=0.9,
    ),
    "gspo": PolicyLossSettings(sequence_level_importance_ratios=True, token_level_loss=False),
    "cispo": PolicyLossSettings(use_cispo=True),
    "reinforce": PolicyLossSettings(disable_ppo_ratio=True),
    "forced ratio": PolicyLossSettings(force_on_policy_ratio=True),
    "sequence level": PolicyLossSettings(token_level_loss=False),
    "kl": PolicyLossSettings(reference_policy_kl_penalty=0.3, use_on_policy_kl_approximation=True),
    "nll": PolicyLossSettings(positive_example_nll_weight=0.5, reference_policy_kl_penalty=0.1),
}


def loss_and_gradient(
    batch: Microbatch, variant: PolicyLossSettings, counts: LossCounts
) -> tuple[LossOutput, Tensor]:
    logprobs_BT = batch.logprobs_BT.clone().requires_grad_()
    output = batch.replace(logprobs_BT=logprobs_BT).loss(variant, counts)
    output.loss.backward()
    assert logprobs_BT.grad is not None
    return output, logprobs_BT.grad


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000), parts=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_shares_of_any_split_add_up_to_the_whole_gradients_and_metrics_included(
    variant: PolicyLossSettings, seed: int, parts: list[int]
) -> None:
    batch = random_microbatch(seed, sequences=6)
    counts = LossCounts.of(batch)
    whole, whole_gradient_BT = loss_and_gradient(batch, variant, counts)
    outputs: list[LossOutput] = []
    gradient_BT = torch.zeros_like(whole_gradient_BT)
    for part in set(parts):
        index = [row for row in range(6) if parts[row] == part]
        output, gradient_BT[index] = loss_and_gradient(batch.rows(index), variant, counts)
        outputs.append(output)
        assert output.sequence_loss_B.tolist() == pytest.approx(
            whole.sequence_loss_B[index].tolist(), abs=REORDERED
        )
    assert sum(float(output.loss.detach()) for output in outputs) == pytest.approx(
        float(whole.loss.detach()), abs=REORDERED
    )
    assert torch.allclose(gradient_BT, whole_gradient_BT, atol=REORDERED, rtol=0.0)
    joined = finalise(combine(output.metrics for output in outputs))
    assert joined == pytest.approx(finalise(whole.metrics), abs=REORDERED)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, -1e30])
def test_garbage_at_excluded_tokens_reaches_neither_loss_nor_gradient_nor_metrics(
    variant: PolicyLossSettings, garbage: float
) -> None:
    batch = random_microbatch(7)
    counts = LossCounts.of(batch)
    mask_BT = batch.response_mask_BT & batch.sample_mask_B[:, None]

    def spoil(x_BT: Tensor) -> Tensor:
        return torch.where(mask_BT, x_BT, garbage)

    assert batch.ref_logprobs_BT is not None
    spoilt = batch.replace(
        logprobs_BT=spoil(batch.logprobs_BT),
        old_logprobs_BT=spoil(batch.old_logprobs_BT),
        generation_logprobs_BT=spoil(batch.generation_logprobs_BT),
        ref_logprobs_BT=spoil(batch.ref_logprobs_BT),
        advantages_BT=spoil(batch.advantages_BT),
    )
    clean, clean_gradient_BT = loss_and_gradient(batch, variant, counts)
    dirty, dirty_gradient_BT = loss_and_gradient(spoilt, variant, counts)
    assert torch.equal(clean.loss, dirty.loss)
    assert torch.equal(clean_gradient_BT, dirty_gradient_BT)
    assert not dirty_gradient_BT[~mask_BT].any()
    assert finalise(clean.metrics) == finalise(dirty.metrics)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_padding_changes_nothing(variant: PolicyLossSettings) -> None:
    batch = random_microbatch(8)
    short, short_gradient_BT = loss_and_gradient(batch, variant, LossCounts.of(batch))
    wide_batch = batch.padded(5, math.nan)
    assert LossCounts.of(wide_batch) == LossCounts.of(batch)
    wide, wide_gradient_BT = loss_and_gradient(wide_batch, variant, LossCounts.of(wide_batch))
    # Wider rows may be summed in another order.
    assert float(wide.loss.detach()) == pytest.approx(float(short.loss.detach()), abs=REORDERED)
    assert torch.allclose(wide_gradient_BT[:, :-5], short_gradient_BT, atol=REORDERED, rtol=0.0)
    assert not wide_gradient_BT[:, -5:].any()


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_masking_a_sequence_equals_dropping_it(variant: PolicyLossSettings) -> None:
    batch = random_microbatch(10, sequences=5)  # sequence 0 is the excluded one
    kept = batch.rows([1, 2, 3, 4])
    masked, gradient_BT = loss_and_gradient(batch, variant, LossCounts.of(batch))
    dropped, dropped_gradient_BT = loss_and_gradient(kept, variant, LossCounts.of(kept))
    assert float(masked.loss.detach()) == pytest.approx(float(dropped.loss.detach()), abs=REORDERED)
    assert torch.allclose(gradient_BT[1:], dropped_gradient_BT, atol=REORDERED, rtol=0.0)
    assert not gradient_BT[0].any()
    assert finalise(masked.metrics) == pytest.approx(finalise(dropped.metrics), abs=REORDERED)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_all_tokens_masked_gives_loss_and_gradient_exactly_zero(variant: PolicyLossSettings) -> None:
    batch = random_microbatch(9)
    batch = batch.replace(response_mask_BT=torch.zeros_like(batch.response_mask_BT))
    output, gradient_BT = loss_and_gradient(batch, variant, LossCounts.of(batch))
    assert float(output.loss.detach()) == 0.0
    assert not gradient_BT.any()
    assert all(math.isfinite(value) for value in finalise(output.metrics).values())


def test_counts_are_those_of_a_literal_loop() -> None:
    for seed in range(20):
        batch = random_microbatch(seed)
        tokens = sequences = positive = 0
        for b, kept in enumerate(batch.sample_mask_B.tolist()):
            valid = sum(batch.response_mask_BT[b, 1:].tolist()) if kept else 0
            tokens += valid
            sequences += valid > 0
            positive += valid if float(batch.reward_B[b]) > 0.0 else 0
        expected = LossCounts(valid_tokens=tokens, valid_sequences=sequences, positive_tokens=positive)
        assert LossCounts.of(batch) == expected


def literal_ppo(batch: Microbatch, *, cap: float, dual: float) -> float:
    """Dual-clipped PPO with a capped importance weight, one token at a time."""
    total, count = 0.0, 0
    for b in range(len(batch.reward_B)):
        for j in range(1, batch.logprobs_BT.shape[1]):
            if not (batch.response_mask_BT[b, j] and batch.sample_mask_B[b]):
                continue
            lp, old = float(batch.logprobs_BT[b, j]), float(batch.old_logprobs_BT[b, j])
            advantage = float(batch.advantages_BT[b, j])
            ratio = math.exp(lp - old)
            loss = max(-advantage * ratio, -advantage * min(max(ratio, 0.8), 1.2))
            if advantage < 0.0:
                loss = min(loss, -advantage * dual)
            total += min(math.exp(old - float(batch.generation_logprobs_BT[b, j])), cap) * loss
            count += 1
    return total / count


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_loss_equals_a_literal_loop_over_tokens(seed: int) -> None:
    batch = random_microbatch(seed)
    variant = PolicyLossSettings(
        truncated_importance_sampling_type="tis", truncated_importance_sampling_ratio=1.1, ratio_clip_c=1.5
    )
    expected = literal_ppo(batch, cap=1.1, dual=1.5)
    assert float(batch.loss(variant).loss) == pytest.approx(expected, abs=REORDERED)


@pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS.keys())
def test_float32_agrees_with_float64(variant: PolicyLossSettings) -> None:
    batch = random_microbatch(11)
    counts = LossCounts.of(batch)
    names = ("logprobs_BT", "old_logprobs_BT", "generation_logprobs_BT", "ref_logprobs_BT", "advantages_BT")
    single = batch.replace(**{name: getattr(batch, name).float() for name in names})
    output = single.loss(variant, counts)
    assert output.loss.dtype == torch.float32
    # Some 30 float32 terms of order 1: 1e-5 is about a hundred roundings.
    assert float(output.loss.detach()) == pytest.approx(float(batch.loss(variant, counts).loss), abs=1e-5)


def value_outputs(seed: int, index: Sequence[int], counts: LossCounts | None) -> tuple[LossOutput, Tensor]:
    batch = random_microbatch(seed, sequences=6)
    part = batch.rows(index)
    values_BT = part.logprobs_BT.clone().requires_grad_()
    output = value_loss(
        values_BT=values_BT,
        old_values_BT=part.old_logprobs_BT,
        returns_BT=part.advantages_BT,
        response_mask_BT=part.response_mask_BT,
        sample_mask_B=part.sample_mask_B,
        settings=ValueLossSettings(scale=0.7, cliprange=0.2),
        counts=counts or LossCounts.of(batch),
    )
    output.loss.backward()
    assert values_BT.grad is not None
    return output, values_BT.grad


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), parts=st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_value_loss_shares_of_any_split_add_up(seed: int, parts: list[int]) -> None:
    whole, whole_gradient_BT = value_outputs(seed, range(6), None)
    outputs: list[LossOutput] = []
    gradient_BT = torch.zeros_like(whole_gradient_BT)
    for part in set(parts):
        index = [row for row in range(6) if parts[row] == part]
        output, gradient_BT[index] = value_outputs(seed, index, None)
        outputs.append(output)
    assert sum(float(output.loss.detach()) for output in outputs) == pytest.approx(
        float(whole.loss.detach()), abs=REORDERED
    )
    assert torch.allclose(gradient_BT, whole_gradient_BT, atol=REORDERED, rtol=0.0)
    joined = finalise(combine(output.metrics for output in outputs))
    # Explained variance divides by a variance of order 1, which costs some digits.
    assert joined == pytest.approx(finalise(whole.metrics), abs=1e-9)


def test_policy_loss_does_not_change_its_inputs() -> None:
    batch = random_microbatch(12)
    mask_BT = torch.ones_like(batch.response_mask_BT)
    before_BT = mask_BT.clone()
    assert batch.logprobs_BT.dtype == DTYPE
    policy_loss(
        logprobs_BT=batch.logprobs_BT,
        old_logprobs_BT=batch.old_logprobs_BT,
        generation_logprobs_BT=batch.generation_logprobs_BT,
        ref_logprobs_BT=None,
        advantages_BT=batch.advantages_BT,
        response_mask_BT=mask_BT,
        sample_mask_B=batch.sample_mask_B,
        reward_B=batch.reward_B,
        settings=PolicyLossSettings(),
        counts=LossCounts(valid_tokens=1, valid_sequences=1, positive_tokens=1),
    )
    assert torch.equal(mask_BT, before_BT)
