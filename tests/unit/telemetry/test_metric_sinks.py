"""Files that metrics end in: legal JSON, no row lost or doubled over kills and resumes, readable events."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.metrics import Row
from megatron_ppo.telemetry.run_dir import RunDirectory
from megatron_ppo.telemetry.sinks import JsonlSink, StatusSink, TensorBoardSink, build_telemetry, read_rows


def write_rows(path: Path, steps: range, *, attempt: int = 1) -> None:
    """What one process of a run does, when it is not killed."""
    sink = JsonlSink(path)
    sink.start(next_step=steps.start)
    for step in steps:
        sink.write(row(step, attempt=attempt))
    sink.close()


def row(step: int, *, attempt: int = 1, **metrics: float | str) -> Row:
    return {"step": step, "time_unix_s": 1000.0 + step, "attempt": attempt, **metrics}


def attempts(path: Path) -> dict[int, int]:
    return {int(r["step"]): int(r["attempt"]) for r in read_rows(path)}


def test_rows_come_back_as_they_were_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.start(next_step=0)
    written = [
        row(0, **{"validation/accuracy": 0.5}),
        row(1, **{"train/reward": 0.1, "bottleneck": "generation"}),
    ]
    for one in written:
        sink.write(one)
    # Before close: every row must be on its way when `write` returns.
    assert read_rows(path) == written
    sink.close()
    sink.close()


def test_values_that_are_not_finite_are_legal_json_and_come_back(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    sink = JsonlSink(path)
    sink.start(next_step=1)
    sink.write(row(1, a=math.nan, b=math.inf, c=-math.inf))

    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is no JSON")

    parsed = json.loads(path.read_text(), parse_constant=refuse)
    assert [parsed[key] for key in "abc"] == ["NaN", "Infinity", "-Infinity"]
    (back,) = read_rows(path)
    assert math.isnan(float(back["a"]))
    assert (back["b"], back["c"]) == (math.inf, -math.inf)


def test_a_step_is_never_written_twice(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "metrics.jsonl")
    with pytest.raises(ValueError, match="`start` was not called"):
        sink.write(row(1))
    sink.start(next_step=1)
    sink.write(row(1))
    with pytest.raises(ValueError, match="row of step 1 follows step 1"):
        sink.write(row(1))


def test_resuming_drops_exactly_the_rows_that_run_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(8))
    write_rows(path, range(6, 10), attempt=2)
    assert attempts(path) == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1, 6: 2, 7: 2, 8: 2, 9: 2}
    assert "dropped 2 rows of steps >= 6" in caplog.text
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_a_run_without_checkpoint_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(3))
    write_rows(path, range(2), attempt=2)
    assert attempts(path) == {0: 2, 1: 2}


def test_a_missing_row_of_a_completed_step_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 3))
    write_rows(path, range(5, 6))
    assert "has no rows of the completed steps [3, 4]" in caplog.text


@pytest.mark.parametrize("cut", [1, 2, 20])
def test_a_torn_last_line_is_dropped_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, cut: int
) -> None:
    path = tmp_path / "metrics.jsonl"
    write_rows(path, range(1, 4))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    with caplog.at_level(logging.WARNING):
        rows = read_rows(path)
    if cut == 1:  # only the newline is missing: the row itself is whole
        assert [r["step"] for r in rows] == [1, 2, 3]
    else:
        assert [r["step"] for r in rows] == [1, 2]
        assert "dropped the torn last line 3" in caplog.text
    next_step = len(rows) + 1
    write_rows(path, range(next_step, 5), attempt=2)
    assert list(attempts(path)) == [1, 2, 3, 4]


@settings(max_examples=60, deadline=None)
@given(lives=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6), st.integers(0, 60)), max_size=5))
def test_steps_stay_increasing_over_any_kills_and_resumes(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[int, int, int]]
) -> None:
    """Each life resumes from a completed step, writes some rows, and loses the last bytes in the kill."""
    path = tmp_path_factory.mktemp("lives") / "metrics.jsonl"
    expected: dict[int, int] = {}
    for attempt, (checkpoint, length, torn_bytes) in enumerate(lives):
        start = min(checkpoint, max(expected, default=0)) + 1
        write_rows(path, range(start, start + length), attempt=attempt)
        expected = {step: life for step, life in expected.items() if step < start}
        expected |= dict.fromkeys(range(start, start + length), attempt)
        assert attempts(path) == expected
        if length:  # a kill tears at most the line being written
            last = path.read_bytes().splitlines(keepends=True)[-1]
            cut = min(torn_bytes, len(last) - 1)
            path.write_bytes(path.read_bytes()[: len(path.read_bytes()) - cut])
            if cut > 1:
                del expected[start + length - 1]


def test_garbage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(ConfigError, match="line 2 is no metrics row"):
        read_rows(path)
    path.write_text('{"reward": 1}\n{"step": 3}\n')
    with pytest.raises(ConfigError, match=r"line 1 is no metrics row: .*`step`"):
        read_rows(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_rows(tmp_path / "absent.jsonl")


def test_a_killed_writer_leaves_a_file_that_a_resumed_run_continues(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys; from pathlib import Path; from megatron_ppo.telemetry.sinks import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1])); sink.start(next_step=1); step = 0\n"
        "while True:\n"
        "    step += 1; sink.write({'step': step, 'attempt': 1, 'padding': 'x' * 5000})\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    try:
        deadline_s = time.monotonic() + 30
        while not path.exists() or path.stat().st_size < 200_000:
            assert time.monotonic() < deadline_s, "waited 30 s for the writer's first rows"
            time.sleep(0.01)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=30)
    done = len(read_rows(path))
    assert done > 30
    write_rows(path, range(done - 4, done + 3), attempt=2)
    steps = attempts(path)
    assert list(steps) == list(range(1, done + 3))
    assert [steps[done - 5], steps[done - 4]] == [1, 2]


def test_tensorboard_reads_the_curves_of_a_resumed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    first = TensorBoardSink(tmp_path)
    first.start(next_step=1)
    for step in (1, 2, 3):
        first.write(
            row(step, **{"train/reward": step / 10, "bottleneck": "training", "clock/step_start_s": 5.0})
        )
    first.close()
    later_s = time.time() + 1.1
    with monkeypatch.context() as clock:
        # Event files are ordered by the second of their creation, which is in their names.
        clock.setattr(time, "time", lambda: later_s)
        second = TensorBoardSink(tmp_path)
    second.start(next_step=3)
    second.write(row(3, **{"train/reward": 0.9}))
    second.close()
    second.close()

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert sorted(events.Tags()["scalars"]) == ["attempt", "train/reward"]
    curve = [(e.step, round(e.value, 6)) for e in events.Scalars("train/reward")]
    assert curve == [(1, 0.1), (2, 0.2), (3, 0.9)]


def test_status_file_keeps_the_newest_value_of_every_metric(tmp_path: Path) -> None:
    path = tmp_path / "status.json"
    sink = StatusSink(path, max_num_steps=40)
    sink.note("starting the engine")
    status = json.loads(path.read_text())
    assert (status["step"], status["note"], status["pid"]) == (None, "starting the engine", os.getpid())
    sink.start(next_step=11)
    assert json.loads(path.read_text())["step"] == 10
    sink.write(row(11, **{"validation/accuracy": 0.5}))
    sink.write(row(12, **{"train/loss": math.nan}))
    status = json.loads(path.read_text())
    assert (status["step"], status["max_num_steps"], status["note"]) == (12, 40, "")
    assert status["metrics"]["validation/accuracy"] == 0.5
    assert status["metrics"]["train/loss"] == "NaN"


def test_rank_zero_telemetry_fills_every_file(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    telemetry = build_telemetry(directory, max_num_steps=2, num_trainer_ranks=1, tensorboard=True)
    for step in range(2):
        log = telemetry.step(step)
        log.add({"train/reward": 0.5})
        log.flush()
    telemetry.close()
    assert [r["step"] for r in read_rows(directory.metrics_path)] == [1, 2]
    assert json.loads(directory.status_path.read_text())["step"] == 2
    assert len(list(directory.events_dir.iterdir())) == 1
