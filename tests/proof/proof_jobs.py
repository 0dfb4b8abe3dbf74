"""Runs one case as a user would, with torchrun in its own processes, and keeps what it showed as a JSON file.

Invariant: a state file describes a run that came to its end by itself, with whatever verdict; a case that was
interrupted has none and runs again.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil
from proof_cases import Case

from megatron_ppo.protocol.faults import FaultKind, faults_metric
from megatron_ppo.telemetry.gate_check import check_run
from megatron_ppo.telemetry.gates import results_as_json
from megatron_ppo.telemetry.run_dir import write_json_atomically
from megatron_ppo.telemetry.sinks import read_rows

ROOT = Path(__file__).resolve().parents[2]
JOB_TIMEOUT_S = 2400.0
"""Ten times what a run takes on an idle machine with two cores."""
LOOK_EVERY_S = 5.0

KEPT_METRICS = (
    "age/max_versions",
    "age/mean_versions",
    "age/mixed_versions_rate",
    "probe/max_abs_logprob_change_nats",
    "probe/max_abs_logprob_diff_nats",
    "train/avg_trajectory_age",
    "train/clip_fraction",
    "train/critic/explained_var_before_update",
    "train/critic/loss",
    "train/entropy",
    "train/gen_kl_error",
    "train/grad_norm",
    "train/loss",
    "train/mean_gen_tokens_per_sample",
    "train/reward",
    "train/token_mult_prob_error",
    "validation/accuracy",
    *(faults_metric(kind) for kind in FaultKind),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProofFolders:
    """Where the proof keeps its state: one JSON file a case in `root`, run directories in `root/runs`."""

    root: Path

    def state_path(self, case_id: str) -> Path:
        return self.root / f"{case_id}.json"

    def base_of(self, case_id: str) -> Path:
        return self.root / "runs" / case_id

    def read(self, case_id: str) -> dict[str, Any] | None:
        """The result of a case, None when it has not run."""
        path = self.state_path(case_id)
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def run_case(case: Case, folders: ProofFolders) -> dict[str, Any]:
    """Run the case to its end and write its state. Raises: TimeoutError, after the job was killed."""
    base = folders.base_of(case.id)
    base.mkdir(parents=True, exist_ok=True)
    started, load = time.time(), os.getloadavg()[0]
    with (base.parent / f"{case.id}.out").open("wb") as output:
        process = subprocess.Popen(
            command(case, base),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        peak_bytes = _wait(process, case.id)
    wall_s = time.time() - started
    result = {
        "case": case.id,
        "words": list(case.words),
        "bug": case.bug,
        "commit": commit(),
        "machine": machine(),
        "load_at_start": round(load, 1),
        "started_utc": datetime.fromtimestamp(started, tz=UTC).isoformat(timespec="seconds"),
        "wall_s": round(wall_s, 1),
        "peak_pss_bytes": peak_bytes,
        "exit_code": process.returncode,
        "earlier_failures": _earlier_failures(folders.read(case.id)),
        **outcome_of(base, started),
    }
    write_json_atomically(folders.state_path(case.id), result)
    return result


def command(case: Case, base: Path) -> list[str]:
    """The torchrun command of the case; runs go into folders below `base`."""
    script = "scripts/train_async_ppo.py" if case.bug is None else "tests/proof/train_broken.py"
    bug = [] if case.bug is None else ["--bug", case.bug]
    return [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={case.ranks}",
        "--master-addr=127.0.0.1", f"--master-port={_free_port()}",
        script, *bug, "--config-dir", "tests/proof/conf", *case.words, f"run.dir={base}", "run.resume=never",
    ]  # fmt: skip


def machine() -> str:
    """CPU, cores and memory in words."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [
            line.split(":", 1)[1]
            for line in cpuinfo.read_text().splitlines()
            if line.startswith("model name")
        ]
        model = names[0].strip() if names else model
    memory_gb = psutil.virtual_memory().total / 2**30
    return f"{model}, {os.cpu_count()} cores, {memory_gb:.0f} GB, Python {platform.python_version()}"


def commit() -> str:
    """Short hash of the code that runs, with a `+` when tracked files differ from it."""
    run = {"cwd": ROOT, "capture_output": True, "text": True, "check": True}
    head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], **run).stdout.strip()
    changed = subprocess.run(
        ["git", "status", "--porcelain", "-uno", "--", "megatron_ppo", "conf"], **run
    ).stdout
    return head + ("+" if changed.strip() else "")


def has_run(result: dict[str, Any] | None) -> bool:
    """False for a job that ended before its first step: that says nothing about training, and is tried again."""
    return result is not None and bool(result["curves"])


def _earlier_failures(previous: dict[str, Any] | None) -> list[str]:
    """Why the case had to be started again, so that this is not forgotten."""
    if previous is None:
        return []
    return [*previous["earlier_failures"], *([previous["unfinished"]] if previous["unfinished"] else [])]


def _wait(process: subprocess.Popen[bytes], case_id: str) -> int:
    """Wait for the job; returns the largest proportional set size of its tree, in bytes."""
    tree, peak = psutil.Process(process.pid), 0
    seen: dict[int, psutil.Process] = {}
    deadline = time.monotonic() + JOB_TIMEOUT_S
    try:
        while process.poll() is None:
            seen |= {child.pid: child for child in _children(tree)}
            peak = max(peak, _pss_bytes([tree, *seen.values()]))
            if time.monotonic() > deadline:
                raise TimeoutError(f"{case_id} ran longer than {JOB_TIMEOUT_S:.0f} s")
            try:
                process.wait(timeout=LOOK_EVERY_S)
            except subprocess.TimeoutExpired:
                continue
    except BaseException:
        _kill([tree, *seen.values(), *_children(tree)])
        process.wait(timeout=30)
        raise
    return peak


def _children(tree: psutil.Process) -> list[psutil.Process]:
    try:
        return tree.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _pss_bytes(processes: list[psutil.Process]) -> int:
    total = 0
    for process in processes:
        try:
            rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        except OSError:  # it has ended, or this is not Linux
            continue
        total += sum(int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:"))
    return total * 1024


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        try:
            process.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def outcome_of(base: Path, started_unix_s: float) -> dict[str, Any]:
    """Gates and curves of the run that this job made."""
    manifests = [
        path
        for path in base.glob("*/run.json")
        if json.loads(path.read_text())["created_unix_s"] >= started_unix_s
    ]
    if not manifests:
        return {"run_dir": None, "unfinished": "the job made no run directory", "gates": [], "curves": {}}
    directory = manifests[0].parent
    where = os.path.relpath(directory, ROOT)
    if not (directory / "metrics.jsonl").exists():
        reason = json.loads(manifests[0].read_text())["reason"]
        return {"run_dir": where, "unfinished": f"before the first step: {reason}", "gates": [], "curves": {}}
    check = check_run(directory)
    rows = read_rows(directory / "metrics.jsonl")
    curves = {
        name: [[int(row["step"]), row[name]] for row in rows if name in row]
        for name in KEPT_METRICS
        if any(name in row for row in rows)
    }
    return {
        "run_dir": where,
        "unfinished": check.unfinished,
        "gates": results_as_json(check.results),
        "curves": curves,
        "training_s": round(float(rows[-1]["time_unix_s"]) - float(rows[0]["time_unix_s"]), 1)
        if rows
        else None,
    }
