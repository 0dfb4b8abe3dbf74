"""The critic's loss, its statistics, and explained variance.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from megatron_ppo.numerics.losses import LossCounts, LossOutput, ValueLossSettings, value_loss
from megatron_ppo.numerics.reduce import explained_variance, explained_variance_of_moments, finalise

# A few float64 operations.
EXACT = 1e-12


def loss_of(
    values: list[float], returns: list[float], *, old: list[float] | None = None, **settings: float
) -> LossOutput:
    """Of one sequence with one prompt token in front."""

    def row(x: list[float]) -> Tensor:
        return torch.tensor([[77.0, *x]], dtype=torch.float64)

    return value_loss(
        values_BT=row(values),
        old_values_BT=row(values if old is None else old),
        returns_BT=row(returns),
        response_mask_BT=torch.tensor([[False] + [True] * len(values)]),
        sample_mask_B=torch.tensor([True]),
        settings=ValueLossSettings(**settings),
        counts=LossCounts(valid_tokens=len(values), valid_sequences=1, positive_tokens=0),
    )


def test_plain_loss_is_half_the_mean_squared_error() -> None:
    assert float(loss_of([1.0, 2.0], [0.0, 4.0]).loss) == 0.5 * (1.0 + 4.0) / 2


def test_plain_branch_wins_when_clipping_would_hide_an_error() -> None:
    output = loss_of([1.0], [0.0], old=[0.2], cliprange=0.5)
    assert float(output.loss) == pytest.approx(0.5, abs=EXACT)
    assert finalise(output.metrics)["train/critic/vf_clipfrac"] == 0.0


def test_clipped_branch_wins_when_the_value_moved_towards_the_return_too_fast() -> None:
    output = loss_of([1.0], [2.0], old=[0.2], cliprange=0.5)
    assert float(output.loss) == pytest.approx(0.845, abs=EXACT)  # 0.5 · (0.7 - 2)²
    assert finalise(output.metrics)["train/critic/vf_clipfrac"] == 1.0


def test_scale_multiplies_and_a_perfect_fit_costs_nothing() -> None:
    assert float(loss_of([1.0], [3.0], scale=2.0).loss) == 2.0 * float(loss_of([1.0], [3.0]).loss)
    assert float(loss_of([1.5, -2.0], [1.5, -2.0], cliprange=0.5).loss) == 0.0


def test_clipped_loss_is_never_below_the_plain_one() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        values, returns, old = (torch.randn(6, generator=generator).tolist() for _ in range(3))
        clipped = float(loss_of(values, returns, old=old, cliprange=0.3).loss)
        assert clipped >= float(loss_of(values, returns, old=old).loss)


def test_trailing_singleton_dimension_is_accepted() -> None:
    shape = {
        "old_values_BT": torch.zeros((2, 3)),
        "returns_BT": torch.ones((2, 3)),
        "response_mask_BT": torch.ones((2, 3), dtype=torch.bool),
        "sample_mask_B": torch.tensor([True, True]),
    }
    counts = LossCounts(valid_tokens=4, valid_sequences=2, positive_tokens=0)
    values_BT1 = torch.zeros((2, 3, 1))
    output = value_loss(values_BT=values_BT1, settings=ValueLossSettings(), counts=counts, **shape)
    assert float(output.loss) == 0.5
    with pytest.raises(ValueError, match=r"values_BT must have the mask's shape \(2, 3\), got \(2, 3, 2\)"):
        value_loss(values_BT=torch.zeros((2, 3, 2)), settings=ValueLossSettings(), counts=counts, **shape)


def test_statistics_are_token_means_and_extrema() -> None:
    metrics = finalise(loss_of([1.0, 3.0], [2.0, 6.0]).metrics)
    assert metrics["train/critic/loss"] == 0.5 * (1.0 + 9.0) / 2
    assert metrics["train/critic/values_mean"] == 2.0
    assert (metrics["train/critic/values_min"], metrics["train/critic/values_max"]) == (1.0, 3.0)
    assert metrics["train/critic/returns_mean"] == 4.0
    assert metrics["train/critic/returns_sq_mean"] == 20.0
    assert metrics["train/critic/residual_sq_mean"] == 5.0
    # Var(R) = 4, Var(R - V) = Var(1, 3) = 1.
    assert metrics["train/critic/explained_var"] == pytest.approx(0.75, abs=EXACT)


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf])
def test_garbage_at_excluded_tokens_reaches_neither_loss_nor_gradient(garbage: float) -> None:
    mask_BT = torch.tensor([[False, True, False], [False, True, True]])
    values_BT = torch.tensor([[garbage, 1.0, garbage], [garbage] * 3], requires_grad=True)
    spoilt_BT = torch.tensor([[garbage, 3.0, garbage], [garbage] * 3])
    output = value_loss(
        values_BT=values_BT,
        old_values_BT=spoilt_BT,
        returns_BT=spoilt_BT,
        response_mask_BT=mask_BT,
        sample_mask_B=torch.tensor([True, False]),
        settings=ValueLossSettings(cliprange=0.5),
        counts=LossCounts(valid_tokens=1, valid_sequences=1, positive_tokens=0),
    )
    output.loss.backward()
    assert float(output.loss.detach()) == 0.5 * 4.0
    assert values_BT.grad is not None
    assert values_BT.grad.tolist() == [[0.0, -2.0, 0.0], [0.0, 0.0, 0.0]]
    assert all(math.isfinite(value) for value in finalise(output.metrics).values())


def test_explained_variance_from_known_moments() -> None:
    # means 1.0 / 0.5, squares 5.0 / 1.25: Var(R) = 4, Var(R - V) = 1.25 - 0.25 = 1.
    assert (
        explained_variance_of_moments(
            values_mean=0.5, returns_mean=1.0, returns_sq_mean=5.0, residual_sq_mean=1.25
        )
        == 0.75
    )
    assert (
        explained_variance_of_moments(
            values_mean=2.0, returns_mean=2.0, returns_sq_mean=4.0, residual_sq_mean=0.0
        )
        == 1.0
    )


def test_explained_variance_before_the_update_counts_an_offset() -> None:
    mask_BT = torch.tensor([[False, True, True, True]])
    returns_BT = torch.tensor([[math.nan, 0.0, 1.0, 2.0]])
    assert explained_variance(returns_BT, returns_BT, mask_BT) == 1.0
    assert explained_variance(torch.ones((1, 4)), returns_BT, mask_BT) == 0.0  # the mean explains nothing
    assert explained_variance(returns_BT + 1.0, returns_BT, mask_BT) == pytest.approx(1.0 - 3.0 / 2.0)
    assert explained_variance(torch.zeros((1, 4)), returns_BT, mask_BT) == pytest.approx(1.0 - 5.0 / 2.0)


def test_explained_variance_of_equal_returns_that_are_predicted_is_one() -> None:
    mask_BT = torch.ones((1, 3), dtype=torch.bool)
    same_BT = torch.full((1, 3), 2.0)
    assert explained_variance(same_BT, same_BT, mask_BT) == 1.0
    assert explained_variance(same_BT, same_BT, torch.zeros_like(mask_BT)) == 1.0
