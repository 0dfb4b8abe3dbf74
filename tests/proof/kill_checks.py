"""What must hold of a run's folder after each death, and of a finished run however often it was killed.

Reads files only. Every function returns what is wrong, one line each; an empty list is the proof.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kill_plan import LEAD, PROMPTS, SAMPLES, WARM_UP, ChainSettings

from megatron_ppo.loop.checkpoint_folder import INFO_FILE, CheckpointFolder, read_complete, step_of
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.history import read_entries, read_history
from megatron_ppo.replay.ledger_report import explain, pending
from megatron_ppo.telemetry.run_status import Life, read_status

ROOT = Path(__file__).resolve().parents[2]


def schedule_of(settings: ChainSettings) -> AsyncSchedule:
    """The staleness rule of the chain's run."""
    return AsyncSchedule(
        max_num_steps=settings.steps,
        max_trajectory_age_steps=settings.age,
        policy_training_start_step=WARM_UP,
        warmup_generation_lead_steps=LEAD,
    )


def after_a_death(run_dir: Path) -> list[str]:
    """Of a run that was killed an instant ago: nothing is half-written."""
    problems = []
    try:
        status = read_status(run_dir, now_unix_s=time.time())
        if status.life is Life.RUNNING:
            problems.append(f"somebody still holds the lock of the run: process {status.owner}")
    except MegatronPPOError as error:
        problems.append(f"status: {error}")
    problems += _checkpoint_problems(run_dir / "checkpoints")
    problems += _ledger_problems(run_dir / "ledger.jsonl")
    return problems


def is_finished(run_dir: Path) -> bool:
    """Whether the run came to its last step."""
    return read_status(run_dir, now_unix_s=time.time()).life is Life.FINISHED


def left_over(run_dir: Path) -> list[str]:
    """Names of what an interrupted save has left; the next start or save removes it."""
    folder = run_dir / "checkpoints"
    return sorted(p.name for p in folder.iterdir() if p.name.startswith(("tmp_", "old_")))


def newest_step(run_dir: Path) -> int:
    """Completed steps of the newest checkpoint, 0 without any."""
    return max((step_of(path) for path in CheckpointFolder(run_dir / "checkpoints").saved()), default=0)


def at_the_end(run_dir: Path, settings: ChainSettings) -> list[str]:
    """Of a finished run: everything that is promised of what it was trained on."""
    problems = [*after_a_death(run_dir), *_row_problems(run_dir, settings)]
    problems += _trained_problems(run_dir, settings)
    problems += _ledger_answers(run_dir, settings)
    problems += _last_checkpoint_problems(run_dir / "checkpoints", settings)
    if left := left_over(run_dir):
        problems.append(f"left over in checkpoints/: {', '.join(left)}")
    return problems


