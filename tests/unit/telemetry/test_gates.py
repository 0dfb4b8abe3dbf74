"""Gates against hand-made rows: numbers, and everything for which a gate must fail."""

from __future__ import annotations

import json
import math
import subprocess
from pathlib import Path

import pytest
import yaml

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.gate_check import check_run
from megatron_ppo.telemetry.gates import (
    GateResult,
    all_passed,
    evaluate,
    format_gates,
    gate_table,
    parse_gates,
    results_as_json,
)
from megatron_ppo.telemetry.metrics import Row
from megatron_ppo.telemetry.run_dir import open_run
from megatron_ppo.telemetry.sinks import build_telemetry
from tests.unit.script_runs import run_script, run_script_here

# Reward 0.1, 0.2, ... 1.0 at steps 1..10; accuracy at 0, 5 and 10; clip fraction from step 4 on (no warm-up).
ROWS: list[Row] = [{"step": 0, "validation/accuracy": 0.4}]
for _step in range(1, 11):
    _row: Row = {"step": _step, "train/reward": _step / 10, "bottleneck": "training"}
    if _step % 5 == 0:
        _row["validation/accuracy"] = 0.4 + _step / 20
    if _step >= 4:
        _row["train/clip_fraction"] = 0.01 * _step
    ROWS.append(_row)


def result_of(**fields: object) -> GateResult:
    (result,) = evaluate(parse_gates({"gate": fields}), ROWS)
    return result


@pytest.mark.parametrize(
    ("stat", "steps", "observed"),
    [
        ("mean", [6, 10], 0.8),
        ("mean", None, 0.55),
        ("median", [1, 4], 0.25),
        ("median", [1, 3], 0.2),
        ("min", [3, 7], 0.3),
        ("max", [3, 7], 0.7),
        ("first", [3, 7], 0.3),
        ("last", [3, 7], 0.7),
        ("mean", [10, 10], 1.0),
    ],
)
def test_statistics_over_inclusive_windows(stat: str, steps: list[int] | None, observed: float) -> None:
    result = result_of(metric="train/reward", stat=stat, steps=steps, op=">=", value=0.0)
    # Means of tenths: exact up to float rounding.
    assert result.observed == pytest.approx(observed, abs=1e-12)
    assert result.passed


@pytest.mark.parametrize(
    ("op", "value", "passed"),
    [
        ("<", 1.0, False),
        ("<", 1.1, True),
        ("<=", 1.0, True),
        ("<=", 0.9, False),
        (">", 1.0, False),
        (">", 0.9, True),
        (">=", 1.0, True),
        (">=", 1.1, False),
        ("==", 1.0, True),
        ("==", 0.9, False),
    ],
)
def test_operators_at_the_bound(op: str, value: float, passed: bool) -> None:
    assert result_of(metric="train/reward", stat="last", op=op, value=value).passed is passed


def test_gain_is_the_difference_of_two_windows() -> None:
    minus = {"stat": "mean", "steps": [1, 5]}
    gain = result_of(metric="train/reward", stat="mean", steps=[6, 10], minus=minus, op=">=", value=0.49)
    assert gain.observed == pytest.approx(0.5, abs=1e-12)
    assert gain.passed
    other = {"metric": "train/clip_fraction", "stat": "max"}
    assert result_of(metric="train/reward", stat="max", minus=other, op="==", value=0.9).passed


def test_validation_gain_reads_row_zero() -> None:
    minus = {"stat": "first", "steps": [0, 0]}
    gain = result_of(
        metric="validation/accuracy", stat="last", steps=[10, 10], minus=minus, op=">=", value=0.45
    )
    assert gain.observed == pytest.approx(0.5, abs=1e-12)
    assert gain.passed
    assert result_of(metric="validation/accuracy", stat="first", op="==", value=0.4).passed


