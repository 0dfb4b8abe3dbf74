"""Runs the real job the way a user does, with torchrun, and returns what it wrote.

Invariant: when `run_job` returns or raises, no process that it started is left.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from benchmarks.report import OUTPUT, ROOT, BenchmarkError
from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.compose import load
from megatron_ppo.telemetry.metrics import Row
from megatron_ppo.telemetry.run_dir import RunDirectory
from megatron_ppo.telemetry.sinks import read_rows

SCRIPT = ROOT / "scripts" / "train_async_ppo.py"
_LOOK_S = 2.0
_GRACE_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedJob:
    """One run that ended by itself.

    Attributes:
        started_unix_s, ended_unix_s: of torchrun.   load: 1-minute load average before it.
        passed: whether every gate of the experiment passed.
    """

    directory: RunDirectory
    rows: Sequence[Row]
    started_unix_s: float
    ended_unix_s: float
    load: float
    passed: bool


def prepare_models(words: Sequence[str]) -> None:
    """Build the initial models of a configuration now, so that no run has to."""
    config = load(words)
    for source in (config.policy.model, config.critic.model):
        if source.path is not None or source.recipe is not None:
            model_folder(
                source,
                cache_dir=Path(config.cluster.model_cache_dir),
                timeout_s=config.cluster.prepare_timeout_s,
            )


def run_job(
    words: Sequence[str],
    *,
    label: str,
    timeout_s: float,
    nproc: int = 1,
    look: Callable[[Sequence[psutil.Process]], None] | None = None,
) -> FinishedJob:
    """Run to the end.

    Args:
        words: overrides of the configuration.   label: names the folder and the log under outputs/bench.
        look: called every two seconds with the processes of the job.
    Raises: BenchmarkError when it fails or takes longer than `timeout_s`; gates that fail are no error.
    """
    folder = OUTPUT / "runs" / label
    folder.mkdir(parents=True, exist_ok=True)
    log_path = OUTPUT / "runs" / f"{label}.log"
    command = [
        sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={nproc}",
        "--master-addr=127.0.0.1", f"--master-port={_free_port()}", str(SCRIPT),
        *words, f"run.dir={folder}", "run.resume=never", "telemetry.display=plain",
    ]  # fmt: skip
    load, started = os.getloadavg()[0], time.time()
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
    try:
        _wait(process, look, timeout_s=timeout_s, what=f"{label}; log: {log_path}")
    finally:
        _end(process)
    ended = time.time()
    runs = [path for path in folder.iterdir() if (path / "run.json").exists()]
    newest = max(runs, key=lambda path: path.name, default=None)
    state = json.loads((newest / "run.json").read_text())["state"] if newest else "not started"
    if newest is None or state != "finished":
        raise BenchmarkError(
            f"{label}: the run is {state}, torchrun exited with {process.returncode}; log: {log_path}"
        )
    directory = RunDirectory(path=newest)
    return FinishedJob(
        directory=directory,
        rows=read_rows(directory.metrics_path),
        started_unix_s=started,
        ended_unix_s=ended,
        load=load,
        passed=process.returncode == 0,
    )


def _wait(
    process: subprocess.Popen[bytes],
    look: Callable[[Sequence[psutil.Process]], None] | None,
    *,
    timeout_s: float,
    what: str,
) -> None:
    deadline = time.monotonic() + timeout_s
    while process.poll() is None:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"waited {timeout_s:.0f} s for the end of {what}")
        # Listing the processes of a machine takes time of its cores, so without `look` nobody does.
        if look is not None:
            look(_tree(process.pid))
        time.sleep(_LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End what still lives: torchrun passes SIGTERM on; what does not go by then is killed."""
    if process.poll() is not None:
        return
    tree = _tree(process.pid)
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for member in tree:
        if member.is_running():
            member.kill()


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
