"""Owns the metrics of one training step, from the first timer to the finished row.

The loop drives it: `telemetry.step(step)`, then `timed` and `add`, then `flush`. All trainer ranks run the
same calls; only rank 0 has sinks, so a wrong key is an error on every rank alike.

Invariant: a row is written whole or not at all, and no key is ever set twice in a step by `add`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, SupportsFloat, TypeAlias

MetricValue: TypeAlias = float | str
Row: TypeAlias = dict[str, MetricValue]

# Timer in which the learner waits for prompt groups.
WAIT_TIMER = "exposed_generation"

# Part of `efficiency/` -> timer during which the training side does no training.
IDLE_TIMERS: Mapping[str, str] = {
    "idle/buffer_starvation": WAIT_TIMER,
    "idle/refit_bubble": "weight_sync",
    "idle/validation": "idle/validation",
}

# In a balanced pipeline the learner still waits for polling and stragglers; below this share of the step more
# generation throughput would not shorten the step.
GENERATION_BOUND_WAIT_SHARE = 0.1

BETWEEN_STAGES = "between stages"
StageListener: TypeAlias = Callable[[str, int], None]

_TIMER_NAME = re.compile(r"[a-z0-9_]+(/[a-z0-9_]+)*")
_RESERVED_KEYS = frozenset({"step", "time_unix_s", "bottleneck"})


class Sink(Protocol):
    """Receives every finished row. Lives on rank 0 only."""

    def start(self, *, next_step: int) -> None:
        """Called once, before the first row, whose `step` will be `next_step`.

        That is 0 or 1 for a new run, else one more than the completed steps of the checkpoint that the run
        continues from. Rows that an earlier process wrote at or beyond it are out of date: those steps run
        again.
        """
        ...

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Store or show one row; `step` is the number of completed steps."""
        ...

    def note(self, text: str) -> None:
        """Show or keep one line for the person at the terminal."""
        ...

    def close(self) -> None:
        """Release files and threads. Harmless when repeated."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Clock:
    """Where time comes from: durations in seconds, and seconds since the epoch."""

    monotonic_s: Callable[[], float] = time.perf_counter
    unix_s: Callable[[], float] = time.time


class StepLog:
    """Metrics of one step. Made by `Telemetry`, used by one thread.

    Args:
        completed_steps: number of completed steps once this step is done; 0 for what happens before step 1.
        sinks: where `flush` sends the row.
        num_trainer_ranks: ranks that share the step, for the per-rank throughput.
        on_stage: told the innermost running timer whenever it changes, and `completed_steps`.
    """

    def __init__(
        self,
        *,
        completed_steps: int,
        sinks: Sequence[Sink],
        num_trainer_ranks: int,
        clock: Clock,
        on_stage: StageListener,
    ) -> None:
        self.completed_steps = completed_steps
        self._sinks = sinks
        self._num_trainer_ranks = num_trainer_ranks
        self._clock = clock
        self._values: dict[str, float] = {}
        self._seconds: dict[str, float] = {}
        self._intervals: dict[str, tuple[float, float]] = {}
        self._running: list[str] = []
        self._on_stage = on_stage
        self._outermost_s = 0.0
        self._started_s = clock.monotonic_s()
        self._started_unix_s = clock.unix_s()
        self._flushed = False

    @property
    def values(self) -> Mapping[str, float]:
        """What has been added so far, without timers and derived metrics."""
        return self._values

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Measure a part of the step as `timing/train/<name>` (s), summed over uses of the same name.

        `clock/<name>_start_s` and `clock/<name>_end_s` are seconds since the epoch: the start of the first
        use and the end of the last, to compare with the clocks of other processes on the same host.

        Raises: ValueError for a name that is not lower-case words joined by `_` and `/`.
        """
        self._require_open()
        if not _TIMER_NAME.fullmatch(name):
            raise ValueError(f"timer name must be lower-case words joined by '_' or '/', got {name!r}")
        start_unix_s, start_s = self._clock.unix_s(), self._clock.monotonic_s()
        self._running.append(name)
        self._on_stage(name, self.completed_steps)
        try:
            yield
        finally:
            elapsed_s = self._clock.monotonic_s() - start_s
            self._running.pop()
            self._on_stage(self._running[-1] if self._running else BETWEEN_STAGES, self.completed_steps)
            if not self._running:
                self._outermost_s += elapsed_s
            self._seconds[name] = self._seconds.get(name, 0.0) + elapsed_s
            first_s, _ = self._intervals.get(name, (start_unix_s, start_unix_s))
            self._intervals[name] = (first_s, start_unix_s + elapsed_s)

    def add(self, metrics: Mapping[str, SupportsFloat]) -> None:
        """Add metrics under new keys; zero-dimensional arrays and tensors count as numbers.

        Raises: ValueError for a key that this step already has or that the log writes itself; TypeError for a
            value that is no number.
        """
        self._require_open()
        for key, value in metrics.items():
            if key in _RESERVED_KEYS:
                raise ValueError(f"metric key {key!r} is written by the step log itself; choose another name")
            if key in self._values:
                raise ValueError(
                    f"metric {key!r} is set twice in step {self.completed_steps}: "
                    f"it is {self._values[key]!r}, got {value!r}"
                )
            if not isinstance(value, SupportsFloat):
                raise TypeError(f"metric {key!r} must be a number, got {type(value).__name__}: {value!r}")
            self._values[key] = value if isinstance(value, (int, float)) else float(value)

    def seconds(self, name: str) -> float:
        """Seconds measured so far under the timer `name`; 0 when it was not used."""
        return self._seconds.get(name, 0.0)

    def flush(self) -> Row:
        """Finish the step: derive the remaining metrics, send the row to every sink, return it.

        Raises: RuntimeError when called twice; ValueError when a timer and a metric share a key.
        """
        self._require_open()
        self._flushed = True
        total_s = self._clock.monotonic_s() - self._started_s
        row: Row = {"step": self.completed_steps, "time_unix_s": self._clock.unix_s()}
        parts: list[Mapping[str, MetricValue]] = [self._values, self._timings(), self._clocks(total_s)]
        if self.completed_steps > 0:
            parts.append(self._derived(total_s))
        for part in parts:
            for key, value in part.items():
                if key in row:
                    raise ValueError(f"metric {key!r} of step {self.completed_steps} has two sources")
                row[key] = value
        for sink in self._sinks:
            sink.write(row)
        return row

    def _require_open(self) -> None:
        if self._flushed:
            raise RuntimeError(f"the log of step {self.completed_steps} is already flushed")

    def _timings(self) -> dict[str, float]:
        prefix = "timing/train/" if self.completed_steps > 0 else "timing/setup/"
        return {prefix + name: seconds for name, seconds in self._seconds.items()}

    def _clocks(self, total_s: float) -> dict[str, float]:
        intervals = {**self._intervals, "step": (self._started_unix_s, self._started_unix_s + total_s)}
        named = {}
        for name, (start_s, end_s) in intervals.items():
            named[f"clock/{name}_start_s"] = start_s
            named[f"clock/{name}_end_s"] = end_s
        return named

    def _derived(self, total_s: float) -> Row:
        derived: Row = {
            "timing/train/total_step_time": total_s,
            "timing/train/untimed": max(0.0, total_s - self._outermost_s),
        }
        valid_tokens = self._values.get("train/total_valid_tokens")
        if valid_tokens is not None:
            derived["timing/train/valid_tokens_per_sec"] = valid_tokens / total_s
            derived["timing/train/valid_tokens_per_sec_per_gpu"] = (
                valid_tokens / total_s / self._num_trainer_ranks
            )
        idle_s = 0.0
        for category, timer in IDLE_TIMERS.items():
            seconds = self.seconds(timer)
            idle_s += seconds
            derived[f"efficiency/{category}_pct"] = 100.0 * seconds / total_s
        derived["efficiency/efficiency_pct"] = 100.0 * max(0.0, total_s - idle_s) / total_s
        wait_share = self.seconds(WAIT_TIMER) / total_s
        derived["bottleneck"] = "generation" if wait_share > GENERATION_BOUND_WAIT_SHARE else "training"
        return derived


