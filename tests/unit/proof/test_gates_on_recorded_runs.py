"""The gates as configured today, on the curves of real runs that `make proof` recorded: good ones pass, each broken
one is rejected. Loosening a gate until a broken trainer slips through fails here, without running one.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from proof_cases import BROKEN, Case, seed_case
from proof_report import verdict_of

from megatron_ppo.config.compose import load
from megatron_ppo.telemetry.gates import Gate, evaluate, parse_gates, results_as_json

ROOT = Path(__file__).resolve().parents[3]
RECORDED = Path(__file__).parent / "recorded"
CASES = (seed_case(0), *BROKEN)


@functools.cache
def gates_of(experiment: str) -> tuple[Gate, ...]:
    config = load([experiment], extra_dirs=[ROOT / "tests" / "proof" / "conf"])
    return parse_gates(config.resolved()["gates"])


def recorded_rows(case: Case) -> list[dict[str, Any]]:
    curves = json.loads((RECORDED / f"{case.id}.json").read_text(encoding="utf-8"))["curves"]
    rows: dict[int, dict[str, Any]] = {}
    for metric, points in curves.items():
        for step, value in points:
            rows.setdefault(step, {"step": step})[metric] = value
    return [rows[step] for step in sorted(rows)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_recorded_run_gets_the_verdict_that_it_must(case: Case) -> None:
    results = evaluate(gates_of(case.words[0]), recorded_rows(case))
    verdict = verdict_of(case, {"unfinished": None, "gates": results_as_json(results)})
    assert verdict.proven, verdict.text


@pytest.mark.parametrize("case", [case for case in CASES if case.rejected_by], ids=lambda case: case.id)
def test_gates_that_must_reject_are_declared_by_the_experiment(case: Case) -> None:
    assert set(case.rejected_by) <= {gate.name for gate in gates_of(case.words[0])}
