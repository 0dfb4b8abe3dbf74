"""Which metrics a deterministic run repeats, and how two runs are compared."""

from __future__ import annotations

import math

import pytest

from megatron_ppo.telemetry.metrics import Clock, Row, Telemetry
from megatron_ppo.telemetry.repeatable import Difference, differences, is_repeatable, repeatable


@pytest.mark.parametrize(
    "key",
    ["train/loss", "train/critic/grad_norm", "validation/accuracy", "refit/bytes", "age/max_versions", "step",
     "train/buffer_size", "train/global_valid_seqs", "probe/max_abs_logprob_diff_nats"],
)  # fmt: skip
def test_what_is_computed_is_repeated(key: str) -> None:
    assert is_repeatable(key)


@pytest.mark.parametrize(
    "key",
    ["time_unix_s", "bottleneck", "timing/train/update", "timing/train/valid_tokens_per_sec", "clock/step_start_s",
     "efficiency/idle/validation_pct", "refit/transfer_s", "refit/transfer_gb_per_s", "collector/trajectories",
     "engines/deaths", "refit/failed_attempts",
     "train/trajectory_duration_s", "train/trajectory_duration_s/p95"],
)  # fmt: skip
def test_times_and_what_a_process_counts_are_not(key: str) -> None:
    assert not is_repeatable(key)


def test_a_step_log_adds_nothing_else_that_depends_on_time() -> None:
    """All that the log derives itself, on two clocks."""
    rows = []
    for pace in (1.0, 3.0):
        ticks = iter(range(1000))
        clock = Clock(
            monotonic_s=lambda t=ticks, p=pace: p * next(t), unix_s=lambda t=ticks, p=pace: p * next(t)
        )
        log = Telemetry(clock=clock).step(4)
        with log.timed("exposed_generation"):
            log.add({"train/total_valid_tokens": 7.0})
        rows.append(log.flush())
    assert rows[0] != rows[1]
    assert repeatable(rows[0]) == repeatable(rows[1]) == {"step": 5, "train/total_valid_tokens": 7.0}


def test_every_difference_is_named_with_its_step() -> None:
    first: list[Row] = [{"step": 1, "a": 1.0, "b": math.nan}, {"step": 2, "a": 0.1 + 0.2, "c": 5.0}]
    second: list[Row] = [{"step": 1, "a": 1.0, "b": math.nan}, {"step": 2, "a": 0.3}, {"step": 3, "a": 0.0}]
    assert differences(first, first) == []
    assert differences(first, second) == [
        Difference(step=2, metric="a", first=0.1 + 0.2, second=0.3),
        Difference(step=2, metric="c", first=5.0, second=None),
        Difference(step=3, metric="step", first=None, second=3),
        Difference(step=3, metric="a", first=None, second=0.0),
    ]
    assert str(differences(first, second)[1]) == "step 2: c is 5.0 and None"


def test_the_sign_of_zero_is_a_bit_too() -> None:
    assert len(differences([{"step": 1, "a": 0.0}], [{"step": 1, "a": -0.0}])) == 1


def test_two_rows_of_a_step_cannot_be_compared() -> None:
    with pytest.raises(ValueError, match="two rows of step 1"):
        differences([{"step": 1}, {"step": 1}], [{"step": 1}])
