"""GAE, terminal rewards and whitening against literal sums, limits and hand-made numbers.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megatron_ppo.numerics.gae import gae, length_adaptive_lambda, place_terminal_reward, whiten
from megatron_ppo.numerics.kl import kl_of_log_ratio, reward_kl

# Sums of at most some 20 float64 terms of order 1: rounding is below 1e-14, any error of a formula far above.
EXACT = 1e-12


def double_sum_gae(
    reward: list[float], value: list[float], mask: list[bool], discount: float, gae_lambda: float
) -> list[float]:
    """Eq. 16 of arXiv:1506.02438 as it stands, on the tokens that remain when masked-out ones are cut out."""
    kept = [j for j, keep in enumerate(mask) if keep]
    advantage = [0.0] * len(mask)
    for t, j in enumerate(kept):
        for k in range(t, len(kept)):
            next_value = value[kept[k + 1]] if k + 1 < len(kept) else 0.0
            delta = reward[kept[k]] + discount * next_value - value[kept[k]]
            advantage[j] += (discount * gae_lambda) ** (k - t) * delta
    return advantage


def random_inputs(seed: int, sequences: int = 4, width: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    reward_BT = torch.randn((sequences, width), generator=generator, dtype=torch.float64)
    value_BT = torch.randn((sequences, width), generator=generator, dtype=torch.float64)
    mask_BT = torch.rand((sequences, width), generator=generator) < 0.7
    return reward_BT, value_BT, mask_BT


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), discount=st.floats(0.1, 1.0), gae_lambda=st.floats(0.0, 1.0))
def test_gae_equals_the_literal_double_sum(seed: int, discount: float, gae_lambda: float) -> None:
    reward_BT, value_BT, mask_BT = random_inputs(seed)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, discount=discount, gae_lambda=gae_lambda)
    for b in range(len(mask_BT)):
        expected = double_sum_gae(
            reward_BT[b].tolist(), value_BT[b].tolist(), mask_BT[b].tolist(), discount, gae_lambda
        )
        assert advantage_BT[b].tolist() == pytest.approx(expected, abs=EXACT)
    expected_return_BT = torch.where(mask_BT, advantage_BT + value_BT, 0.0)
    assert torch.equal(return_BT, expected_return_BT)


def test_lambda_one_is_the_discounted_return_to_go_minus_the_value() -> None:
    reward_BT, value_BT, mask_BT = random_inputs(1)
    mask_BT = torch.ones_like(mask_BT)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, discount=0.9, gae_lambda=1.0)
    width = reward_BT.shape[1]
    for t in range(width):
        to_go_B = sum(0.9 ** (k - t) * reward_BT[:, k] for k in range(t, width))
        assert return_BT[:, t].tolist() == pytest.approx(to_go_B.tolist(), abs=EXACT)
        assert advantage_BT[:, t].tolist() == pytest.approx((to_go_B - value_BT[:, t]).tolist(), abs=EXACT)


def test_lambda_zero_is_the_one_step_td_error() -> None:
    reward_BT, value_BT, mask_BT = random_inputs(2)
    mask_BT = torch.ones_like(mask_BT)
    advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, discount=0.9, gae_lambda=0.0)
    next_value_BT = torch.cat([value_BT[:, 1:], torch.zeros_like(value_BT[:, :1])], dim=1)
    assert torch.allclose(advantage_BT, reward_BT + 0.9 * next_value_BT - value_BT, atol=EXACT, rtol=0.0)


def test_equal_values_and_a_terminal_reward_give_the_reward_minus_the_value_everywhere() -> None:
    mask_BT = torch.ones((1, 4), dtype=torch.bool)
    value_BT = torch.full((1, 4), 0.5)
    reward_BT = place_terminal_reward(torch.tensor([1.0]), mask_BT)
    advantage_BT, return_BT = gae(reward_BT, value_BT, mask_BT, discount=1.0, gae_lambda=1.0)
    # Halves are exact in float32.
    assert advantage_BT.tolist() == [[0.5] * 4]
    assert return_BT.tolist() == [[1.0] * 4]


def test_lambda_zero_on_rising_values() -> None:
    mask_BT = torch.ones((1, 3), dtype=torch.bool)
    reward_BT = place_terminal_reward(torch.tensor([5.0]), mask_BT)
    value_BT = torch.tensor([[1.0, 2.0, 3.0]])
    advantage_BT, _ = gae(reward_BT, value_BT, mask_BT, discount=1.0, gae_lambda=0.0)
    assert advantage_BT.tolist() == [[1.0, 1.0, 2.0]]  # small integers: exact


def test_masked_tails_have_advantage_and_return_zero() -> None:
    mask_BT = torch.tensor([[True, True, False, False], [True, False, False, False]])
    reward_BT = place_terminal_reward(torch.tensor([1.0, 2.0]), mask_BT)
    advantage_BT, return_BT = gae(reward_BT, torch.ones((2, 4)), mask_BT, discount=1.0, gae_lambda=0.9)
    assert not advantage_BT[~mask_BT].any()
    assert not return_BT[~mask_BT].any()


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_garbage_at_masked_tokens_changes_nothing(garbage: float) -> None:
    reward_BT, value_BT, mask_BT = random_inputs(3)
    clean = gae(reward_BT, value_BT, mask_BT, discount=0.9, gae_lambda=0.8)
    dirty = gae(
        torch.where(mask_BT, reward_BT, garbage),
        torch.where(mask_BT, value_BT, garbage),
        mask_BT,
        discount=0.9,
        gae_lambda=0.8,
    )
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert torch.equal(whiten(clean[0], mask_BT), whiten(torch.where(mask_BT, clean[0], garbage), mask_BT))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_inserting_masked_tokens_moves_advantages_but_does_not_change_them(
    seed: int, cuts: list[int]
) -> None:
    reward_BT, value_BT, mask_BT = random_inputs(seed, sequences=2)
    before_BT, _ = gae(reward_BT, value_BT, mask_BT, discount=0.9, gae_lambda=0.8)
    wide = [reward_BT, value_BT, mask_BT]
    for cut in cuts:
        fill = [torch.full((2, 1), math.nan, dtype=torch.float64)] * 2 + [
            torch.zeros((2, 1), dtype=torch.bool)
        ]
        wide = [torch.cat([x[:, :cut], f, x[:, cut:]], dim=1) for x, f in zip(wide, fill, strict=True)]
    after_BT, _ = gae(wide[0], wide[1], wide[2], discount=0.9, gae_lambda=0.8)
    assert torch.equal(after_BT[wide[2]], before_BT[mask_BT])  # the same operations in the same order


def test_each_sequence_may_have_its_own_lambda() -> None:
    reward_BT, value_BT, mask_BT = random_inputs(4)
    lambda_B = torch.tensor([0.0, 0.3, 0.7, 1.0], dtype=torch.float64)
    together_BT, _ = gae(reward_BT, value_BT, mask_BT, discount=0.9, gae_lambda=lambda_B)
    for b, one in enumerate(lambda_B.tolist()):
        alone_BT, _ = gae(
            reward_BT[b : b + 1], value_BT[b : b + 1], mask_BT[b : b + 1], discount=0.9, gae_lambda=one
        )
        assert together_BT[b].tolist() == pytest.approx(alone_BT[0].tolist(), abs=EXACT)


def test_length_adaptive_lambda_of_known_lengths() -> None:
    lengths = [3, 8, 20, 40, 1000]
    mask_BT = torch.arange(1000)[None, :] < torch.tensor(lengths)[:, None]
    # float32 result of one division of small integers: below 1e-6.
    assert length_adaptive_lambda(mask_BT, alpha=0.05).tolist() == pytest.approx(
        [0.0, 0.0, 0.0, 0.5, 0.98], abs=1e-6
    )
    empty = length_adaptive_lambda(torch.zeros((1, 4), dtype=torch.bool), alpha=0.05)
    assert empty.tolist() == [0.0]
    with pytest.raises(ValueError, match=r"length_adaptive_alpha must be > 0, got 0\.0"):
        length_adaptive_lambda(mask_BT, alpha=0.0)


def test_reward_goes_to_the_last_response_token_not_to_a_trailing_tool_turn() -> None:
    mask_BT = torch.tensor([[False, True, True, False, False], [False, True, False, True, False]])
    reward_BT = place_terminal_reward(torch.tensor([2.0, -1.0]), mask_BT)
    assert reward_BT.tolist() == [[0.0, 0.0, 2.0, 0.0, 0.0], [0.0, 0.0, 0.0, -1.0, 0.0]]


def test_sequence_without_response_tokens_gets_no_reward() -> None:
    mask_BT = torch.zeros((1, 3), dtype=torch.bool)
    assert not place_terminal_reward(torch.tensor([7.0]), mask_BT).any()
    assert not place_terminal_reward(torch.tensor([math.nan]), mask_BT).any()


def test_whitening_uses_the_unbiased_variance() -> None:
    mask_BT = torch.tensor([[False, True, True, True]])
    whitened_BT = whiten(torch.tensor([[9.0, 1.0, 1.0, 2.0]]), mask_BT)
    # float32 output: 1e-6; the 1e-8 under the root moves the result by 2e-8.
    assert whitened_BT[0].tolist() == pytest.approx([0.0, -0.577350, -0.577350, 1.154701], abs=1e-6)


def test_whitening_no_token_one_token_and_equal_tokens_is_finite() -> None:
    x_BT = torch.tensor([[3.0, 3.0, 3.0]])
    for kept in range(4):
        mask_BT = torch.arange(3)[None, :] < kept
        assert whiten(x_BT, mask_BT).tolist() == [[0.0, 0.0, 0.0]]


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10_000), scale=st.floats(0.5, 50.0), shift=st.floats(-100.0, 100.0))
def test_whitened_tokens_have_mean_zero_and_variance_one_whatever_their_scale(
    seed: int, scale: float, shift: float
) -> None:
    x_BT, _, mask_BT = random_inputs(seed)
    mask_BT[0, :2] = True  # at least two tokens
    kept = whiten(x_BT * scale + shift, mask_BT)[mask_BT]
    assert float(kept.mean()) == pytest.approx(0.0, abs=1e-9)
    # 1e-8 under the root is at most 1e-4 of the variance of two close tokens times 0.25.
    assert float(kept.var()) == pytest.approx(1.0, abs=1e-3)


def test_shapes_that_differ_are_refused_by_name() -> None:
    mask_BT = torch.ones((2, 3), dtype=torch.bool)
    good_BT = torch.zeros((2, 3))
    with pytest.raises(ValueError, match=r"value_BT must have the mask's shape \(2, 3\), got \(2, 4\)"):
        gae(good_BT, torch.zeros((2, 4)), mask_BT, discount=1.0, gae_lambda=1.0)
    with pytest.raises(ValueError, match=r"reward_B must have shape \(2,\), got \(3,\)"):
        place_terminal_reward(torch.zeros(3), mask_BT)


def test_kl_estimators_at_plus_and_minus_one() -> None:
    x = torch.tensor([1.0, -1.0], dtype=torch.float64)
    assert kl_of_log_ratio(x, "k1").tolist() == [-1.0, 1.0]
    assert kl_of_log_ratio(x, "k2").tolist() == [0.5, 0.5]
    assert kl_of_log_ratio(x, "k3").tolist() == pytest.approx([math.e - 2.0, 1.0 / math.e], abs=EXACT)


def test_k1_and_k3_have_the_exact_kl_as_their_expectation() -> None:
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    q = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    exact = float((p * (p / q).log()).sum())
    for kind in ("k1", "k3"):
        assert float((p * kl_of_log_ratio((q / p).log(), kind)).sum()) == pytest.approx(exact, abs=EXACT)


def test_kl_in_the_reward_is_clamped_on_both_sides() -> None:
    logprobs_BT, ref_BT = torch.tensor([[0.0, -300.0]]), torch.tensor([[-300.0, 0.0]])
    assert reward_kl(logprobs_BT, ref_BT, "k1").tolist() == [[10.0, -10.0]]
    assert reward_kl(logprobs_BT, ref_BT, "k3").tolist() == [[10.0, 10.0]]
