"""The checks of a killed run notice each thing that they are there for, on made-up run folders."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest
from kill_chain import ChainResult, Death, is_alive
from kill_checks import (
    after_a_death,
    at_the_end,
    left_over,
    newest_step,
    schedule_of,
    script_problems,
    trained_ordinals,
)
from kill_plan import PROMPTS, SAMPLES, ChainSettings, all_kills
from kill_proof import KillFolders, attributed, is_pending, kill_section, ledger_cost

from megatron_ppo.loop.checkpoint_folder import FORMAT_VERSION, CheckpointFolder, Retention
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.telemetry.run_dir import open_run
from megatron_ppo.testing.fakes import make_group

STEPS = 5
SETTINGS = ChainSettings(
    name="chain_0", seed=0, age=1, async_save=False, load_replay_buffer=True, steps=STEPS
)


def finished_run(base: Path) -> Path:
    """Folder of a run that trained every prompt once, one attempt, with its last checkpoint."""
    with open_run(base, name="demo", config={"run": {"name": "demo"}}, resume="never") as run:
        folder = run.directory.path
        schedule = schedule_of(SETTINGS)
        ledger = LedgerFile(run.directory.ledger_path)
        buffer = PromptGroupBuffer(
            schedule=schedule,
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=SAMPLES,
            journal=ledger,
        )
        ledger.begin(buffer.ledger, step=0, reasons={})
        lines, rows = [], []
        for step in range(STEPS):
            version = schedule.version_at(step)
            buffer.open(step, schedule.frontier(step))
            for slot in buffer.reserve(PROMPTS):
                group = make_group(
                    ordinal=slot.ordinal,
                    target_step=step,
                    opened_at_step=slot.opened_at_step,
                    versions=[version],
                    num_generations=SAMPLES,
                )
                buffer.commit(group)
                record = {"step": step + 1, "ordinal": slot.ordinal, "versions": [[version, 0, 3]]}
                lines += [json.dumps(record)] * SAMPLES
            assert buffer.take(step)
            rows.append(json.dumps({"step": step + 1, "age/max_versions": 0}))
        ledger.close()
        (folder / "trajectories.jsonl").write_text("\n".join(lines) + "\n")
        (folder / "metrics.jsonl").write_text("\n".join(rows) + "\n")
        for step in (STEPS - 1, STEPS):
            save(folder, step)
        run.finish()
    return folder


def save(folder: Path, step: int) -> None:
    files = CheckpointFolder(folder / "checkpoints")
    files.begin(step)
    info = {
        "format_version": FORMAT_VERSION, "step": step, "weight_version": schedule_of(SETTINGS).version_at(step),
        "identity": {}, "metric": None, "metric_value": None, "prompts": {},
    }  # fmt: skip
    (files.temporary(step) / "training_info.json").write_text(json.dumps(info))
    (files.temporary(step) / "weights").write_bytes(b"12345678")
    files.seal(step)
    files.publish(step, Retention(keep=2, keep_best=0, metric=None, higher_is_better=True))


def edit_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("\n".join(change(path.read_text().splitlines())) + "\n")


def test_a_run_in_which_everything_is_right_passes(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    assert at_the_end(run, SETTINGS) == []
    assert script_problems(run) == []
    assert after_a_death(run) == []
    assert newest_step(run) == STEPS
    assert trained_ordinals(run) == dict.fromkeys(range(STEPS * PROMPTS), SAMPLES)


def lose_a_trajectory(run: Path) -> None:
    edit_lines(run / "trajectories.jsonl", lambda lines: lines[:-1])


def train_one_twice(run: Path) -> None:
    edit_lines(run / "trajectories.jsonl", lambda lines: [*lines, *lines[-SAMPLES:]])


def lose_a_prompt(run: Path) -> None:
    edit_lines(
        run / "trajectories.jsonl", lambda lines: [line for line in lines if '"ordinal": 7,' not in line]
    )


def train_an_old_token(run: Path) -> None:
    edit_lines(
        run / "trajectories.jsonl",
        lambda lines: [*lines[:-1], lines[-1].replace("[[2, 0, 3]]", "[[0, 0, 1], [2, 1, 3]]")],
    )


def train_in_the_ledger_only_what_is_old(run: Path) -> None:
    edit_lines(run / "ledger.jsonl", lambda lines: [line.replace("[2,2]", "[0,2]") for line in lines])


def forget_a_move(run: Path) -> None:
    edit_lines(run / "ledger.jsonl", lambda lines: lines[:-1])


def repeat_a_row(run: Path) -> None:
    edit_lines(run / "metrics.jsonl", lambda lines: [*lines, lines[-1]])


def exceed_the_age_in_a_row(run: Path) -> None:
    edit_lines(
        run / "metrics.jsonl",
        lambda lines: [line.replace('"age/max_versions": 0', '"age/max_versions": 2') for line in lines],
    )


def cut_a_checkpoint(run: Path) -> None:
    (run / "checkpoints" / f"step_{STEPS}" / "weights").write_bytes(b"1234")


def point_latest_nowhere(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text("step_99")


def point_latest_back(run: Path) -> None:
    (run / "checkpoints" / "latest").write_text(f"step_{STEPS - 1}")


def leave_half_a_save(run: Path) -> None:
    (run / "checkpoints" / "tmp_step_9").mkdir()


def tear_the_progress(run: Path) -> None:
    (run / "status.json").write_text('{"step": ')


def count_versions_wrong(run: Path) -> None:
    path = run / "checkpoints" / f"step_{STEPS}" / "training_info.json"
    text = path.read_text().replace('"weight_version": 3', '"weight_version": 4')
    path.write_text(text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_a_trajectory, "another number of trajectories [19]"),
        (train_one_twice, "another number of trajectories [19]"),
        (lose_a_prompt, "trajectories.jsonl: missing ordinals [7]"),
        (train_an_old_token, "step 5: ordinal 19 was trained at age 2"),
        (train_in_the_ledger_only_what_is_old, "was trained at age 2 in attempt 1"),
        (forget_a_move, "the ledger's final history: missing ordinals [19]"),
        (forget_a_move, "ledger, still open: ordinal 19: "),
        (repeat_a_row, "rows of metrics.jsonl are of steps"),
        (exceed_the_age_in_a_row, "row 1: age 2 exceeds 1"),
        (cut_a_checkpoint, "step_5 is visible but not complete: weights has 4 bytes, it had 8"),
        (point_latest_nowhere, "latest points to 'step_99'"),
        (point_latest_back, "latest is step_4, must be step_5"),
        (leave_half_a_save, "left over in checkpoints/: tmp_step_9"),
        (tear_the_progress, "status: "),
        (count_versions_wrong, "the last checkpoint has version 4, must have 3"),
    ],
)
def test_what_must_not_be_is_noticed(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    run = finished_run(tmp_path)
    damage(run)
    problems = at_the_end(run, SETTINGS)
    assert any(message in problem for problem in problems), problems


def test_half_a_save_and_a_late_latest_are_what_a_kill_may_leave(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    leave_half_a_save(run)
    point_latest_back(run)
    assert after_a_death(run) == []
    assert left_over(run) == ["tmp_step_9"]


def test_a_run_that_still_holds_its_lock_has_not_ended(tmp_path: Path) -> None:
    with open_run(tmp_path, name="demo", config={"run": {"name": "demo"}}, resume="never") as run:
        assert any("lock" in problem for problem in after_a_death(run.directory.path))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call is that of x86-64")
def test_a_process_that_is_dying_still_counts_while_one_of_its_threads_runs() -> None:
    """The kernel lists it as a zombie, but its files are open and its locks are held until the last thread is gone."""
    leader_exits = (
        "import ctypes, threading, time\n"
        "threading.Thread(target=lambda: time.sleep(60)).start()\n"
        "print('started', flush=True)\n"
        "ctypes.CDLL(None).syscall(ctypes.c_long(60), 0)"  # exit of this thread alone, on x86-64
    )
    child = subprocess.Popen([sys.executable, "-c", leader_exits], stdout=subprocess.PIPE, text=True)
    process = psutil.Process(child.pid)
    try:
        assert child.stdout is not None and child.stdout.readline() == "started\n"
        deadline = time.monotonic() + 30
        while process.status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert is_alive(process)
    finally:
        child.kill()
        child.wait()
    assert not is_alive(process)


def a_death(kill: str, *, outcome: str = "ended") -> Death:
    return Death(
        kill=kill, victim="the collector", when="during refit", row=4, stage="weight_sync", num_ranks=1,
        outcome=outcome, cause="FAILED: PartDiedError: a | b", exit_code=1, ended_after_s=4.2, resumed_from=3,
    )  # fmt: skip


def test_a_problem_is_put_down_to_its_kill_and_one_at_the_end_to_all() -> None:
    one, two = a_death("one"), a_death("two")
    fine = ChainResult(settings=SETTINGS, deaths=[one, two])
    assert attributed(fine) == {"one": (one, []), "two": (two, [])}
    during = ChainResult(settings=SETTINGS, deaths=[one, two], failed={"two": "x"})
    assert attributed(during) == {"one": (one, []), "two": (two, ["x"])}
    never_reached = ChainResult(settings=SETTINGS, deaths=[one], failed={"three": "x"})
    assert attributed(never_reached) == {"one": (one, []), "three": (None, ["x"])}
    at_end = ChainResult(settings=SETTINGS, deaths=[one, two], problems=["y"])
    assert attributed(at_end) == {"one": (one, ["y"]), "two": (two, ["y"])}


def test_a_failed_kill_is_tried_again_on_other_code_only() -> None:
    assert is_pending(None, code="a")
    assert not is_pending({"problems": [], "commit": "a"}, code="b")
    assert not is_pending({"problems": ["x"], "commit": "a"}, code="a")
    assert is_pending({"problems": ["x"], "commit": "a"}, code="b")


def test_the_table_shows_failures_and_both_endings(tmp_path: Path) -> None:
    first, second, third = (kill.id for kill in all_kills()[:3])
    facts = {
        "chain": asdict(replace(SETTINGS, name="chain_1")), "commit": "0123456789", "machine": "a machine",
        "load_at_start": 1.2, "started_utc": "2026-01-02T03:04:05+00:00", "chain_wall_s": 100.0, "lives": 3,
        "earlier_failures": [], "problems": [],
    }  # fmt: skip
    folders = KillFolders(root=tmp_path)
    for kill_id, death, problems in (
        (first, asdict(a_death(first)), []),
        (second, asdict(a_death(second, outcome="survived")), []),
        (third, None, ["ended by itself"]),
    ):
        folders.path(kill_id).write_text(json.dumps({**facts, "death": death, "problems": problems}))
    text = kill_section(folders.results(all_kills()), None)
    assert text is not None
    assert (
        "**2 of 3 kills pass every check** (of 63 planned; after 1 the run went on by itself, after 1 it"
        in text
    )
    assert "ended after 4 s: FAILED: PartDiedError: a \\| b" in text
    assert f"- `{third}` failed: ended by itself" in text
    assert "in 1 runs of 5 steps, 100 s in all. The run without kills has not run yet." in text
    assert kill_section({}, None) is None


def test_the_cost_of_the_ledger_is_of_its_file(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    size = (run / "ledger.jsonl").stat().st_size
    cost = ledger_cost(ChainResult(settings=SETTINGS, run_dir=run))
    assert cost == {"bytes": size, "bytes_per_prompt": round(size / (STEPS * PROMPTS), 1)}