class Telemetry:
    """Makes step logs and owns the sinks.

    Args:
        sinks: receivers of rows, in order; empty on every rank but 0.
        num_trainer_ranks: ranks that share a step.
        clock: source of time; tests give their own.
        on_stage: see `StepLog`.
    """

    def __init__(
        self,
        *,
        sinks: Sequence[Sink] = (),
        num_trainer_ranks: int = 1,
        clock: Clock | None = None,
        on_stage: StageListener | None = None,
    ) -> None:
        if num_trainer_ranks < 1:
            raise ValueError(f"num_trainer_ranks must be >= 1, got {num_trainer_ranks}")
        self._sinks = tuple(sinks)
        self._num_trainer_ranks = num_trainer_ranks
        self._clock = clock or Clock()
        self._on_stage = on_stage or _nobody_listens
        self._started = False

    def before_first_step(self) -> StepLog:
        """The log of row 0, of the validation before step 1. Its timers become `timing/setup/...`."""
        return self._log(0)

    def step(self, step: int) -> StepLog:
        """The log of training step `step`, counted from 0; its row has `step` + 1, the completed steps.

        Raises: ValueError for a negative step.
        """
        if step < 0:
            raise ValueError(f"step must be >= 0, got {step}")
        return self._log(step + 1)

    def note(self, text: str) -> None:
        """Show one line to the person at the terminal, for example the part that is starting."""
        for sink in self._sinks:
            sink.note(text)

    def close(self) -> None:
        """Close every sink, also when one of them fails; the first failure is raised at the end."""
        failures: list[Exception] = []
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # every other sink must still be closed
                failures.append(error)
        if failures:
            raise failures[0]

    def _log(self, completed_steps: int) -> StepLog:
        if not self._started:
            self._started = True
            for sink in self._sinks:
                sink.start(next_step=completed_steps)
        return StepLog(
            completed_steps=completed_steps,
            sinks=self._sinks,
            num_trainer_ranks=self._num_trainer_ranks,
            clock=self._clock,
            on_stage=self._on_stage,
        )


class NullTelemetry(Telemetry):
    """Telemetry of ranks other than 0: the same checks and timers, nothing written."""

    def __init__(self, *, on_stage: StageListener | None = None) -> None:
        super().__init__(sinks=(), on_stage=on_stage)


def _nobody_listens(stage: str, completed_steps: int) -> None:
    """The default listener."""
