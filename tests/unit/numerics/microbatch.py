"""Inputs of the policy loss for its tests: random ones, and one sequence with given numbers.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ppo.numerics.losses import LossCounts, LossOutput, PolicyLossSettings, policy_loss
from megatron_ppo.numerics.reduce import finalise

# float64 in these tests, so that two orders of summation differ by rounding far below any tolerance used.
DTYPE = torch.float64


@dataclass(frozen=True, slots=True, kw_only=True)
class Microbatch:
    logprobs_BT: Tensor
    old_logprobs_BT: Tensor
    generation_logprobs_BT: Tensor
    ref_logprobs_BT: Tensor | None
    advantages_BT: Tensor
    response_mask_BT: Tensor
    sample_mask_B: Tensor
    reward_B: Tensor

    def loss(self, settings: PolicyLossSettings, counts: LossCounts | None = None) -> LossOutput:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return policy_loss(**fields, settings=settings, counts=counts or LossCounts.of(self))

    def rows(self, index: Sequence[int]) -> Microbatch:
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return Microbatch(**{name: None if x is None else x[list(index)] for name, x in fields.items()})

    def replace(self, **fields: Tensor | None) -> Microbatch:
        return dataclasses.replace(self, **fields)

    def padded(self, width: int, garbage: float) -> Microbatch:
        """`width` masked-out positions more on the right, holding `garbage`."""

        def pad(x: Tensor) -> Tensor:
            return torch.cat([x, torch.full((len(x), width), garbage, dtype=x.dtype)], dim=1)

        floats = {
            name: pad(getattr(self, name))
            for name in ("logprobs_BT", "old_logprobs_BT", "generation_logprobs_BT", "advantages_BT")
        }
        tail = torch.zeros((len(self.reward_B), width), dtype=torch.bool)
        mask = torch.cat([self.response_mask_BT, tail], dim=1)
        reference = None if self.ref_logprobs_BT is None else pad(self.ref_logprobs_BT)
        return self.replace(**floats, ref_logprobs_BT=reference, response_mask_BT=mask)


def random_microbatch(seed: int, *, sequences: int = 5, width: int = 9) -> Microbatch:
    """Prompts of 1 to 3 tokens, responses with holes, one excluded sequence, rewards of both signs."""
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float, shift: float = 0.0) -> Tensor:
        return torch.randn((sequences, width), generator=generator, dtype=DTYPE) * scale + shift

    position_T = torch.arange(width)
    start_B1 = torch.randint(1, 4, (sequences, 1), generator=generator)
    end_B1 = torch.randint(5, width + 1, (sequences, 1), generator=generator)
    hole_BT = torch.rand((sequences, width), generator=generator) < 0.15
    sample_mask_B = torch.ones(sequences, dtype=torch.bool)
    sample_mask_B[seed % sequences] = False
    old_BT = normal(0.5, -1.5)
    return Microbatch(
        logprobs_BT=old_BT + normal(0.3),
        old_logprobs_BT=old_BT,
        generation_logprobs_BT=old_BT + normal(0.3),
        ref_logprobs_BT=old_BT + normal(0.5),
        advantages_BT=normal(1.0),
        response_mask_BT=(position_T >= start_B1) & (position_T < end_B1) & ~hole_BT,
        sample_mask_B=sample_mask_B,
        reward_B=torch.randn(sequences, generator=generator, dtype=DTYPE),
    )


def one_sequence(
    *,
    advantages: Sequence[float],
    logprobs: Sequence[float],
    old: Sequence[float] | None = None,
    generation: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    reward: float = 0.0,
) -> Microbatch:
    """One prompt token, then these response tokens. `old` defaults to `logprobs`, `generation` to `old`."""

    def row(values: Sequence[float]) -> Tensor:
        return torch.tensor([[0.0, *values]], dtype=DTYPE)

    old = logprobs if old is None else old
    return Microbatch(
        logprobs_BT=row(logprobs),
        old_logprobs_BT=row(old),
        generation_logprobs_BT=row(old if generation is None else generation),
        ref_logprobs_BT=None if reference is None else row(reference),
        advantages_BT=row(advantages),
        response_mask_BT=torch.tensor([[False] + [True] * len(logprobs)]),
        sample_mask_B=torch.tensor([True]),
        reward_B=torch.tensor([reward], dtype=DTYPE),
    )


def with_ratios(
    ratios: Sequence[float], *, advantages: Sequence[float], generation: Sequence[float] | None = None
) -> Microbatch:
    """One sequence whose old log-probs are all -1 and whose PPO ratios are the given ones."""
    old = [-1.0] * len(ratios)
    logprobs = [-1.0 + math.log(ratio) for ratio in ratios]
    return one_sequence(advantages=advantages, logprobs=logprobs, old=old, generation=generation)


def metrics_of(output: LossOutput) -> dict[str, float]:
    return finalise(output.metrics)
