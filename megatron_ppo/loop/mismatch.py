"""How far each sequence's generation log-probs are from the trainer's, and the mask against outliers.

Driven by the loop as soon as the old log-probs of a step exist, before advantages: a masked sequence counts
neither in whitening nor in any loss. Invariant: only ever turns `sample_mask_B` from True to False.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.ports import Metrics
from megatron_ppo.numerics.masking import select, sequence_mean, trainable_mask
from megatron_ppo.numerics.reduce import NO_EXTREMUM
from megatron_ppo.protocol.errors import NonFiniteError


def mask_mismatched_sequences(batch: TrainBatch, *, threshold: float | None) -> tuple[TrainBatch, Metrics]:
    """Measure the mismatch, and exclude the sequences above `threshold` from everything that follows.

    err_i = mean over the response tokens of sequence i of exp(|generation - old log-prob|), at least 1. An
    error equal to the threshold is kept. Sequences without a response token that counts are left out of the
    statistics.

    Args:
        batch: with `old_logprobs_BT`.   threshold: largest error that is kept; None excludes none.
    Returns:
        The batch, and `train/{max,mean,min}_seq_mult_prob_error` before masking, the same with `_after_mask`,
        `train/num_masked_seqs_by_logprob_error`, and `train/masked_correct_pct`: the share in [0, 1] of
        masked sequences whose reward is 1, 0 when none is masked.
    Raises: ValueError if the batch has no old log-probs; NonFiniteError with the ordinals of sequences whose
        log-probs are NaN or infinite.
    """
    if batch.old_logprobs_BT is None:
        raise ValueError("old_logprobs_BT must be set before the mismatch can be measured, got None")
    mask_BT = trainable_mask(batch.response_mask_BT, batch.sample_mask_B)
    old_BT = select(batch.old_logprobs_BT, mask_BT, name="old_logprobs_BT")
    generation_BT = select(batch.generation_logprobs_BT, mask_BT, name="generation_logprobs_BT")
    for name, logprobs_BT in (("old_logprobs_BT", old_BT), ("generation_logprobs_BT", generation_BT)):
        check_finite(logprobs_BT, batch.ordinal_B, name=name)
    error_B = sequence_mean((generation_BT - old_BT).abs().double().exp(), mask_BT)
    counted_B = mask_BT.any(dim=1)
    # Errors are finite or +inf here, and +inf is above every threshold.
    masked_B = counted_B & (error_B > threshold) if threshold is not None else torch.zeros_like(counted_B)
    num_masked = int(masked_B.sum())
    num_correct = int((masked_B & (batch.reward_B == 1.0)).sum())
    metrics = {
        **_statistics(error_B[counted_B], suffix=""),
        **_statistics(error_B[counted_B & ~masked_B], suffix="_after_mask"),
        "train/num_masked_seqs_by_logprob_error": float(num_masked),
        "train/masked_correct_pct": num_correct / max(num_masked, 1),
    }
    if num_masked == 0:
        return batch, metrics
    return batch.replace(sample_mask_B=batch.sample_mask_B & ~masked_B), metrics


def check_finite(x_BT: Tensor, ordinal_B: Tensor, *, name: str) -> None:
    """Raises: NonFiniteError with the ordinals of the rows of `x_BT` that hold a NaN or an infinity."""
    bad_B = ~torch.isfinite(x_BT).all(dim=1)
    if bool(bad_B.any()):
        ordinals = tuple(sorted(set(ordinal_B[bad_B].tolist())))
        raise NonFiniteError(f"{name} is NaN or infinite for the prompts with ordinals {ordinals}", ordinals)


def _statistics(error: Tensor, *, suffix: str) -> dict[str, float]:
    """Over the given sequences; -1 where there are none, as for every extremum."""
    names = [f"train/{statistic}_seq_mult_prob_error{suffix}" for statistic in ("max", "mean", "min")]
    if len(error) == 0:
        return dict.fromkeys(names, NO_EXTREMUM)
    return dict(zip(names, (float(error.max()), float(error.mean()), float(error.min())), strict=True))
