"""Parity with PPO as it is written for games: one long stream of steps with episode ends, no padding.

The stream version below is plain PPO after Schulman et al. (arXiv:1707.06347), in the shape that single-file
implementations use. The same episodes, padded into [B, T], must give the same advantages, losses and weights.

Shape legend: B sequences, T token positions, N steps of the stream, V vocabulary, H features.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from megatron_ppo.numerics.gae import gae, place_terminal_reward, whiten
from megatron_ppo.numerics.losses import (
    LossCounts,
    PolicyLossSettings,
    ValueLossSettings,
    policy_loss,
    value_loss,
)
from megatron_ppo.numerics.reduce import finalise

LENGTHS = [5, 2, 7, 1, 4]
DISCOUNT, LAMBDA, CLIP = 0.97, 0.9, 0.2
FEATURES, VOCABULARY = 6, 4


class ActorCritic(nn.Module):
    """A linear policy and a linear critic over given features."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = nn.Linear(FEATURES, VOCABULARY, dtype=torch.float64)
        self.critic = nn.Linear(FEATURES, 1, dtype=torch.float64)

    def logprobs(self, features: Tensor, actions: Tensor) -> Tensor:
        return self.actor(features).log_softmax(-1).gather(-1, actions[..., None]).squeeze(-1)

    def values(self, features: Tensor) -> Tensor:
        return self.critic(features).squeeze(-1)


def episodes() -> tuple[list[Tensor], list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(5)
    features = [torch.randn((n, FEATURES), generator=generator, dtype=torch.float64) for n in LENGTHS]
    actions = [torch.randint(0, VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    reward_B = torch.randn(len(LENGTHS), generator=generator, dtype=torch.float64)
    return features, actions, reward_B


def stream_advantages(value_N: Tensor, reward_B: Tensor) -> Tensor:
    """Backwards over the whole stream; an episode's end cuts both the bootstrap and the trace."""
    reward_N = torch.zeros_like(value_N)
    done_N = torch.zeros_like(value_N)
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    reward_N[ends], done_N[ends] = reward_B, 1.0
    advantage_N, trace, next_value = torch.zeros_like(value_N), 0.0, 0.0
    for t in reversed(range(len(value_N))):
        alive = 1.0 - float(done_N[t])
        delta = float(reward_N[t]) + DISCOUNT * next_value * alive - float(value_N[t])
        trace = delta + DISCOUNT * LAMBDA * alive * trace
        advantage_N[t], next_value = trace, float(value_N[t])
    return advantage_N


def train_on_stream(model: ActorCritic, epochs: int) -> list[dict[str, float]]:
    features, actions, reward_B = episodes()
    feature_NH, action_N = torch.cat(features), torch.cat(actions)
    with torch.no_grad():
        old_N, old_value_N = model.logprobs(feature_NH, action_N), model.values(feature_NH)
    advantage_N = stream_advantages(old_value_N, reward_B)
    return_N = advantage_N + old_value_N
    advantage_N = (advantage_N - advantage_N.mean()) / (advantage_N.var() + 1e-8).sqrt()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    log = []
    for _ in range(epochs):
        ratio_N = (model.logprobs(feature_NH, action_N) - old_N).exp()
        plain_N, clipped_N = -advantage_N * ratio_N, -advantage_N * ratio_N.clamp(1 - CLIP, 1 + CLIP)
        policy = torch.max(plain_N, clipped_N).mean()
        value_N = model.values(feature_NH)
        near_N = old_value_N + (value_N - old_value_N).clamp(-CLIP, CLIP)
        critic = 0.5 * torch.max((value_N - return_N) ** 2, (near_N - return_N) ** 2).mean()
        optimizer.zero_grad()
        (policy + critic).backward()
        optimizer.step()
        clip_fraction = ((ratio_N - 1.0).abs() > CLIP).double().mean()
        log.append(
            {"policy": float(policy.detach()), "critic": float(critic.detach()), "clip": float(clip_fraction)}
        )
    return log


def train_on_padded_sequences(model: ActorCritic, epochs: int) -> list[dict[str, float]]:
    features, actions, reward_B = episodes()
    batch, prompt, width = len(LENGTHS), 2, max(LENGTHS) + 2
    feature_BTH = torch.full((batch, width, FEATURES), 9.0, dtype=torch.float64)
    action_BT = torch.zeros((batch, width), dtype=torch.int64)
    mask_BT = torch.zeros((batch, width), dtype=torch.bool)
    for b, length in enumerate(LENGTHS):
        feature_BTH[b, prompt : prompt + length] = features[b]
        action_BT[b, prompt : prompt + length] = actions[b]
        mask_BT[b, prompt : prompt + length] = True
    with torch.no_grad():
        old_BT, old_value_BT = model.logprobs(feature_BTH, action_BT), model.values(feature_BTH)
    advantage_BT, return_BT = gae(
        place_terminal_reward(reward_B, mask_BT), old_value_BT, mask_BT, discount=DISCOUNT, gae_lambda=LAMBDA
    )
    advantage_BT = whiten(advantage_BT, mask_BT)
    sample_mask_B = torch.ones(batch, dtype=torch.bool)
    counts = LossCounts(valid_tokens=sum(LENGTHS), valid_sequences=batch, positive_tokens=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    log = []
    for _ in range(epochs):
        policy = policy_loss(
            logprobs_BT=model.logprobs(feature_BTH, action_BT),
            old_logprobs_BT=old_BT,
            generation_logprobs_BT=old_BT,
            ref_logprobs_BT=None,
            advantages_BT=advantage_BT,
            response_mask_BT=mask_BT,
            sample_mask_B=sample_mask_B,
            reward_B=reward_B,
            settings=PolicyLossSettings(),
            counts=counts,
        )
        critic = value_loss(
            values_BT=model.values(feature_BTH),
            old_values_BT=old_value_BT,
            returns_BT=return_BT,
            response_mask_BT=mask_BT,
            sample_mask_B=sample_mask_B,
            settings=ValueLossSettings(cliprange=CLIP),
            counts=counts,
        )
        optimizer.zero_grad()
        (policy.loss + critic.loss).backward()
        optimizer.step()
        clip_fraction = finalise(policy.metrics)["train/clip_fraction"]
        losses = {"policy": float(policy.loss.detach()), "critic": float(critic.loss.detach())}
        log.append({**losses, "clip": clip_fraction})
    return log


def test_padded_sequences_train_like_a_stream_of_episodes() -> None:
    torch.manual_seed(0)
    stream_model = ActorCritic()
    padded_model = copy.deepcopy(stream_model)
    stream = train_on_stream(stream_model, epochs=10)
    padded = train_on_padded_sequences(padded_model, epochs=10)
    assert max(entry["clip"] for entry in stream) > 0.0  # the clipped branch is exercised
    # float64, the same formulas in another order; ten Adam steps keep rounding (1e-16) far below 1e-9.
    for theirs, ours in zip(stream, padded, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-9)
    for theirs, ours in zip(stream_model.parameters(), padded_model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-9, rtol=0.0)
