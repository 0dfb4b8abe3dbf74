"""Where the time of a step goes, on made-up clocks whose answers can be read off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.intervals import difference, duration_s, intersection, union
from benchmarks.step_parts import (
    OVERHEAD,
    REFIT,
    TRAINING,
    StepTimes,
    expected_gain,
    mean_of,
    step_times,
)

ROUNDING_S = 1e-9
"""The clocks below have few digits; only float sums are rounded."""

PERIOD_S = 10.0
TRAIN_S = {
    "value_inference": 0.5,
    "policy_and_reference_logprobs": 0.4,
    "advantage_calculation": 0.1,
    "value_training": 3.0,
    "policy_training": 3.5,
}
WAIT_S, DATA_S, DRAIN_S, REFIT_S, SYNC_S, GAP_S = 0.8, 0.2, 0.1, 0.5, 0.9, 0.6


def row(step: int, generation: tuple[float, float], start_s: float | None = None) -> dict[str, float]:
    """One step that starts at `step` · PERIOD_S: wait, data, training, refit with probe, then a gap to the next."""
    start = step * PERIOD_S if start_s is None else start_s
    wait_end = start + WAIT_S
    sync = wait_end + DATA_S + sum(TRAIN_S.values())
    return {
        "step": float(step),
        "timing/train/exposed_generation": WAIT_S,
        "timing/train/data_processing": DATA_S,
        **{f"timing/train/{name}": seconds for name, seconds in TRAIN_S.items()},
        "timing/train/weight_sync": SYNC_S,
        "refit/drain_s": DRAIN_S,
        "refit/total_s": REFIT_S,
        "clock/exposed_generation_start_s": start,
        "clock/exposed_generation_end_s": wait_end,
        "clock/weight_sync_start_s": sync,
        "clock/weight_sync_end_s": sync + SYNC_S,
        "clock/step_start_s": start,
        "clock/step_end_s": sync + SYNC_S,
        "clock/generation_start_s": generation[0],
        "clock/generation_end_s": generation[1],
    }


def overlapped(num_steps: int = 6, busy_s: float = 5.0) -> list[dict[str, float]]:
    """The groups of a step are generated during the one before, from its first second on."""
    return [row(s, ((s - 1) * PERIOD_S, (s - 1) * PERIOD_S + busy_s)) for s in range(1, num_steps + 1)]


def test_parts_of_the_learner_add_up_to_the_step() -> None:
    times = step_times(overlapped(), skip=1)
    assert times.num_steps == 4
    assert times.step_s == pytest.approx(PERIOD_S, abs=ROUNDING_S)
    assert sum(times.learner_s.values()) == pytest.approx(PERIOD_S, abs=ROUNDING_S)
    assert times.learner_s["probe"] == pytest.approx(SYNC_S - REFIT_S, abs=ROUNDING_S)
    spent_s = WAIT_S + DATA_S + sum(TRAIN_S.values()) + SYNC_S
    assert times.learner_s["rest"] == pytest.approx(PERIOD_S - spent_s, abs=ROUNDING_S)


def test_waiting_counts_as_overhead_only_while_nothing_is_generated() -> None:
    """Generation for the next step starts 0.3 s into the wait of 0.8 s."""
    rows = [row(s, ((s - 1) * PERIOD_S + 0.3, (s - 1) * PERIOD_S + 5.0)) for s in range(1, 7)]
    times = step_times(rows, skip=1)
    assert times.learner_s["waiting"] == pytest.approx(0.5, abs=ROUNDING_S)
    assert times.learner_s["hand_over"] == pytest.approx(0.3, abs=ROUNDING_S)


def test_eta_is_the_longer_of_training_and_generation() -> None:
    assert step_times(overlapped(busy_s=5.0), skip=1).eta == pytest.approx(0.75, abs=ROUNDING_S)
    assert step_times(overlapped(busy_s=8.0), skip=1).eta == pytest.approx(0.8, abs=ROUNDING_S)


def test_generation_stands_still_while_the_engines_take_weights() -> None:
    """Groups that run from one step into the next: the pause of the refit is not busy time, its drain is."""
    rows = [row(s, ((s - 1) * PERIOD_S, s * PERIOD_S)) for s in range(1, 7)]
    times = step_times(rows, skip=1)
    assert times.generate_s == pytest.approx(PERIOD_S - (REFIT_S - DRAIN_S), abs=ROUNDING_S)


def test_generation_of_overlapping_steps_is_counted_once() -> None:
    rows = [row(s, ((s - 2) * PERIOD_S, (s - 1) * PERIOD_S + 4.0)) for s in range(1, 9)]
    times = step_times(rows, skip=2, drop=2)
    assert times.generate_s == pytest.approx(PERIOD_S - (REFIT_S - DRAIN_S), abs=ROUNDING_S)


def test_overhead_is_everything_but_train_generate_and_refit() -> None:
    times = step_times(overlapped(), skip=1)
    refit_s = sum(times.learner_s[name] for name in REFIT)
    assert refit_s == pytest.approx(REFIT_S, abs=ROUNDING_S)
    spent_s = times.train_s + times.learner_s["waiting"] + refit_s
    assert times.overhead_s == pytest.approx(PERIOD_S - spent_s, abs=ROUNDING_S)
    assert {*OVERHEAD, *TRAINING, *REFIT, "waiting"} == set(times.learner_s)


def test_time_between_two_steps_belongs_to_the_rest() -> None:
    """A checkpoint is written after the row: only the start of the next step shows it."""
    rows = overlapped()
    later = [row(int(r["step"]), (0.0, 0.0), r["clock/step_start_s"] + GAP_S * (r["step"] - 1)) for r in rows]
    difference_s = step_times(later, skip=1).learner_s["rest"] - step_times(rows, skip=1).learner_s["rest"]
    assert difference_s == pytest.approx(GAP_S, abs=ROUNDING_S)


def test_a_step_without_refit_has_none() -> None:
    rows = overlapped()
    for each in rows:
        for key in ("refit/drain_s", "refit/total_s", "timing/train/weight_sync"):
            del each[key]
    times = step_times(rows, skip=1)
    assert [times.learner_s[name] for name in (*REFIT, "probe")] == [0.0, 0.0, 0.0]


def test_the_row_of_the_first_validation_is_no_step() -> None:
    rows = overlapped()
    with_start = [{"step": 0.0, "clock/step_start_s": 0.0, "clock/step_end_s": 9.0}, *rows]
    assert step_times(with_start, skip=1) == step_times(rows, skip=1)


@pytest.mark.parametrize(("skip", "drop"), [(5, 1), (0, 0), (2, 9)])
def test_nothing_to_measure_is_an_error(skip: int, drop: int) -> None:
    with pytest.raises(ValueError, match=r"drop must be|leave none"):
        step_times(overlapped(), skip=skip, drop=drop)


def test_full_overlap_hides_the_shorter_side() -> None:
    learner = dict.fromkeys([*OVERHEAD, *TRAINING, *REFIT], 0.0) | {
        "waiting": 3.0, "value_training": 6.0, "refit": 0.5, "rest": 0.5,
    }  # fmt: skip
    synchronous = StepTimes(num_steps=1, step_s=10.0, generate_s=3.0, learner_s=learner)
    assert expected_gain(synchronous) == pytest.approx(10.0 / 7.0)


def test_mean_of_runs_weighs_them_alike() -> None:
    fast, slow = step_times(overlapped(), skip=1), step_times(overlapped(busy_s=7.0), skip=3)
    mean = mean_of([fast, slow])
    assert mean.num_steps == fast.num_steps + slow.num_steps
    assert mean.generate_s == pytest.approx((fast.generate_s + slow.generate_s) / 2)


TICKS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=6)


def ticks_in(intervals: list[tuple[float, float]]) -> set[int]:
    """The unit intervals [t, t + 1) that are covered, for intervals with whole ends."""
    return {t for start, end in intervals for t in range(int(start), int(end))}


@given(TICKS, TICKS)
def test_intervals_behave_like_sets_of_times(first, second) -> None:
    a, b = ticks_in(first), ticks_in(second)
    assert ticks_in(union(first)) == a
    assert ticks_in(intersection(first, second)) == a & b
    assert ticks_in(difference(first, second)) == a - b
    assert duration_s(difference(first, second)) == len(a - b)
    assert union(first) == sorted(union(first))
