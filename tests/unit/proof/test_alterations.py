"""Each broken part makes the one mistake that it is named after, and nothing else.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from alterations import ALTERATIONS, STALE_STEPS
from proof_cases import all_cases
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.loop.async_ppo import Parts
from megatron_ppo.numerics.losses import LossCounts, PolicyLossSettings, policy_loss

# float32 sums of a few numbers of order 1.
ROUNDING = 1e-6


class OneWeightPolicy:
    """Its log-prob of every response token is its one weight, to which every update adds -1."""

    def __init__(self) -> None:
        self.weight = torch.zeros(1)
        self.trained = self  # where the real policy keeps its chunks
        self.chunks = [self]
        self.updated_with: Sequence[TrainBatch] = ()

    def parameters(self) -> Iterator[Tensor]:
        yield self.weight

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        position_T = torch.arange(batch.token_ids_BT.shape[1])
        return torch.where(batch.response_mask_BT, self.weight - 0.1 * position_T, 0.0)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        raise AssertionError("no test asks for it")

    def update(self, minibatches: Sequence[TrainBatch]) -> dict[str, float]:
        self.updated_with = minibatches
        self.weight -= 1.0
        return {"train/loss": 0.0}

    def full_weights(self) -> Iterator[Tensor]:
        yield self.weight


class PositionCritic:
    """The value of the state before token j is j, wherever the mask is set."""

    def __init__(self) -> None:
        self.updates = 0

    def values(self, batch: TrainBatch) -> Tensor:
        position_T = torch.arange(batch.token_ids_BT.shape[1], dtype=torch.float32)
        return torch.where(batch.response_mask_BT, position_T, 0.0)

    def update(self, minibatches: Sequence[TrainBatch]) -> dict[str, float]:
        self.updates += 1
        return {}


def batch_of(*, rewards: Sequence[float] = (1.0, 0.0, 1.0), values: float = 0.0) -> TrainBatch:
    """Three sequences: one prompt token and 2, 3 and 4 response tokens."""
    length_B = torch.tensor([3, 4, 5])
    position_T = torch.arange(5)
    mask_BT = (position_T >= 1) & (position_T < length_B[:, None])
    return TrainBatch(
        token_ids_BT=torch.ones((3, 5), dtype=torch.int64),
        length_B=length_B,
        response_mask_BT=mask_BT,
        sample_mask_B=torch.ones(3, dtype=torch.bool),
        generation_logprobs_BT=torch.where(mask_BT, -0.5, 0.0),
        reward_B=torch.tensor(rewards),
        truncated_B=torch.zeros(3, dtype=torch.bool),
        ordinal_B=torch.arange(3),
        old_logprobs_BT=torch.where(mask_BT, -0.25, 0.0),
        values_BT=torch.where(mask_BT, values, 0.0),
    )


def altered(name: str, **parts: Any) -> Parts:
    """The alteration on stand-ins for the given parts; the others are absent, so touching them would fail."""
    fields = {field.name: parts.get(field.name) for field in dataclasses.fields(Parts)}
    return ALTERATIONS[name](Parts(**fields))


def estimator(*, whiten: bool = False) -> GAE:
    return GAE(gae_lambda=0.95, gae_gamma=1.0, normalize_advantages=whiten)


def test_every_bug_of_the_proof_exists() -> None:
    assert {case.bug for case in all_cases() if case.bug is not None} == set(ALTERATIONS)


def test_flipped_sign_leaves_returns_alone() -> None:
    right = estimator().apply(batch_of(values=0.5))
    wrong = altered("sign", advantage=estimator()).advantage.apply(batch_of(values=0.5))
    assert right.advantages_BT is not None and right.returns_BT is not None and wrong.returns_BT is not None
    assert torch.equal(wrong.advantages_BT, -right.advantages_BT)
    assert torch.equal(wrong.returns_BT, right.returns_BT)


def test_shifted_old_logprob_is_that_of_the_token_before() -> None:
    policy = altered("shift_logp", policy=OneWeightPolicy()).policy
    expected = [[0, 0, -0.1, 0, 0], [0, 0, -0.1, -0.2, 0], [0, 0, -0.1, -0.2, -0.3]]
    assert policy.logprobs(batch_of()).tolist() == [pytest.approx(row, abs=ROUNDING) for row in expected]


def test_shuffled_rewards_are_the_same_rewards_on_other_sequences() -> None:
    advantage = altered("shuffle_reward", advantage=estimator()).advantage
    seen = set()
    for _ in range(20):
        batch = advantage.apply(batch_of(rewards=[1.0, 2.0, 3.0]))
        assert batch.returns_BT is not None and batch.reward_B.tolist() == [1.0, 2.0, 3.0]
        # Monte-Carlo returns with values 0 and λ < 1 end in the reward at the last token.
        last_B = batch.returns_BT[torch.arange(3), batch.length_B - 1]
        assert sorted(last_B.tolist()) == [1.0, 2.0, 3.0]
        seen.add(tuple(last_B.tolist()))
    assert len(seen) > 1


def test_short_mask_loses_the_reward_and_keeps_the_batchs_own_mask() -> None:
    batch = batch_of(rewards=[1.0, 1.0, 1.0])
    estimated = altered("gae_mask_short", advantage=estimator()).advantage.apply(batch)
    assert estimated.advantages_BT is not None and estimated.returns_BT is not None
    assert not estimated.advantages_BT.any() and not estimated.returns_BT.any()
    assert torch.equal(estimated.response_mask_BT, batch.response_mask_BT)


def test_shifted_values_end_in_zero() -> None:
    critic = altered("values_shift", critic=PositionCritic()).critic
    assert critic.values(batch_of()).tolist() == [[0, 2, 0, 0, 0], [0, 2, 3, 0, 0], [0, 2, 3, 4, 0]]


def test_frozen_critic_reports_its_loss_and_never_updates() -> None:
    real = PositionCritic()
    critic = altered("critic_frozen", critic=real).critic
    batch = estimator().apply(batch_of(values=0.5)).replace(returns_BT=torch.ones(3, 5))
    metrics = critic.update([batch])
    assert real.updates == 0
    assert metrics["train/critic/loss"] == pytest.approx(0.5 * 0.5**2, abs=ROUNDING)


def test_stale_old_logprobs_are_those_of_four_steps_ago_and_the_weights_stay() -> None:
    real = OneWeightPolicy()
    policy = altered("stale_old", policy=real).policy
    batch = batch_of()
    for step in range(2 * STALE_STEPS):
        scored = float(policy.logprobs(batch)[0, 1]) + 0.1
        assert scored == pytest.approx(-max(0, step - STALE_STEPS), abs=ROUNDING)
        assert float(real.weight) == -step
        policy.update([batch])


def test_engine_that_is_never_synced_is_sent_the_first_weights_again() -> None:
    real = OneWeightPolicy()
    altered("never_synced", policy=real)
    sent = []
    for _ in range(3):
        sent.append([float(tensor) for tensor in real.full_weights()])
        real.update([])
    assert sent == [[0.0], [0.0], [0.0]]


@pytest.mark.parametrize(
    ("name", "log_weight"), [("no_importance_weights", 0.0), ("inverted_importance_weights", -0.25)]
)
def test_importance_weights_are_dropped_or_inverted(name: str, log_weight: float) -> None:
    real = OneWeightPolicy()
    altered(name, policy=real).policy.update([batch_of()])
    (batch,) = real.updated_with
    assert batch.old_logprobs_BT is not None
    result = policy_loss(
        logprobs_BT=batch.old_logprobs_BT,
        old_logprobs_BT=batch.old_logprobs_BT,
        generation_logprobs_BT=batch.generation_logprobs_BT,
        ref_logprobs_BT=None,
        advantages_BT=torch.ones(3, 5),
        response_mask_BT=batch.response_mask_BT,
        sample_mask_B=batch.sample_mask_B,
        reward_B=batch.reward_B,
        settings=PolicyLossSettings(),
        counts=LossCounts.of(batch),
    )
    assert float(result.loss) == pytest.approx(-torch.tensor(log_weight).exp().item(), abs=ROUNDING)
