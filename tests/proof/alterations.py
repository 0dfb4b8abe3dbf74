"""Deliberately broken parts, one mistake each, for proving that the gates notice.

`train_broken.py` passes them through `run_job(..., alter=...)` to the real trainer; everything else in the run is
what a user runs. Every wrapper keeps the port's contract and does the same on every rank.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.async_ppo import Parts
from megatron_ppo.loop.ports import Advantage, Critic, Metrics, Policy
from megatron_ppo.numerics.loss_output import LossCounts
from megatron_ppo.numerics.loss_settings import ValueLossSettings
from megatron_ppo.numerics.reduce import finalise, over_minibatches
from megatron_ppo.numerics.value_losses import value_loss

STALE_STEPS = 4


class _AlteredAdvantage:
    """Changes the batch before, or the result after, the real estimator."""

    def __init__(
        self,
        real: Advantage,
        *,
        before: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
        after: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
    ) -> None:
        self._real, self._before, self._after = real, before, after

    def apply(self, batch: TrainBatch) -> TrainBatch:
        estimated = self._after(self._real.apply(self._before(batch)))
        return batch.replace(advantages_BT=estimated.advantages_BT, returns_BT=estimated.returns_BT)

    def metrics(self, batch: TrainBatch) -> Metrics:
        return self._real.metrics(batch)


class _AlteredPolicy:
    """Changes old log-probs after they were computed, or minibatches before an update."""

    def __init__(
        self,
        real: Policy,
        *,
        old: Callable[[Tensor, TrainBatch], Tensor] = lambda logprobs_BT, batch: logprobs_BT,
        before_update: Callable[[TrainBatch], TrainBatch] = lambda batch: batch,
    ) -> None:
        self._real, self._old, self._before_update = real, old, before_update

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        return self._old(self._real.logprobs(batch, temperature=temperature), batch)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        return self._real.reference_logprobs(batch)

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        return self._real.update([self._before_update(minibatch) for minibatch in minibatches])


def flip_sign(parts: Parts) -> Parts:
    """Advantages have the wrong sign; returns are right."""

    def negate(batch: TrainBatch) -> TrainBatch:
        assert batch.advantages_BT is not None
        return batch.replace(advantages_BT=-batch.advantages_BT)

    return dataclasses.replace(parts, advantage=_AlteredAdvantage(parts.advantage, after=negate))


def shift_old_logprobs(parts: Parts) -> Parts:
    """The old log-prob of token j is that of token j - 1."""

    def shift(logprobs_BT: Tensor, batch: TrainBatch) -> Tensor:
        shifted_BT = torch.nn.functional.pad(logprobs_BT[:, :-1], (1, 0))
        return torch.where(batch.response_mask_BT, shifted_BT, 0.0)

    return dataclasses.replace(parts, policy=_AlteredPolicy(parts.policy, old=shift))


def shuffle_rewards(parts: Parts) -> Parts:
    """Each sequence is credited with the reward of another one, drawn anew in every step."""
    generator = torch.Generator().manual_seed(0)  # the same on every rank

    def shuffle(batch: TrainBatch) -> TrainBatch:
        return batch.replace(reward_B=batch.reward_B[torch.randperm(len(batch), generator=generator)])

    return dataclasses.replace(parts, advantage=_AlteredAdvantage(parts.advantage, before=shuffle))


def shorten_gae_mask(parts: Parts) -> Parts:
    """GAE's mask ends one token early, while the reward stays on the last token, which is masked out now."""

    def shorten(batch: TrainBatch) -> TrainBatch:
        mask_BT = batch.response_mask_BT.clone()
        mask_BT[torch.arange(len(batch)), batch.length_B - 1] = False
        # A reward on a masked-out token counts as none.
        return batch.replace(response_mask_BT=mask_BT, reward_B=torch.zeros_like(batch.reward_B))

    return dataclasses.replace(parts, advantage=_AlteredAdvantage(parts.advantage, before=shorten))


class _ShiftedValues:
    """Reads values one token late; training is right."""

    def __init__(self, real: Critic) -> None:
        self._real = real

    def values(self, batch: TrainBatch) -> Tensor:
        shifted_BT = torch.nn.functional.pad(self._real.values(batch)[:, 1:], (0, 1))
        return torch.where(batch.response_mask_BT, shifted_BT, 0.0)

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        return self._real.update(minibatches)