def script_problems(run_dir: Path) -> list[str]:
    """What `scripts/ledger.py` does not answer as a person at the terminal should see it."""
    problems = []
    for words, answer in (
        (["explain", "0"], "trained, for good"),
        (["pending"], ""),
        (["summary"], "attempt 1 "),
    ):
        done = subprocess.run(
            [sys.executable, "scripts/ledger.py", str(run_dir), *words],
            cwd=ROOT, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        if done.returncode != 0 or answer not in done.stdout or (not answer and done.stdout):
            problems.append(
                f"scripts/ledger.py {words[0]}: exit {done.returncode}: {done.stdout}{done.stderr}"
            )
    return problems


def trained_ordinals(run_dir: Path) -> dict[int, int]:
    """Ordinal -> how many trajectories of it the final weights were trained on, from the recorded batches."""
    return dict(Counter(int(record["ordinal"]) for record in _records(run_dir)))


def _checkpoint_problems(folder: Path) -> Iterator[str]:
    saved = CheckpointFolder(folder).saved()
    for path in saved:
        try:
            read_complete(path)
        except (OSError, ValueError) as error:
            yield f"{path.name} is visible but not complete: {error}"
    latest = folder / "latest"
    if latest.exists():
        names = [path.name for path in saved]
        if latest.read_text() not in names:
            yield f"latest points to {latest.read_text()!r}, there are {names}"
    elif len(saved) > 1:
        yield "there are checkpoints, but no latest"


def _last_checkpoint_problems(folder: Path, settings: ChainSettings) -> Iterator[str]:
    latest, newest = (folder / "latest").read_text(), f"step_{settings.steps}"
    if latest != newest:
        yield f"latest is {latest}, must be {newest}"
    version = schedule_of(settings).version_at(settings.steps)
    info = json.loads((folder / newest / INFO_FILE).read_text())
    if info["weight_version"] != version:
        yield f"the last checkpoint has version {info['weight_version']}, must have {version}"


def _ledger_problems(path: Path) -> Iterator[str]:
    try:
        if path.exists():
            read_history(path)
    except MegatronPPOError as error:
        yield f"ledger: {error}"


def _row_problems(run_dir: Path, settings: ChainSettings) -> Iterator[str]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    steps = [row["step"] for row in rows if row["step"] > 0]
    if steps != list(range(1, settings.steps + 1)):
        yield f"rows of metrics.jsonl are of steps {steps}"
    for row in rows:
        if row.get("age/max_versions", 0) > settings.age:
            yield f"row {row['step']}: age {row['age/max_versions']} exceeds {settings.age}"


def _trained_problems(run_dir: Path, settings: ChainSettings) -> Iterator[str]:
    expected = dict.fromkeys(range(settings.steps * PROMPTS), SAMPLES)
    trained = trained_ordinals(run_dir)
    if trained != expected:
        yield _difference("trajectories.jsonl", trained, expected)
    history = read_history(run_dir / "ledger.jsonl")
    by_ledger = dict.fromkeys(history.ordinals(Stage.TRAINED), SAMPLES)
    if by_ledger != expected:
        yield _difference("the ledger's final history", by_ledger, expected)
    schedule = schedule_of(settings)
    for record in _records(run_dir):
        for version, _, _ in record["versions"]:
            age = schedule.age(generation_version=version, target_step=record["step"] - 1)
            if not 0 <= age <= settings.age:
                yield f"step {record['step']}: ordinal {record['ordinal']} was trained at age {age}"
    for entry in read_entries(run_dir / "ledger.jsonl"):
        move = entry.move
        if move is None or move.stage is not Stage.TRAINED or move.restored:
            continue
        assert move.min_version is not None and move.max_version is not None and move.target_step is not None
        for version in (move.min_version, move.max_version):
            age = schedule.age(generation_version=version, target_step=move.target_step)
            if not 0 <= age <= settings.age:
                yield f"ledger: ordinal {move.ordinal} was trained at age {age} in attempt {entry.attempt}"


def _ledger_answers(run_dir: Path, settings: ChainSettings) -> Iterator[str]:
    """The ledger can say of every ordinal that it was trained, and that nothing is open."""
    path = run_dir / "ledger.jsonl"
    for ordinal in range(settings.steps * PROMPTS):
        *_, last = explain(path, ordinal)
        if not last.startswith(f"ordinal {ordinal}: trained, for good"):
            yield f"ledger: {last}"
    yield from (f"ledger, still open: {line}" for line in pending(path))


def _difference(source: str, seen: dict[int, int], expected: dict[int, int]) -> str:
    return (
        f"{source}: missing ordinals {sorted(expected.keys() - seen.keys())}, unexpected "
        f"{sorted(seen.keys() - expected.keys())}, of another number of trajectories "
        f"{sorted(q for q in seen.keys() & expected.keys() if seen[q] != expected[q])}"
    )


def _records(run_dir: Path) -> Iterator[dict[str, object]]:
    for line in (run_dir / "trajectories.jsonl").read_text().splitlines():
        yield json.loads(line)
