"""From the rows of a run to where the time of a step goes.

All times come from the run's own clocks in metrics.jsonl, which are seconds since the epoch on one host: the
learner's timers, and when the groups of each step were generated.

Invariant: the learner's parts add up to the step, because the last one is what the others leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.intervals import Interval, difference, duration_s, intersection
from megatron_ppo.telemetry.metrics import MetricValue

TRAINING = (
    "value_inference",
    "policy_and_reference_logprobs",
    "advantage_calculation",
    "value_training",
    "policy_training",
)
"""Timers of the learner that are training, scoring included."""

REFIT = ("drain", "refit")
"""Parts of the step that are the refit."""

OVERHEAD = ("hand_over", "data_processing", "probe", "validation", "rest")
"""Parts of the step that are neither training, nor waiting for engines that generate, nor refit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """Mean seconds per step.

    Attributes:
        num_steps: steps measured.   step_s: from the start of one step to the start of the next.
        generate_s: time in which at least one group was being generated and the engines were not paused.
        learner_s: the step as the learner spends it, in its order:
            waiting          for groups that are being generated
            hand_over        for groups while nothing is generated: polling, scoring, commits
            data_processing  padding and metrics
            TRAINING         values, log-probs, advantages, critic update, policy update
            drain            from the pause of the engines until what they were generating is finished
            refit            from there to their going on with new weights
            probe            comparison of engine and learner after a refit
            validation       with the current weights
            rest             everything else: opening the window, logging, a checkpoint
    """

    num_steps: int
    step_s: float
    generate_s: float
    learner_s: Mapping[str, float]

    @property
    def train_s(self) -> float:
        """Seconds of training per step."""
        return sum(self.learner_s[name] for name in TRAINING)

    @property
    def overhead_s(self) -> float:
        """Seconds per step of everything that is neither train, generate nor refit."""
        return sum(self.learner_s[name] for name in OVERHEAD)

    @property
    def overhead_share(self) -> float:
        """The same as a share of the step."""
        return self.overhead_s / self.step_s

    @property
    def eta(self) -> float:
        """max(train, generate) / step; 1 would be perfect overlap at no cost."""
        return max(self.train_s, self.generate_s) / self.step_s


def step_times(rows: Sequence[Mapping[str, MetricValue]], *, skip: int, drop: int = 1) -> StepTimes:
    """Mean over the rows of a run, without the first `skip` steps and the last `drop`.

    Nothing is generated beside the last step of a run, and its end is no start of another: `drop` is at least 1.
    Raises: ValueError when no step is left.
    """
    if drop < 1:
        raise ValueError(f"drop must be >= 1, got {drop}")
    steps = [row for row in rows if _number(row, "step") >= 1]
    measured = steps[skip : max(0, len(steps) - drop)]
    if not measured:
        raise ValueError(f"{len(steps)} steps leave none after skipping {skip} and dropping {drop}")
    window = (_clock(measured[0], "step")[0], _clock(steps[skip + len(measured)], "step")[0])
    busy = intersection(_generating(steps), [window])

    num_steps = len(measured)
    step_s = (window[1] - window[0]) / num_steps
    waits = [_clock(row, "exposed_generation") for row in measured]
    wait_s = _mean(measured, "timing/train/exposed_generation")
    waiting_s = duration_s(intersection(waits, busy)) / num_steps
    drain_s, refit_s = _mean(measured, "refit/drain_s"), _mean(measured, "refit/total_s")
    learner = {
        "waiting": waiting_s,
        "hand_over": max(0.0, wait_s - waiting_s),  # two clocks: without hand-over the difference is rounding
        "data_processing": _mean(measured, "timing/train/data_processing"),
        **{name: _mean(measured, f"timing/train/{name}") for name in TRAINING},
        "drain": drain_s,
        "refit": refit_s - drain_s,
        "probe": _mean(measured, "timing/train/weight_sync") - refit_s,
        "validation": _mean(measured, "timing/train/idle/validation"),
    }
    learner["rest"] = step_s - sum(learner.values())
    return StepTimes(
        num_steps=num_steps, step_s=step_s, generate_s=duration_s(busy) / num_steps, learner_s=learner
    )


def mean_of(runs: Sequence[StepTimes]) -> StepTimes:
    """The mean of several runs, each with the same weight."""
    return StepTimes(
        num_steps=sum(run.num_steps for run in runs),
        step_s=fmean(run.step_s for run in runs),
        generate_s=fmean(run.generate_s for run in runs),
        learner_s={name: fmean(run.learner_s[name] for run in runs) for name in runs[0].learner_s},
    )


def expected_gain(synchronous: StepTimes) -> float:
    """How much faster full overlap could be, from the parts of a synchronous step.

    The longer one of training and generation hides the other one; everything else stays.
    """
    hidden_s = min(synchronous.train_s, synchronous.generate_s)
    return synchronous.step_s / (synchronous.step_s - hidden_s)


def _generating(steps: Sequence[Mapping[str, MetricValue]]) -> list[Interval]:
    """When groups were being generated; without the pauses in which the engines took weights."""
    pauses = []
    for row in steps:
        if "refit/total_s" in row:
            start_s = _clock(row, "weight_sync")[0]
            pauses.append((start_s + _number(row, "refit/drain_s"), start_s + _number(row, "refit/total_s")))
    return difference([_clock(row, "generation") for row in steps], pauses)


def _clock(row: Mapping[str, MetricValue], name: str) -> Interval:
    return _number(row, f"clock/{name}_start_s"), _number(row, f"clock/{name}_end_s")


def _number(row: Mapping[str, MetricValue], key: str) -> float:
    return float(row[key])


def _mean(rows: Sequence[Mapping[str, MetricValue]], key: str) -> float:
    """Per step; a timer that a step did not use counts as 0."""
    return fmean(float(row.get(key, 0.0)) for row in rows)
