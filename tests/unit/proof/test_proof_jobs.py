"""How a case becomes a command, and what is kept of the run that it made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from proof_cases import BROKEN, CHAOS, Case, seed_case
from proof_jobs import ROOT, command, has_run, outcome_of

from megatron_ppo.config.compose import parse_command_line

GATES = "gates:\n  up: {metric: train/reward, stat: last, op: '>=', value: 0.5}\n"


def made_run(
    base: Path, *, created_unix_s: float, state: str, reason: str, rows: list[dict[str, Any]]
) -> None:
    folder = base / f"run-{created_unix_s}"
    folder.mkdir(parents=True)
    manifest = {
        "run_id": folder.name, "name": "x", "config_digest": "d", "state": state, "reason": reason,
        "created_unix_s": created_unix_s, "updated_unix_s": created_unix_s,
    }  # fmt: skip
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "config.yaml").write_text(GATES)
    if rows:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def overrides(case: Case) -> list[str]:
    words = command(case, Path("outputs/x"))
    assert (ROOT / words[words.index("--config-dir") - (2 if case.bug else 0) - 1]).is_file()
    return words[words.index("--config-dir") :]


def test_every_case_composes_to_a_fresh_run_in_its_own_folder() -> None:
    for case in {case.words: case for case in (seed_case(3), *CHAOS, *BROKEN)}.values():
        (job,) = parse_command_line(overrides(case)).load()
        assert (job.run.resume, job.run.directory) == ("never", Path("outputs/x"))
        assert job.run.seed == (3 if case.section == "seeds" else 0)


def test_broken_case_names_its_bug_and_a_control_runs_the_users_command() -> None:
    for case in BROKEN:
        words = command(case, Path("outputs/x"))
        if case.bug is None:
            assert "scripts/train_async_ppo.py" in words
        else:
            assert words[words.index("tests/proof/train_broken.py") + 1 :][:2] == ["--bug", case.bug]


def test_finished_run_leaves_its_gates_and_curves(tmp_path: Path) -> None:
    rows = [{"step": step, "time_unix_s": 10.0 * step, "train/reward": 0.3 * step} for step in (1, 2)]
    made_run(tmp_path, created_unix_s=50.0, state="finished", reason="", rows=rows)
    outcome = outcome_of(tmp_path, started_unix_s=40.0)
    assert outcome["unfinished"] is None and outcome["training_s"] == 10.0
    assert outcome["curves"] == {"train/reward": [[1, 0.3], [2, 0.6]]}
    assert [(gate["name"], gate["passed"]) for gate in outcome["gates"]] == [("up", True)]


def test_runs_of_earlier_attempts_are_not_taken_for_this_one(tmp_path: Path) -> None:
    made_run(
        tmp_path, created_unix_s=30.0, state="finished", reason="", rows=[{"step": 1, "time_unix_s": 1.0}]
    )
    outcome = outcome_of(tmp_path, started_unix_s=40.0)
    assert outcome["unfinished"] == "the job made no run directory" and not has_run(outcome)


def test_job_that_failed_before_its_first_step_keeps_the_reason(tmp_path: Path) -> None:
    made_run(tmp_path, created_unix_s=50.0, state="failed", reason="TimeoutError: Ray", rows=[])
    outcome = outcome_of(tmp_path, started_unix_s=40.0)
    assert outcome["unfinished"] == "before the first step: TimeoutError: Ray" and not has_run(outcome)


def test_run_that_broke_off_is_kept_as_unfinished(tmp_path: Path) -> None:
    rows = [{"step": 1, "time_unix_s": 1.0, "train/reward": 0.9}]
    made_run(tmp_path, created_unix_s=50.0, state="failed", reason="NonFiniteError: step 2", rows=rows)
    outcome = outcome_of(tmp_path, started_unix_s=40.0)
    assert has_run(outcome) and "NonFiniteError: step 2" in outcome["unfinished"]
