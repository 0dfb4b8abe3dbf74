"""Sequence mismatch: the errors, the threshold and the metrics.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.mismatch import mask_mismatched_sequences
from megatron_ppo.protocol.errors import NonFiniteError


def batch_with_errors(errors: list[float], *, rewards: list[float] | None = None) -> TrainBatch:
    """One sequence per error: a prompt token, then two response tokens whose mismatch is that error."""
    rows = len(errors)
    old_BT = torch.tensor([[0.0, -1.0, -1.0]]).repeat(rows, 1)
    gap_B1 = torch.tensor(errors).log()[:, None]
    sign_1T = torch.tensor([[0.0, 1.0, -1.0]])  # the error is of the absolute difference
    return TrainBatch(
        token_ids_BT=torch.ones((rows, 3), dtype=torch.int64),
        length_B=torch.full((rows,), 3),
        response_mask_BT=torch.tensor([[False, True, True]]).repeat(rows, 1),
        sample_mask_B=torch.ones(rows, dtype=torch.bool),
        generation_logprobs_BT=old_BT + gap_B1 * sign_1T,
        reward_B=torch.tensor(rewards or [0.0] * rows),
        truncated_B=torch.zeros(rows, dtype=torch.bool),
        ordinal_B=torch.arange(rows) + 10,
        old_logprobs_BT=old_BT,
    )


def test_sequence_above_the_threshold_is_masked_and_the_error_before_masking_is_reported() -> None:
    batch, metrics = mask_mismatched_sequences(batch_with_errors([1.0, 2.0]), threshold=1.5)
    assert batch.sample_mask_B.tolist() == [True, False]
    # exp(log 2) in float32 inputs: 1e-6.
    assert metrics["train/max_seq_mult_prob_error"] == pytest.approx(2.0, abs=1e-6)
    assert metrics["train/mean_seq_mult_prob_error"] == pytest.approx(1.5, abs=1e-6)
    assert metrics["train/min_seq_mult_prob_error"] == 1.0
    assert metrics["train/max_seq_mult_prob_error_after_mask"] == 1.0
    assert metrics["train/mean_seq_mult_prob_error_after_mask"] == 1.0
    assert metrics["train/min_seq_mult_prob_error_after_mask"] == 1.0
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 1.0


def test_error_is_the_token_mean_of_the_exponential_of_the_absolute_difference() -> None:
    batch = batch_with_errors([1.0])
    batch.generation_logprobs_BT[0] = torch.tensor([0.0, -1.25, -0.5])
    _, metrics = mask_mismatched_sequences(batch, threshold=None)
    assert metrics["train/max_seq_mult_prob_error"] == pytest.approx((math.exp(0.25) + math.exp(0.5)) / 2)


def test_error_equal_to_the_threshold_is_kept() -> None:
    batch = batch_with_errors([1.0])
    kept, metrics = mask_mismatched_sequences(batch, threshold=1.0)
    assert kept.sample_mask_B.tolist() == [True]
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 0.0


def test_no_threshold_measures_without_masking() -> None:
    batch, metrics = mask_mismatched_sequences(batch_with_errors([1.0, 50.0]), threshold=None)
    assert batch.sample_mask_B.tolist() == [True, True]
    # exp(log 50) from float32 log-probs of order 4: 1e-5 relative.
    assert metrics["train/max_seq_mult_prob_error"] == pytest.approx(50.0, rel=1e-5)
    assert metrics["train/max_seq_mult_prob_error"] == metrics["train/max_seq_mult_prob_error_after_mask"]


def test_share_of_masked_sequences_that_were_correct() -> None:
    batch = batch_with_errors([3.0, 3.0, 3.0, 1.0], rewards=[1.0, 0.5, 0.0, 1.0])
    _, metrics = mask_mismatched_sequences(batch, threshold=2.0)
    assert metrics["train/num_masked_seqs_by_logprob_error"] == 3.0
    assert metrics["train/masked_correct_pct"] == pytest.approx(1 / 3)
    _, without = mask_mismatched_sequences(batch, threshold=None)
    assert without["train/masked_correct_pct"] == 0.0


def test_sequences_without_tokens_that_count_are_left_out() -> None:
    batch = batch_with_errors([9.0, 2.0, 1.0])
    batch.sample_mask_B[0] = False
    batch.response_mask_BT[1] = False
    masked, metrics = mask_mismatched_sequences(batch, threshold=1.5)
    assert metrics["train/max_seq_mult_prob_error"] == metrics["train/min_seq_mult_prob_error"] == 1.0
    assert masked.sample_mask_B.tolist() == [False, True, True]


def test_all_sequences_masked_reports_minus_one_after_masking() -> None:
    masked, metrics = mask_mismatched_sequences(batch_with_errors([3.0, 4.0]), threshold=1.5)
    assert not masked.sample_mask_B.any()
    assert metrics["train/max_seq_mult_prob_error_after_mask"] == -1.0


def test_finite_logprobs_with_an_infinite_error_are_masked() -> None:
    batch = batch_with_errors([1.0, 1.0])
    batch.generation_logprobs_BT[1, 1] = -1000.0
    masked, metrics = mask_mismatched_sequences(batch, threshold=1.5)
    assert masked.sample_mask_B.tolist() == [True, False]
    assert metrics["train/max_seq_mult_prob_error"] == math.inf


@pytest.mark.parametrize("field", ["generation_logprobs_BT", "old_logprobs_BT"])
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_logprob_that_is_not_finite_stops_the_step_with_its_ordinal(field: str, bad: float) -> None:
    batch = batch_with_errors([1.0, 1.0, 1.0])
    getattr(batch, field)[1, 2] = bad
    with pytest.raises(NonFiniteError, match=rf"{field} is NaN or infinite .* ordinals \(11,\)") as caught:
        mask_mismatched_sequences(batch, threshold=1.5)
    assert caught.value.ordinals == (11,)
    batch.response_mask_BT[1, 2] = False  # where it does not count it may be anything
    mask_mismatched_sequences(batch, threshold=1.5)


def test_missing_old_logprobs_are_refused() -> None:
    with pytest.raises(ValueError, match="old_logprobs_BT must be set"):
        mask_mismatched_sequences(batch_with_errors([1.0]).replace(old_logprobs_BT=None), threshold=None)
