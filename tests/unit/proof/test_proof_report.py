"""Verdicts on runs, and the document that is made of them."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from proof_cases import BROKEN, VARIANTS, Case, all_cases, seed_case, select
from proof_jobs import ProofFolders, has_run
from proof_report import HEAD, Proof, sections, verdict_of, with_section, write_report

from megatron_ppo.telemetry.run_dir import write_json_atomically

GOOD = Case(id="good", section="variants", words=("+experiment=x",), shows="nothing")
BAD = dataclasses.replace(GOOD, id="bad", section="broken", bug="sign", rejected_by=("reward", "speed"))


def gate(name: str, *, passed: bool, observed: float | None = 0.5) -> dict[str, Any]:
    return {"name": name, "passed": passed, "observed": observed, "op": ">=", "value": 0.7}


def result(*gates: dict[str, Any], unfinished: str | None = None, **fields: Any) -> dict[str, Any]:
    return {
        "case": "case", "commit": "0123abc", "machine": "a machine", "load_at_start": 0.2, "wall_s": 61.4,
        "started_utc": "2030-01-02T03:04:05+00:00", "peak_pss_bytes": 2_500_000_000, "earlier_failures": [],
        "unfinished": unfinished, "gates": list(gates), "curves": {"train/reward": [[1, 0.2], [5, 0.4], [40, 0.9]]},
        **fields,
    }  # fmt: skip


def test_good_run_must_pass_every_gate() -> None:
    assert verdict_of(GOOD, result(gate("reward", passed=True), gate("speed", passed=True))).proven
    failed = verdict_of(GOOD, result(gate("reward", passed=True), gate("speed", passed=False)))
    assert not failed.proven and failed.text == "1/2 gates, failed: speed"


def test_broken_run_must_fail_a_gate_that_is_named_for_it() -> None:
    assert verdict_of(BAD, result(gate("reward", passed=True), gate("speed", passed=False))).proven
    assert not verdict_of(BAD, result(gate("reward", passed=True), gate("other", passed=False))).proven
    assert verdict_of(BAD, result(gate("reward", passed=True))).text == "NOT rejected"


def test_gate_without_data_rejects_nothing() -> None:
    assert not verdict_of(BAD, result(gate("reward", passed=False, observed=None))).proven


@pytest.mark.parametrize("case", [GOOD, BAD])
def test_run_that_did_not_finish_proves_nothing(case: Case) -> None:
    cut_off = result(gate("reward", passed=False), unfinished="run.json says the run is failed")
    assert not verdict_of(case, cut_off).proven
    assert not verdict_of(case, result()).proven


def test_job_that_ended_before_its_first_step_runs_again() -> None:
    assert has_run(result(gate("reward", passed=False)))
    assert not has_run(result(curves={})) and not has_run(None)


def proof_of_seeds(failing: int) -> Proof:
    seeds = tuple(seed_case(seed) for seed in range(10))
    results = {case.id: result(gate("reward", passed=index >= failing)) for index, case in enumerate(seeds)}
    return Proof(cases=seeds, results=results, mutations=None)


def test_one_seed_of_ten_may_fail_and_two_may_not() -> None:
    for failing, lines in ((0, 0), (1, 0), (2, 2)):
        proof = proof_of_seeds(failing)
        assert len(proof.failures(proof.cases, mutations=False)) == lines


def test_failed_seeds_stay_in_the_document_with_their_gate() -> None:
    text = sections(proof_of_seeds(1))["seeds"]
    assert "**9 of 10 seeds pass every gate**" in text
    assert "- `seed_0` failed reward: 0.5, required >= 0.7" in text
    assert "| 0 | 0.300 | none | 0.900 |" in text


def test_cases_that_have_not_run_and_mistakes_that_no_test_notices_are_failures() -> None:
    mutations = {"mutations": [{"name": "no cap", "noticed": False}]}
    proof = Proof(cases=(GOOD,), results={"good": None}, mutations=mutations)
    assert proof.failures((GOOD,), mutations=True) == ["good: has not run", "mutation not noticed: no cap"]


def test_report_replaces_its_sections_and_leaves_other_text(tmp_path: Path) -> None:
    folders = ProofFolders(root=tmp_path)
    document = tmp_path / "runs.md"
    document.write_text(HEAD + "\n## By hand\n\nkept\n")
    cases = all_cases()
    write_json_atomically(folders.state_path("seed_3"), result(gate("reward", passed=True)))
    write_report(document, folders, cases)
    first = document.read_text()
    assert "kept" in first and "**1 of 1 seeds" in first and "Variants" not in first
    write_report(document, folders, cases)
    assert document.read_text() == first
    write_json_atomically(folders.state_path("seed_4"), result(gate("reward", passed=False)))
    write_report(document, folders, cases)
    text = document.read_text()
    assert "kept" in text and "**1 of 2 seeds" in text and text.count("## Seeds") == 1


def test_the_cost_of_faults_is_said_when_both_runs_are_there(tmp_path: Path) -> None:
    folders, document = ProofFolders(root=tmp_path), tmp_path / "runs.md"
    faults = {"chaos/kill_engine_faults": [[1, 0.0], [2, 3.0]]}
    struck = result(gate("kill_engine_happened", passed=True)) | {
        "curves": faults,
        "wall_s": 300.0,
        "training_s": 180.0,
    }
    write_json_atomically(folders.state_path("chaos_on"), struck)
    write_report(document, folders, all_cases())
    assert "| every kind of fault | 3 | none |" in document.read_text()
    assert "With faults the run took" not in document.read_text()
    write_json_atomically(
        folders.state_path("chaos_off"),
        result(gate("reward", passed=True)) | {"wall_s": 200.0, "training_s": 90.0},
    )
    write_report(document, folders, all_cases())
    text = document.read_text()
    assert "With faults the run took 300 s, without 200 s; from the first" in text
    assert "180 s and 90 s." in text


def test_section_text_may_hold_backslashes() -> None:
    once = with_section("# Runs\n", "seeds", r"a \1 b")
    assert with_section(once, "seeds", r"a \1 b") == once and r"a \1 b" in once


def test_cases_are_selected_by_section_or_pattern_and_a_typo_is_refused() -> None:
    assert select(all_cases(), ["variants"]) == VARIANTS
    assert [case.id for case in select(all_cases(), ["seed_[01]"])] == ["seed_0", "seed_1"]
    assert select(all_cases(), []) == all_cases()
    with pytest.raises(ValueError, match="--only sedes matches no case"):
        select(all_cases(), ["sedes"])


def test_case_ids_are_file_names_and_unique() -> None:
    ids = [case.id for case in all_cases()]
    assert len(set(ids)) == len(ids) and all(name.isidentifier() for name in ids)


def test_every_broken_case_names_what_must_reject_it_and_every_control_names_nothing() -> None:
    assert all(bool(case.rejected_by) == (case.bug is not None) for case in BROKEN)
