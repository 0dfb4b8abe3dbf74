"""Metrics that arrive in parts: one per microbatch and data-parallel rank, joined into one number per step.

Losses produce parts; the model adapter joins those of the microbatches, gathers the joined ones of the ranks,
joins again (`combine`), averages over minibatches (`over_minibatches`) and ends with `finalise`.
Invariant: the result does not depend on how the minibatch was split, because means travel as shares that were
divided by the minibatch's global counts and therefore add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from megatron_ppo.numerics.masking import select

Reduction = Literal["sum", "min", "max"]

# What an extremum over no valid token is reported as, so that logs hold only finite numbers.
NO_EXTREMUM = -1.0

VARIANCE_FLOOR = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricPart:
    """One part of a metric.

    Attributes:
        value: float64 scalar tensor, detached. A `sum` part is a share, already divided by the global count.
        kind: how parts join. An extremum over nothing is +inf for `min`, -inf for `max`: neutral when joined.
    """

    value: Tensor
    kind: Reduction


def combine(parts: Iterable[Mapping[str, MetricPart]]) -> dict[str, MetricPart]:
    """Join the parts of one minibatch: of its microbatches, then of its data-parallel ranks.

    Raises: ValueError if a metric's kind differs between parts.
    """
    grouped: dict[str, list[MetricPart]] = {}
    for mapping in parts:
        for name, part in mapping.items():
            grouped.setdefault(name, []).append(part)
    return {name: _join(name, group) for name, group in grouped.items()}


def over_minibatches(minibatches: Sequence[Mapping[str, MetricPart]]) -> dict[str, MetricPart]:
    """Join the metrics of several optimizer steps: sums become means over the steps that have them."""
    joined = combine(minibatches)
    result: dict[str, MetricPart] = {}
    for name, part in joined.items():
        if part.kind == "sum":
            present = sum(name in minibatch for minibatch in minibatches)
            result[name] = MetricPart(value=part.value / present, kind="sum")
        else:
            result[name] = part
    return result


def finalise(parts: Mapping[str, MetricPart]) -> dict[str, float]:
    """Plain numbers for the log: infinite extrema become -1.0; explained variance joins its moments."""
    result: dict[str, float] = {}
    for name, part in parts.items():
        value = float(part.value)
        result[name] = NO_EXTREMUM if part.kind != "sum" and math.isinf(value) else value
    if "train/critic/returns_sq_mean" in result:
        result["train/critic/explained_var"] = explained_variance_of_moments(
            values_mean=result["train/critic/values_mean"],
            returns_mean=result["train/critic/returns_mean"],
            returns_sq_mean=result["train/critic/returns_sq_mean"],
            residual_sq_mean=result["train/critic/residual_sq_mean"],
        )
    return result


def explained_variance_of_moments(
    *, values_mean: float, returns_mean: float, returns_sq_mean: float, residual_sq_mean: float
) -> float:
    """1 - Var(R - V) / Var(R) from token means; a constant offset of V costs nothing. At most 1."""
    returns_variance = returns_sq_mean - returns_mean**2
    residual_variance = residual_sq_mean - (returns_mean - values_mean) ** 2
    return 1.0 - residual_variance / max(returns_variance, VARIANCE_FLOOR)


def explained_variance(values_BT: Tensor, returns_BT: Tensor, mask_BT: Tensor) -> float:
    """1 - Σ(R - V)² / Σ(R - mean R)² over masked-in tokens; an offset of V counts here.

    The denominator's mean square is kept at 1e-8 or above, so equal returns that are predicted
    exactly give 1.
    """
    returns_BT = select(returns_BT, mask_BT, name="returns_BT").double()
    values_BT = select(values_BT, mask_BT, name="values_BT").double()
    count = max(int(mask_BT.sum()), 1)
    residual = float((returns_BT - values_BT).square().sum()) / count
    centred_BT = torch.where(mask_BT, returns_BT - returns_BT.sum() / count, 0.0)
    return 1.0 - residual / max(float(centred_BT.square().sum()) / count, VARIANCE_FLOOR)


def _join(name: str, parts: Sequence[MetricPart]) -> MetricPart:
    kind = parts[0].kind
    if any(part.kind != kind for part in parts):
        kinds = sorted({part.kind for part in parts})
        raise ValueError(f"metric {name} has parts of different kinds: {', '.join(kinds)}")
    values = torch.stack([part.value for part in parts])
    if kind == "sum":
        return MetricPart(value=values.sum(), kind=kind)
    return MetricPart(value=values.amin() if kind == "min" else values.amax(), kind=kind)
