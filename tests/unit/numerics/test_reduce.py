"""How parts of metrics join."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ppo.numerics.reduce import MetricPart, Reduction, combine, finalise, over_minibatches


def part(value: float, kind: Reduction) -> MetricPart:
    return MetricPart(value=torch.tensor(value, dtype=torch.float64), kind=kind)


def test_sums_add_and_extrema_ignore_parts_without_tokens() -> None:
    first = {"s": part(1.0, "sum"), "lo": part(2.0, "min"), "hi": part(-math.inf, "max")}
    second = {"s": part(0.5, "sum"), "lo": part(math.inf, "min"), "hi": part(-3.0, "max")}
    assert finalise(combine([first, second])) == {"s": 1.5, "lo": 2.0, "hi": -3.0}


def test_extrema_without_any_valid_token_are_reported_as_minus_one() -> None:
    nothing = {"lo": part(math.inf, "min"), "hi": part(-math.inf, "max")}
    assert finalise(combine([nothing, nothing])) == {"lo": -1.0, "hi": -1.0}


def test_infinite_or_nan_sum_stays_visible() -> None:
    result = finalise({"s": part(math.inf, "sum"), "n": part(math.nan, "sum")})
    assert result["s"] == math.inf
    assert math.isnan(result["n"])


def test_joining_ranks_of_microbatches_equals_joining_all_at_once() -> None:
    parts = [{"s": part(x, "sum"), "lo": part(x, "min"), "hi": part(x, "max")} for x in (1.0, 4.0, 2.0, 8.0)]
    by_rank = combine([combine(parts[:2]), combine(parts[2:])])
    assert finalise(by_rank) == finalise(combine(parts)) == {"s": 15.0, "lo": 1.0, "hi": 8.0}


def test_metrics_of_several_optimizer_steps_are_means_and_overall_extrema() -> None:
    steps = [
        {"s": part(1.0, "sum"), "lo": part(1.0, "min")},
        {"s": part(3.0, "sum"), "lo": part(-1.0, "min"), "rare": part(5.0, "sum")},
    ]
    assert finalise(over_minibatches(steps)) == {"s": 2.0, "lo": -1.0, "rare": 5.0}


def test_parts_of_different_kinds_do_not_join() -> None:
    with pytest.raises(ValueError, match="metric x has parts of different kinds: max, sum"):
        combine([{"x": part(1.0, "sum")}, {"x": part(1.0, "max")}])
