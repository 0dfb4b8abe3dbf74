"""The GAE part: what it does to a batch, which λ it uses where, and what it refuses.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.numerics.gae import gae, place_terminal_reward
from megatron_ppo.protocol.errors import ConfigError, NonFiniteError

# float32, a few additions of numbers of order 1.
ROUNDING = 1e-6


def batch_of(
    lengths: list[int],
    *,
    rewards: list[float],
    values: float | Tensor = 0.0,
    truncated: list[bool] | None = None,
) -> TrainBatch:
    """One prompt token, then `lengths` response tokens, padded."""
    rows, width = len(lengths), 1 + max(lengths)
    position_T = torch.arange(width)
    mask_BT = (position_T >= 1) & (position_T <= torch.tensor(lengths)[:, None])
    zeros_BT = torch.zeros((rows, width))
    return TrainBatch(
        token_ids_BT=torch.ones((rows, width), dtype=torch.int64),
        length_B=torch.tensor(lengths) + 1,
        response_mask_BT=mask_BT,
        sample_mask_B=torch.ones(rows, dtype=torch.bool),
        generation_logprobs_BT=zeros_BT,
        reward_B=torch.tensor(rewards),
        truncated_B=torch.tensor(truncated or [False] * rows),
        ordinal_B=torch.arange(rows) + 100,
        old_logprobs_BT=zeros_BT,
        values_BT=torch.full((rows, width), values) if isinstance(values, float) else values,
    )


def plain(**changes: object) -> GAE:
    arguments: dict[str, object] = {"gae_lambda": 1.0, "gae_gamma": 1.0, "normalize_advantages": False}
    return GAE(**{**arguments, **changes})  # type: ignore[arg-type]


def advantages(batch: TrainBatch) -> list[list[float]]:
    assert batch.advantages_BT is not None
    return batch.advantages_BT.tolist()


def returns(batch: TrainBatch) -> Tensor:
    assert batch.returns_BT is not None
    return batch.returns_BT


def test_monte_carlo_advantage_is_the_reward_minus_the_value() -> None:
    applied = plain().apply(batch_of([4, 2], rewards=[1.0, 0.0], values=0.5))
    assert advantages(applied) == [[0.0, 0.5, 0.5, 0.5, 0.5], [0.0, -0.5, -0.5, 0.0, 0.0]]
    assert returns(applied).tolist() == [[0.0, 1.0, 1.0, 1.0, 1.0], [0.0] * 5]


def test_kl_penalty_in_the_reward_is_charged_at_every_token() -> None:
    old_BT = torch.tensor([[0.0, -1.0, -2.0, -1.5]])
    batch = batch_of([3], rewards=[1.0]).replace(old_logprobs_BT=old_BT, ref_logprobs_BT=old_BT - 2.0)
    applied = plain(reward_kl_penalty=0.1, reward_kl_type="k1").apply(batch)
    assert advantages(applied)[0] == pytest.approx([0.0, 0.4, 0.6, 0.8], abs=ROUNDING)
    same = batch.replace(ref_logprobs_BT=old_BT)
    expected = advantages(plain().apply(batch))
    assert advantages(plain(reward_kl_penalty=0.1, reward_kl_type="k1").apply(same)) == expected
    with pytest.raises(ValueError, match="needs old_logprobs_BT and ref_logprobs_BT"):
        plain(reward_kl_penalty=0.1).apply(batch.replace(ref_logprobs_BT=None))


def test_garbage_outside_the_mask_is_not_seen() -> None:
    batch = batch_of([4, 2], rewards=[1.0, 0.0], values=0.5)
    batch.sample_mask_B[1] = False
    expected = GAE(gae_lambda=0.9, gae_gamma=1.0).apply(batch)
    mask_BT = batch.response_mask_BT & batch.sample_mask_B[:, None]
    assert batch.values_BT is not None
    spoilt = batch.replace(
        values_BT=torch.where(mask_BT, batch.values_BT, math.nan), reward_B=torch.tensor([1.0, math.nan])
    )
    applied = GAE(gae_lambda=0.9, gae_gamma=1.0).apply(spoilt)
    assert advantages(applied) == advantages(expected)
    assert torch.equal(returns(applied), returns(expected))
    assert advantages(applied)[1] == [0.0] * 5


def decoupled_oracle(batch: TrainBatch, gae_lambda: float | Tensor) -> tuple[Tensor, Tensor]:
    assert batch.values_BT is not None
    mask_BT = batch.response_mask_BT
    reward_BT = place_terminal_reward(batch.reward_B, mask_BT)
    return gae(reward_BT, batch.values_BT, mask_BT, discount=1.0, gae_lambda=gae_lambda)


def random_values(batch_rows: int, width: int) -> Tensor:
    return torch.randn((batch_rows, width), generator=torch.Generator().manual_seed(0))


def test_value_and_policy_lambda_are_used_for_returns_and_advantages() -> None:
    batch = batch_of([4, 6], rewards=[1.0, -1.0], values=random_values(2, 7))
    applied = plain(gae_lambda=0.5, gae_lambda_value=0.9, gae_lambda_policy=0.3).apply(batch)
    assert torch.equal(returns(applied), decoupled_oracle(batch, 0.9)[1])
    assert advantages(applied) == decoupled_oracle(batch, 0.3)[0].tolist()


def test_unset_lambdas_fall_back_to_the_common_one() -> None:
    batch = batch_of([4, 6], rewards=[1.0, -1.0], values=random_values(2, 7))
    only_value = plain(gae_lambda=0.5, gae_lambda_value=0.9).apply(batch)
    assert torch.equal(returns(only_value), decoupled_oracle(batch, 0.9)[1])
    assert advantages(only_value) == decoupled_oracle(batch, 0.5)[0].tolist()
    only_policy = plain(gae_lambda=0.5, gae_lambda_policy=0.3).apply(batch)
    assert torch.equal(returns(only_policy), decoupled_oracle(batch, 0.5)[1])
    assert advantages(only_policy) == decoupled_oracle(batch, 0.3)[0].tolist()


def test_length_adaptive_lambda_beats_a_fixed_policy_lambda_and_leaves_returns_alone() -> None:
    batch = batch_of([8, 40], rewards=[1.0, 1.0], values=random_values(2, 41))
    applied = plain(gae_lambda=0.7, gae_lambda_policy=0.3, length_adaptive_alpha=0.05).apply(batch)
    expected_BT, _ = decoupled_oracle(batch, torch.tensor([0.0, 0.5]))
    assert torch.allclose(torch.tensor(advantages(applied)), expected_BT, atol=ROUNDING)
    assert torch.equal(returns(applied), decoupled_oracle(batch, 0.7)[1])


def test_length_of_the_adaptive_lambda_counts_only_tokens_that_count() -> None:
    batch = batch_of([40], rewards=[1.0], values=random_values(1, 41))
    batch.response_mask_BT[0, 1:21] = False  # 20 tokens are left: λ = 0
    applied = plain(length_adaptive_alpha=0.05).apply(batch)
    assert advantages(applied) == decoupled_oracle(batch, 0.0)[0].tolist()


def test_whitening_leaves_returns_alone() -> None:
    batch = batch_of([3], rewards=[2.0], values=torch.tensor([[0.0, 1.0, 1.0, 0.0]]))
    raw = plain().apply(batch)
    assert advantages(raw) == [[0.0, 1.0, 1.0, 2.0]]
    whitened = plain(normalize_advantages=True).apply(batch)
    assert advantages(whitened)[0] == pytest.approx([0.0, -0.577350, -0.577350, 1.154701], abs=ROUNDING)
    assert torch.equal(returns(whitened), returns(raw))


def test_excluded_sequence_does_not_enter_the_whitening() -> None:
    batch = batch_of([3, 3], rewards=[1.0, 100.0], values=random_values(2, 4))
    alone = GAE(gae_lambda=1.0, gae_gamma=1.0).apply(batch.select(torch.tensor([0])))
    batch.sample_mask_B[1] = False
    together = GAE(gae_lambda=1.0, gae_gamma=1.0).apply(batch)
    assert advantages(together)[0] == advantages(alone)[0]


def test_truncated_sequences_that_are_filtered_have_no_advantage_and_none_left_is_an_error() -> None:
    batch = batch_of([2, 2], rewards=[1.0, 1.0], truncated=[False, True])
    filtered = batch.replace(sample_mask_B=batch.sample_mask_B & ~batch.truncated_B)
    assert advantages(plain().apply(filtered)) == [[0.0, 1.0, 1.0], [0.0, 0.0, 0.0]]
    nothing = batch.replace(sample_mask_B=torch.tensor([False, False]))
    with pytest.raises(ValueError, match="no token of the 2 sequences counts"):
        plain().apply(nothing)


def test_reward_or_value_that_is_not_finite_stops_the_step_with_its_ordinals() -> None:
    batch = batch_of([2, 2, 2], rewards=[1.0, math.nan, math.inf])
    with pytest.raises(NonFiniteError, match="reward is NaN or infinite") as caught:
        plain().apply(batch)
    assert caught.value.ordinals == (101, 102)
    batch = batch_of([2, 2], rewards=[1.0, 1.0], values=torch.tensor([[0.0, 0.0, 0.0], [0.0, math.inf, 0.0]]))
    with pytest.raises(NonFiniteError, match="values_BT is NaN or infinite") as caught:
        plain().apply(batch)
    assert caught.value.ordinals == (101,)


def test_missing_values_are_refused() -> None:
    with pytest.raises(ValueError, match="values_BT must be set"):
        plain().apply(batch_of([2], rewards=[1.0]).replace(values_BT=None))


def test_metrics_are_over_the_tokens_that_count() -> None:
    batch = batch_of(
        [3, 1], rewards=[2.0, 9.0], values=torch.tensor([[5.0, 1.0, 1.0, 0.0], [5.0, 3.0, 5.0, 5.0]])
    )
    batch.sample_mask_B[1] = False
    estimator = plain()
    metrics = estimator.metrics(estimator.apply(batch))
    assert metrics["train/advantages/mean"] == pytest.approx(4.0 / 3.0)
    assert (metrics["train/advantages/min"], metrics["train/advantages/max"]) == (1.0, 2.0)
    assert metrics["train/returns/mean"] == 2.0


def test_explained_variance_before_the_update_is_of_the_values_in_the_batch() -> None:
    batch = batch_of(
        [1, 1, 1], rewards=[0.0, 1.0, 2.0], values=torch.tensor([[0.0, 0.5], [0.0, 1.0], [0.0, 1.5]])
    )
    estimator = plain()
    metrics = estimator.metrics(estimator.apply(batch))
    # Residuals 0.5, 0, 0.5 against deviations 1, 0, 1.
    assert metrics["train/critic/explained_var_before_update"] == pytest.approx(1.0 - 0.5 / 2.0)
    with pytest.raises(ValueError, match="run apply first"):
        estimator.metrics(batch)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gae_lambda": 1.1}, "advantage.gae_lambda must be in [0, 1], got 1.1"),
        ({"gae_lambda_value": -0.1}, "advantage.gae_lambda_value must be in [0, 1], got -0.1"),
        ({"gae_lambda_policy": math.nan}, "advantage.gae_lambda_policy must be in [0, 1], got nan"),
        ({"gae_gamma": 0.0}, "advantage.gae_gamma must be in (0, 1], got 0.0"),
        ({"length_adaptive_alpha": -1.0}, "advantage.length_adaptive_alpha must be >= 0, got -1.0"),
        ({"reward_kl_penalty": -1.0}, "advantage.reward_kl_penalty must be >= 0, got -1.0"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        plain(**changes)
