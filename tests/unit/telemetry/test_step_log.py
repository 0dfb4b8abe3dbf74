"""Rows of a step: timers, clocks, derived numbers, and the mistakes that must not pass."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Mapping

import numpy
import pytest

from megatron_ppo.telemetry.metrics import Clock, MetricValue, NullTelemetry, Telemetry

# A sleep may end late on a busy machine, never early; clock reads differ by less than this.
CLOCK_SLACK_S = 0.005


class Hands:
    """A clock that moves when it is told; its epoch time starts at 1000 s."""

    def __init__(self) -> None:
        self._now_s = 0
        self.clock = Clock(monotonic_s=lambda: self._now_s, unix_s=lambda: 1000 + self._now_s)

    def pass_by(self, seconds: int) -> None:
        self._now_s += seconds


class RecordingSink:
    """Keeps what it is given and refuses a wrong order of calls, as the real sinks do."""

    def __init__(self) -> None:
        self.rows: list[dict[str, MetricValue]] = []
        self.notes: list[str] = []
        self.next_step: int | None = None
        self.closed = False

    def start(self, *, next_step: int) -> None:
        assert self.next_step is None, "start comes once"
        self.next_step = next_step

    def write(self, row: Mapping[str, MetricValue]) -> None:
        assert self.next_step is not None, "start comes before the first row"
        assert not self.closed
        self.rows.append(dict(row))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def close(self) -> None:
        self.closed = True


def test_row_counts_completed_steps_and_keeps_every_metric() -> None:
    sink = RecordingSink()
    telemetry = Telemetry(sinks=[sink])
    before_s = time.time()
    log = telemetry.step(4)
    log.add({"train/reward": 0.5, "train/grad_norm": numpy.float32(0.25), "train/num_masked": 3})
    assert log.values == {"train/reward": 0.5, "train/grad_norm": 0.25, "train/num_masked": 3}
    row = log.flush()
    assert sink.rows == [row]
    assert row["step"] == 5
    assert before_s <= float(row["time_unix_s"]) <= time.time()
    assert type(row["train/grad_norm"]) is float
    assert (row["train/reward"], row["train/num_masked"]) == (0.5, 3)


def test_timer_records_seconds_and_the_wall_interval() -> None:
    log = Telemetry().step(0)
    before_s = time.time()
    with log.timed("exposed_generation"):
        time.sleep(0.03)
    after_s = time.time()
    row = log.flush()
    seconds = float(row["timing/train/exposed_generation"])
    start_s, end_s = (float(row[f"clock/exposed_generation_{edge}_s"]) for edge in ("start", "end"))
    assert 0.03 <= seconds <= after_s - before_s + CLOCK_SLACK_S
    assert before_s - CLOCK_SLACK_S <= start_s < end_s <= after_s + CLOCK_SLACK_S
    # Both are derived from the same two clock reads; only rounding of seconds since the epoch differs.
    assert end_s - start_s == pytest.approx(seconds, abs=1e-5)


def test_repeated_timer_adds_up_and_its_clock_spans_first_to_last_use() -> None:
    hands = Hands()
    log = Telemetry(clock=hands.clock).step(0)
    hands.pass_by(1)
    for _ in range(2):
        with log.timed("value_training"):
            hands.pass_by(3)
        hands.pass_by(5)
    row = log.flush()
    assert row["timing/train/value_training"] == 6
    assert (row["clock/value_training_start_s"], row["clock/value_training_end_s"]) == (1001, 1012)
    assert (row["clock/step_start_s"], row["clock/step_end_s"], row["time_unix_s"]) == (1000, 1017, 1017)
    assert row["timing/train/total_step_time"] == 17


def test_a_timer_is_recorded_when_its_block_raises() -> None:
    log = Telemetry().step(0)
    with pytest.raises(KeyError), log.timed("weight_sync"):
        raise KeyError("weights")
    assert log.seconds("weight_sync") > 0.0
    assert "timing/train/weight_sync" in log.flush()


def test_untimed_time_counts_outermost_timers_once() -> None:
    hands = Hands()
    log = Telemetry(clock=hands.clock).step(0)
    with log.timed("update"):
        hands.pass_by(1)
        with log.timed("value_training"):
            hands.pass_by(2)
    hands.pass_by(4)
    row = log.flush()
    assert (row["timing/train/update"], row["timing/train/value_training"]) == (3, 2)
    assert row["timing/train/untimed"] == 4


def test_derived_throughput_and_efficiency_match_the_timers() -> None:
    hands = Hands()
    log = Telemetry(num_trainer_ranks=2, clock=hands.clock).step(0)
    for timer, seconds in (
        ("exposed_generation", 2),
        ("weight_sync", 3),
        ("idle/validation", 5),
        ("update", 10),
    ):
        with log.timed(timer):
            hands.pass_by(seconds)
    log.add({"train/total_valid_tokens": 600})
    row = log.flush()
    assert row["efficiency/idle/buffer_starvation_pct"] == 10
    assert row["efficiency/idle/refit_bubble_pct"] == 15
    assert row["efficiency/idle/validation_pct"] == 25
    assert row["efficiency/efficiency_pct"] == 50
    assert row["timing/train/valid_tokens_per_sec"] == 30
    assert row["timing/train/valid_tokens_per_sec_per_gpu"] == 15


@pytest.mark.parametrize(
    ("waiting_s", "bottleneck"), [(50, "generation"), (11, "generation"), (9, "training")]
)
def test_bottleneck_is_the_side_that_the_step_waits_for(waiting_s: int, bottleneck: str) -> None:
    hands = Hands()
    log = Telemetry(clock=hands.clock).step(0)
    with log.timed("exposed_generation"):
        hands.pass_by(waiting_s)
    with log.timed("update"):
        hands.pass_by(100 - waiting_s)
    assert log.flush()["bottleneck"] == bottleneck


def test_row_zero_has_set_up_timings_and_no_step_numbers() -> None:
    sink = RecordingSink()
    log = Telemetry(sinks=[sink]).before_first_step()
    with log.timed("idle/validation"):
        pass
    log.add({"validation/accuracy": 0.25})
    row = log.flush()
    assert (row["step"], row["validation/accuracy"]) == (0, 0.25)
    assert "timing/setup/idle/validation" in row
    assert not [key for key in row if key.startswith(("timing/train/", "efficiency/", "bottleneck"))]
    assert sink.next_step == 0


def test_sinks_are_told_once_where_the_run_continues() -> None:
    sink = RecordingSink()
    telemetry = Telemetry(sinks=[sink])
    telemetry.step(7).flush()
    telemetry.step(8).flush()
    assert sink.next_step == 8
    assert [row["step"] for row in sink.rows] == [8, 9]


@pytest.mark.parametrize("make", [lambda: Telemetry(sinks=[RecordingSink()]), NullTelemetry])
def test_the_same_mistakes_are_errors_on_every_rank(make: type[NullTelemetry]) -> None:
    log = make().step(2)
    log.add({"train/loss": 1.0})
    with pytest.raises(ValueError, match=r"'train/loss' is set twice in step 3: it is 1\.0, got 2\.0"):
        log.add({"train/loss": 2.0})
    with pytest.raises(ValueError, match="'step' is written by the step log"):
        log.add({"step": 2.0})
    with pytest.raises(TypeError, match="'train/note' must be a number, got str: 'x'"):
        log.add({"train/note": "x"})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="timer name must be lower-case"), log.timed("Wait for groups"):
        pass
    log.flush()
    with pytest.raises(RuntimeError, match="step 3 is already flushed"):
        log.flush()
    with pytest.raises(RuntimeError, match="step 3 is already flushed"):
        log.add({"train/reward": 1.0})


def test_a_metric_under_a_timer_key_is_an_error() -> None:
    log = Telemetry().step(0)
    log.add({"timing/train/weight_sync": 1.0})
    with log.timed("weight_sync"):
        pass
    with pytest.raises(ValueError, match="'timing/train/weight_sync' of step 1 has two sources"):
        log.flush()


def test_values_that_are_not_finite_are_kept() -> None:
    log = Telemetry().step(0)
    log.add({"train/loss": math.inf})
    assert log.flush()["train/loss"] == math.inf


def test_closing_closes_every_sink_even_when_one_fails() -> None:
    class FailingSink(RecordingSink):
        def close(self) -> None:
            raise OSError("disk full")

    last = RecordingSink()
    with pytest.raises(OSError, match="disk full"):
        Telemetry(sinks=[FailingSink(), last]).close()
    assert last.closed


def test_notes_reach_every_sink() -> None:
    sink = RecordingSink()
    Telemetry(sinks=[sink]).note("starting the engine")
    assert sink.notes == ["starting the engine"]


def test_importing_telemetry_loads_no_torch_and_changes_no_stream() -> None:
    modules = ["display", "doctor", "gate_check", "gates", "metrics", "process_log", "run_dir", "sinks"]
    code = (
        "import sys, logging; before = sys.stdout, sys.stderr, list(logging.getLogger().handlers);"
        + "".join(f"import megatron_ppo.telemetry.{module};" for module in modules)
        + "assert before == (sys.stdout, sys.stderr, logging.getLogger().handlers);"
        "print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'tensorboard') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"