def shift_values(parts: Parts) -> Parts:
    """The array of values is shifted by one token: that of token j + 1 stands at j, and 0 at the last token."""
    return dataclasses.replace(parts, critic=_ShiftedValues(parts.critic))


class _FrozenCritic:
    """Scores, and reports its loss, but never learns."""

    def __init__(self, real: Critic) -> None:
        self._real = real

    def values(self, batch: TrainBatch) -> Tensor:
        return self._real.values(batch)

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        return finalise(over_minibatches([_value_loss_metrics(minibatch) for minibatch in minibatches]))


def _value_loss_metrics(minibatch: TrainBatch) -> Mapping[str, Any]:
    assert minibatch.values_BT is not None and minibatch.returns_BT is not None
    return value_loss(
        values_BT=minibatch.values_BT,
        old_values_BT=minibatch.values_BT,
        returns_BT=minibatch.returns_BT,
        response_mask_BT=minibatch.response_mask_BT,
        sample_mask_B=minibatch.sample_mask_B,
        settings=ValueLossSettings(),
        counts=LossCounts.of(minibatch),
    ).metrics


def freeze_critic(parts: Parts) -> Parts:
    """The critic is never trained."""
    return dataclasses.replace(parts, critic=_FrozenCritic(parts.critic))


class _StaleOldLogprobs:
    """Old log-probs by the weights of STALE_STEPS steps ago, on samples of the current ones."""

    def __init__(self, real: Any) -> None:
        self._real = real
        self._history: list[list[Tensor]] = []

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        current = self._weights()
        self._history = [*self._history, current][-(STALE_STEPS + 1) :]
        self._install(self._history[0])
        try:
            result: Tensor = self._real.logprobs(batch, temperature=temperature)
        finally:
            self._install(current)
        return result

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        result: Tensor = self._real.reference_logprobs(batch)
        return result

    def update(self, minibatches: Sequence[TrainBatch]) -> Metrics:
        metrics: Metrics = self._real.update(minibatches)
        return metrics

    def _weights(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self._parameters()]

    def _install(self, weights: Sequence[Tensor]) -> None:
        for tensor, value in zip(self._parameters(), weights, strict=True):
            tensor.copy_(value)

    def _parameters(self) -> Iterator[Tensor]:
        for chunk in self._real.trained.chunks:
            yield from (parameter.detach() for parameter in chunk.parameters())


def score_with_stale_weights(parts: Parts) -> Parts:
    """The PPO denominator comes from weights that are four steps old."""
    return dataclasses.replace(parts, policy=_StaleOldLogprobs(parts.policy))


def never_sync(parts: Parts) -> Parts:
    """Every publish stamps a new version but sends the weights of the first one."""
    policy: Any = parts.policy  # also the refit's weight source
    export = policy.full_weights
    first: list[Tensor] = []

    def full_weights() -> Iterator[Tensor]:
        if not first:
            first.extend(tensor.detach().clone() for tensor in export())
        return iter(first)

    policy.full_weights = full_weights
    return parts


def drop_importance_weights(parts: Parts) -> Parts:
    """w = exp(old - generation) is 1, as if it had been left out. Mismatch metrics become 0 with it."""

    def without(minibatch: TrainBatch) -> TrainBatch:
        assert minibatch.old_logprobs_BT is not None
        return minibatch.replace(generation_logprobs_BT=minibatch.old_logprobs_BT)

    return dataclasses.replace(parts, policy=_AlteredPolicy(parts.policy, before_update=without))


def invert_importance_weights(parts: Parts) -> Parts:
    """w = exp(generation - old) instead of exp(old - generation), under the same cap."""

    def mirrored(minibatch: TrainBatch) -> TrainBatch:
        assert minibatch.old_logprobs_BT is not None
        return minibatch.replace(
            generation_logprobs_BT=2.0 * minibatch.old_logprobs_BT - minibatch.generation_logprobs_BT
        )

    return dataclasses.replace(parts, policy=_AlteredPolicy(parts.policy, before_update=mirrored))


ALTERATIONS: Mapping[str, Callable[[Parts], Parts]] = {
    "sign": flip_sign,
    "shift_logp": shift_old_logprobs,
    "shuffle_reward": shuffle_rewards,
    "gae_mask_short": shorten_gae_mask,
    "values_shift": shift_values,
    "critic_frozen": freeze_critic,
    "stale_old": score_with_stale_weights,
    "never_synced": never_sync,
    "no_importance_weights": drop_importance_weights,
    "inverted_importance_weights": invert_importance_weights,
}
