"""The comparison of two runs: every differing metric and file is named, and what was compared is counted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_comparison import compare_runs
from tests.unit.script_runs import run_script, run_script_here


def run_at(folder: Path, *, loss: float = 0.5, took_s: float = 1.0, weights: bytes = b"abc") -> Path:
    """A run of two rows and one checkpoint."""
    rows = [{"step": step, "train/loss": loss / step, "timing/train/update": took_s} for step in (1, 2)]
    checkpoint = folder / "checkpoints" / "step_2" / "models"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights.bin").write_bytes(weights)
    (checkpoint.parent / "info.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_runs_that_differ_in_times_only_are_equal(tmp_path: Path) -> None:
    comparison = compare_runs(run_at(tmp_path / "a"), run_at(tmp_path / "b", took_s=2.0))
    assert comparison.findings == ()
    assert (comparison.num_rows, comparison.num_values) == (2, 4)  # the step itself is one of them
    assert (comparison.checkpoints, comparison.num_files) == (("step_2",), 2)


def test_every_difference_is_named(tmp_path: Path) -> None:
    first, second = run_at(tmp_path / "a"), run_at(tmp_path / "b", loss=0.25, weights=b"xyz")
    (second / "checkpoints" / "step_2" / "info.json").unlink()
    assert compare_runs(first, second).findings == (
        "step 1: train/loss is 0.5 and 0.25",
        "step 2: train/loss is 0.25 and 0.125",
        "step_2: info.json is missing in the second run",
        "step_2: models/weights.bin has another content",
    )


def test_a_checkpoint_of_one_run_alone_is_not_compared(tmp_path: Path) -> None:
    first, second = run_at(tmp_path / "a"), run_at(tmp_path / "b")
    (second / "checkpoints" / "step_2").rename(second / "checkpoints" / "step_4")
    comparison = compare_runs(first, second)
    assert (comparison.findings, comparison.checkpoints, comparison.num_files) == ((), (), 0)


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read"):
        compare_runs(run_at(tmp_path / "a"), tmp_path)


def test_the_command_says_what_was_compared_and_by_its_exit_code_how_it_went(tmp_path: Path) -> None:
    same, other = run_at(tmp_path / "a"), run_at(tmp_path / "b", loss=0.25)
    outcomes = []
    for run, second in ((run_script, same), (run_script_here, other), (run_script_here, tmp_path / "none")):
        done = run("compare_runs", str(same), str(second))
        outcomes.append((done.returncode, done.stdout.splitlines()[-1:], done.stderr.count("error: ")))
    assert outcomes == [
        (0, ["the runs are equal: 4 metrics in 2 rows, 2 files of checkpoints step_2"], 0),
        (1, ["the runs differ: 4 metrics in 2 rows, 2 files of checkpoints step_2"], 0),
        (2, [], 1),
    ]