def test_rows_without_the_metric_are_skipped_inside_a_window() -> None:
    # Policy metrics are absent on frozen steps 1-3: mean of 0.04, 0.05, 0.06.
    result = result_of(metric="train/clip_fraction", stat="mean", steps=[1, 6], op="<=", value=0.05)
    assert result.observed == pytest.approx(0.05, abs=1e-12)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"metric": "train/reword"}, "no train/reword in any row"),
        ({"metric": "train/clip_fraction", "steps": [1, 3]}, "no train/clip_fraction in steps 1-3"),
        ({"metric": "train/reward", "steps": [8, 13]}, "no row of step 11-13"),
        ({"metric": "train/reward", "steps": [36, 40]}, "no row of step 36-40"),
        ({"metric": "bottleneck"}, "bottleneck is training at step 1"),
        ({"metric": "train/reward", "minus": {"steps": [11, 11]}}, "no row of step 11"),
    ],
)
def test_a_gate_fails_for_want_of_data_and_says_so(fields: dict[str, object], reason: str) -> None:
    for op in ("<", ">="):  # whatever the comparison would say
        result = result_of(**fields, op=op, value=0.0)
        assert (result.passed, result.observed, result.detail) == (False, None, reason)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("op", ["<", ">", "=="])
def test_a_value_that_is_not_finite_fails_its_gate(value: float, op: str) -> None:
    gates = parse_gates([{"metric": "train/loss", "stat": "min", "op": op, "value": 1.0}])
    rows: list[Row] = [{"step": 1, "train/loss": 0.5}, {"step": 2, "train/loss": value}]
    (result,) = evaluate(gates, rows)
    assert not result.passed
    assert result.detail == f"train/loss is {value} at step 2"


def test_a_gap_in_the_rows_fails_a_window() -> None:
    gates = parse_gates([{"metric": "train/reward", "steps": [1, 10], "op": ">", "value": 0.0}])
    holes = [row for row in ROWS if row["step"] not in (3, 5, 6)]
    assert evaluate(gates, holes)[0].detail == "no row of step 3, 5-6"


def test_no_rows_pass_no_gate() -> None:
    gates = parse_gates(
        [{"metric": "train/reward", "op": op, "value": 0.0} for op in ("<", "<=", ">", ">=", "==")]
    )
    results = evaluate(gates, [])
    assert len(results) == 5
    assert not any(result.passed for result in results)


