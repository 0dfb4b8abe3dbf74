"""One short job with every real part, and what a user finds afterwards."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml
from launcher import ROOT, SECRETS, Launched, final_history, foreign_lines

from megatron_ppo.telemetry.run_dir import config_digest, open_run

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]

STEPS, GROUPS, SAMPLES = 5, 8, 4


@pytest.fixture
def job(two_jobs: Launched) -> Launched:
    """The second of the two jobs: its folder is the newest."""
    return two_jobs


def test_the_job_finishes_passes_all_gates_but_the_impossible_one_and_leaves_no_process(
    job: Launched,
) -> None:
    assert "2 of 3 passed" in job.output
    gates = json.loads((job.run_dir / "gates.json").read_text())
    assert [gate["name"] for gate in gates if not gate["passed"]] == ["impossible"]
    # Ray's agents need a moment after their driver has gone.
    assert job.survivors(within_s=15) == []


def test_the_terminal_shows_progress_and_no_noise_of_libraries(job: Launched) -> None:
    _, heading, output = job.output.partition("job 2 of 2: cpu_smoke, run.seed=42\n")
    assert heading
    own, finished, _ = output.partition("finished; ")  # then torchrun says that its command has failed
    assert finished
    starting, beside, *rest = [line for line in own.splitlines() if line.strip()]
    # The run in the same folder whose configuration differs: no silent start at step 0.
    assert beside.startswith(
        f"warning: {job.run_dirs[0]} is unfinished and is not continued, because its configuration"
    )
    assert foreign_lines("\n".join([starting, *rest])) == []
    # And the validation before the first step.
    assert sum(line.startswith("step ") for line in rest) == STEPS + 1


def test_the_run_directory_holds_everything_that_is_promised(job: Launched) -> None:
    names = {path.name for path in job.run_dir.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "events",
        "logs",
        "checkpoints",
        "gates.json",
        "model_digests.json",
        "run.json",
    } <= names
    logs = {path.name for path in (job.run_dir / "logs").iterdir()}
    assert {
        "trainer_rank_0.log",
        "trainer_rank_1.log",
        "engine_0.log",
        "collector.log",
        "replay_buffer.log",
    } <= logs
    assert list((job.run_dir / "events").iterdir())
    manifest = json.loads((job.run_dir / "run.json").read_text())
    assert manifest["state"] == "finished"
    assert manifest["kernels"].keys() == {"policy", "critic"}
    assert {"layers", "attention", "optimizer"} <= manifest["kernels"]["policy"].keys()
    assert "the policy runs on layers: " in (job.run_dir / "logs" / "trainer_rank_0.log").read_text()
    assert [row["step"] for row in job.rows()] == list(range(STEPS + 1))


def test_no_secret_of_the_environment_is_in_any_file_of_the_run_or_on_the_terminal(job: Launched) -> None:
    files = [path for path in job.base.rglob("*") if path.is_file()]
    read = {path.relative_to(job.run_dir).parts[0] for path in files if job.run_dir in path.parents}
    assert {"logs", "events", "heartbeats", "checkpoints", "config.yaml", "run.json"} <= read
    assert any("ray" in path.parts for path in files), "Ray's own logs are part of it"
    holders = [
        f"{name} is in {path}"
        for path in files
        for name, secret in SECRETS.items()
        if secret.encode() in path.read_bytes()
    ]
    assert holders == []
    assert "canary-" not in job.output


def test_frozen_steps_train_the_critic_only_and_publish_nothing(job: Launched) -> None:
    rows = {row["step"]: row for row in job.rows()}
    assert "train/loss" not in rows[1]
    assert "refit/total_s" not in rows[1]
    for step in range(1, STEPS + 1):
        assert rows[step]["train/critic/loss"] >= 0
    for step in range(2, STEPS + 1):
        assert "train/loss" in rows[step]
        assert rows[step]["refit/bytes"] > 0


def test_every_token_carries_its_version_within_the_age_bound(job: Launched) -> None:
    for step, records in final_history(job.run_dir).items():
        version_at = max(0, step - 1 - 1)  # one frozen step; steps are written from 1
        for record in records:
            spans = record["versions"]
            assert spans[0][1] == 0
            assert spans[-1][2] == len(record["response"])
            for version, _, _ in spans:
                assert 0 <= version_at - version <= 1
    assert all(row.get("age/max_versions", 0) <= 1 for row in job.rows())


def test_every_prompt_is_trained_exactly_once(job: Launched) -> None:
    history = final_history(job.run_dir)
    ordinals = [record["ordinal"] for records in history.values() for record in records]
    expected = [ordinal for ordinal in range(STEPS * GROUPS) for _ in range(SAMPLES)]
    assert sorted(ordinals) == expected


def test_generation_for_a_step_runs_during_the_update_of_the_step_before(job: Launched) -> None:
    rows = {row["step"]: row for row in job.rows()}
    overlap_s = {}
    for step in range(2, STEPS):
        update = rows[step]["clock/update_start_s"], rows[step]["clock/update_end_s"]
        generation = rows[step + 1]["clock/generation_start_s"], rows[step + 1]["clock/generation_end_s"]
        # It never waits for the update that it runs beside, nor for anything after it.
        assert generation[0] < update[1], (step, update, generation)
        overlap_s[step] = min(update[1], generation[1]) - max(update[0], generation[0])
    # A short generation may be over before the update begins, so no single step has to show the two at once.
    assert max(overlap_s.values()) > 0, overlap_s


def test_rollouts_are_banked_in_warm_up_and_only_there(job: Launched) -> None:
    ages = {row["step"]: row["train/avg_trajectory_age"] for row in job.rows() if row["step"] > 0}
    # One frozen step and a lead of two: the groups of step 3 may be reserved in step 1. With an age of one and no lead
    # they are reserved in step 2 at the earliest.
    assert 1 < ages[3] <= 2, ages
    assert all(age <= 1 for step, age in ages.items() if step != 3), ages


def test_every_row_says_how_the_other_processes_are(job: Launched) -> None:
    rows = [row for row in job.rows() if row["step"] > 0]
    assert all(row["train/buffer_size"] >= 0 and row["collector/failures"] == 0 for row in rows)
    assert rows[-1]["collector/trajectories"] == STEPS * GROUPS * SAMPLES
    assert rows[-1]["train/buffer_size"] == 0  # nothing is generated beyond the last step


def test_engine_and_learner_agree_after_every_publish(job: Launched) -> None:
    differences = [v for row in job.rows() if (v := row.get("probe/max_abs_logprob_diff_nats")) is not None]
    assert len(differences) == STEPS - 1
    # fp32 on both sides: 1e-6 measured; the bound is that of the settled tolerances.
    assert max(differences) <= 1e-4
    assert max(differences) > 0


def test_every_update_changes_the_answers_of_the_engine(job: Launched) -> None:
    changes = [row.get("probe/max_abs_logprob_change_nats") for row in job.rows() if row["step"] > 1]
    # Beyond ten times what engine and learner may differ by, so these are the new weights and no rounding.
    assert len(changes) == STEPS - 1
    assert min(changes) > 1e-3, changes


def test_the_same_command_leaves_a_finished_run_alone_and_starts_a_new_one(job: Launched) -> None:
    finished = job.run_dir
    before = {path: path.stat().st_mtime_ns for path in finished.rglob("*")}
    config = yaml.safe_load((finished / "config.yaml").read_text())
    assert config_digest(config) == json.loads((finished / "run.json").read_text())["config_digest"]
    with open_run(job.base, name=config["run"]["name"], config=config, resume="auto") as again:
        new = again.directory.path
        assert (new.parent, again.resumed, again.finished) == (job.base, False, False)
    shutil.rmtree(new)
    assert new != finished
    assert {path: path.stat().st_mtime_ns for path in finished.rglob("*")} == before


def test_the_gates_of_a_finished_run_can_be_checked_again(job: Launched) -> None:
    again = subprocess.run(
        [sys.executable, "scripts/check_gates.py", str(job.run_dir)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin"},
    )  # fmt: skip
    assert again.returncode == 1, again.stdout + again.stderr
    assert "2 of 3 passed" in again.stdout