def test_gates_come_as_a_mapping_or_a_list_and_null_switches_one_off() -> None:
    gate = {"metric": "train/reward", "op": ">", "value": 1, "reason": "sanity"}
    (named,) = parse_gates({"start": gate, "off": None})
    assert (named.name, named.of.stat, named.value, named.reason) == ("start", "mean", 1.0, "sanity")
    assert [g.name for g in parse_gates([gate, {**gate, "name": "end"}])] == ["0", "end"]
    assert parse_gates(None) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"op": ">"}, "gates.g: missing metric, value"),
        (
            {"metric": "m", "op": ">", "value": 1, "step": [1, 2]},
            "gates.g: unknown key step; allowed: metric",
        ),
        ({"metric": "m", "op": "=>", "value": 1}, "gates.g: op must be one of < <= > >= ==, got '=>'"),
        ({"metric": "m", "stat": "avg", "op": ">", "value": 1}, "stat must be one of mean, median, .*'avg'"),
        ({"metric": "m", "op": ">", "value": "1"}, "gates.g: value must be a number, got '1'"),
        ({"metric": "m", "op": ">", "value": math.nan}, "gates.g: value must be finite, got nan"),
        ({"metric": "m", "op": ">", "value": 1, "steps": [5, 1]}, r"first <= last, got \[5, 1\]"),
        ({"metric": "m", "op": ">", "value": 1, "steps": 5}, "steps must be .* got 5"),
        ({"metric": "m", "op": ">", "value": 1, "steps": [1, 2.5]}, "steps must be"),
        ({"metric": "m", "op": ">", "value": 1, "minus": 0.5}, "gates.g: must be a mapping, got 0.5"),
        ({"metric": 3, "op": ">", "value": 1}, "gates.g: metric must be text, got 3"),
        ("m > 1", "gates.g: must be a mapping, got 'm > 1'"),
    ],
)
def test_malformed_gates_are_refused_with_the_value_and_the_choices(fields: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_gates({"g": fields})


def test_table_and_text_show_verdict_observation_and_bound() -> None:
    results = evaluate(
        parse_gates(
            {
                "reward": {"metric": "train/reward", "steps": [6, 10], "op": ">=", "value": 0.78},
                "speed": {"metric": "train/speed", "op": "<", "value": 1},
            }
        ),
        ROWS,
    )
    text = format_gates(results).splitlines()
    assert text[0] == "Gates: 1 of 2 passed"
    assert text[2].split() == ["pass", "reward", "0.8", ">=", "0.78", "mean", "train/reward", "[6-10]"]
    assert text[3].startswith("FAIL  speed") and text[3].endswith("no train/speed in any row")
    table = gate_table(results)
    assert (table.title, table.row_count) == ("Gates: 1 of 2 passed", 2)
    saved = json.loads(json.dumps(results_as_json(results)))
    assert [(g["name"], g["passed"]) for g in saved] == [("reward", True), ("speed", False)]
    assert not all_passed(results)


def make_run(base: Path, *, bound: float, finish: bool = True, gates: object = None) -> Path:
    gate = {"metric": "train/reward", "stat": "mean", "steps": [1, 2], "op": ">=", "value": bound}
    config = {"run": {"name": "sort"}, "gates": {"reward": gate} if gates is None else gates}
    with open_run(base, name="sort", config=config, resume="never") as run:
        telemetry = build_telemetry(run.directory, max_num_steps=2, num_trainer_ranks=1, tensorboard=False)
        for step in range(2):
            log = telemetry.step(step)
            log.add({"train/reward": 0.5})
            log.flush()
        telemetry.close()
        if finish:
            run.finish()
    return run.directory.path


def check(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script_here("check_gates", *arguments)


def test_script_exits_by_the_verdict(tmp_path: Path) -> None:
    good, bad = make_run(tmp_path, bound=0.5), make_run(tmp_path, bound=0.6)
    passed, failed = run_script("check_gates", str(good)), check(str(bad))
    assert (passed.returncode, passed.stderr) == (0, "")
    assert "Gates: 1 of 1 passed" in passed.stdout
    assert failed.returncode == 1
    assert "FAIL  reward" in failed.stdout


def test_script_refuses_bad_input(tmp_path: Path) -> None:
    absent = check(str(tmp_path / "absent"))
    assert (absent.returncode, absent.stdout) == (2, "")
    assert absent.stderr.startswith("error: run directory") and "does not exist" in absent.stderr


def test_an_unfinished_run_does_not_pass(tmp_path: Path) -> None:
    verdict = check_run(make_run(tmp_path, bound=0.5, finish=False))
    assert all_passed(verdict.results)
    assert not verdict.passed
    assert verdict.unfinished == "run.json says the run is running"


def test_another_file_of_gates_can_be_checked(tmp_path: Path) -> None:
    run = make_run(tmp_path, bound=0.5)
    stricter = tmp_path / "stricter.yaml"
    stricter.write_text(yaml.safe_dump({"gates": [{"metric": "train/reward", "op": ">", "value": 0.9}]}))
    assert check_run(run).passed
    assert not check_run(run, gates_file=stricter).passed


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.yaml", "gates: [", "cannot be read"),
        ("config.yaml", "- 1", "must hold a mapping, got list"),
        ("config.yaml", "gates: {}", "declares no gates"),
        ("config.yaml", None, "cannot be read"),
        ("metrics.jsonl", None, "cannot be read"),
        ("metrics.jsonl", "x\n{}\n", "line 1 is no metrics row"),
        ("run.json", None, "has no run.json"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    run = make_run(tmp_path, bound=0.5)
    (run / file).unlink() if content is None else (run / file).write_text(content)
    with pytest.raises(ConfigError, match=message):
        check_run(run)
