"""Starts real jobs the way a user does, with torchrun, and watches their processes from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = ROOT / "scripts" / "train_async_ppo.py"
TORCHRUN = ("-m", "torch.distributed.run")
LAUNCHER = (str(ROOT / "scripts" / "launch.py"),)
"""torchrun that leaves signals to the ranks and exits as they do."""
MODEL_CACHE = ROOT / "outputs" / "test_models"
"""Shared by all tests and kept between test runs: the warm start is the same bytes every time."""
SECRETS = {name: f"canary-{name}-3f9c1d7e" for name in ("HF_TOKEN", "WANDB_API_KEY")}
"""As users give them: in the environment."""
EXPERIMENTS = Path(__file__).parent / "conf"
"""Group `experiment` of the tests, for --config-dir."""


# For two ranks: every kind of batch, and a policy and a critic that share out their work in different ways.
MIXED_LAYOUT = [
    "policy.parallelism.tensor_model_parallel_size=1", "policy.parallelism.context_parallel_size=2",
    "policy.sequence_packing.enabled=true", "policy.logprob_chunk_size=7",
    "critic.parallelism.tensor_model_parallel_size=2", "critic.parallelism.sequence_parallel=true",
    "critic.dynamic_batching.enabled=true", "critic.dynamic_batching.sequence_length_round=4",
]  # fmt: skip


_OURS = re.compile(
    r"job \d+ of \d+: |starting |preparing |step \d+/\d+ |Gates: | +gate +observed|pass |FAIL "
    r"|survived faults: |finished; "
)


def foreign_lines(output: str) -> list[str]:
    """What a job's terminal shows that the job did not say itself: noise of libraries."""
    return [line for line in output.splitlines() if line.strip() and not _OURS.match(line)]


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class Launched:
    """One torchrun with everything that it started.

    Attributes:
        base: run.dir; holds one folder per run.   seen: every process of the tree so far, with its start time.
    """

    def __init__(
        self,
        base: Path,
        words: Sequence[str],
        *,
        nproc: int = 1,
        env: Mapping[str, str] | None = None,
        max_restarts: int = 0,
        program: Sequence[str] = TORCHRUN,
    ) -> None:
        self.base = base
        base.parent.mkdir(parents=True, exist_ok=True)
        self.output_path = base.parent / f"{base.name}.{time.time_ns()}.out"
        command = [
            sys.executable, *program, f"--nproc-per-node={nproc}",
            f"--max-restarts={max_restarts}", "--master-addr=127.0.0.1", f"--master-port={free_port()}", str(SCRIPT),
            f"run.dir={base}", f"cluster.model_cache_dir={MODEL_CACHE}", *words,
        ]  # fmt: skip
        with self.output_path.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **(env or {})}, start_new_session=True,
            )  # fmt: skip
        self.tree = psutil.Process(self.process.pid)
        self.seen: dict[int, psutil.Process] = {self.tree.pid: self.tree}

    @property
    def output(self) -> str:
        return self.output_path.read_text(errors="replace")

    @property
    def run_dirs(self) -> list[Path]:
        """Run folders, oldest first: their names begin with the time."""
        return sorted(path for path in self.base.iterdir() if (path / "run.json").exists())

    @property
    def run_dir(self) -> Path:
        """The newest run folder."""
        return self.run_dirs[-1]

    def look(self) -> None:
        """Remember the processes that exist now, for `survivors`."""
        try:
            for process in self.tree.children(recursive=True):
                self.seen.setdefault(process.pid, process)
        except psutil.NoSuchProcess:
            pass

    def find(self, *needles: str) -> psutil.Process:
        """The one process of the tree whose command line contains all of `needles`."""
        self.look()
        found = []
        for process in self.seen.values():
            try:
                line = " ".join(process.cmdline())
            except psutil.Error:
                continue
            if all(needle in line for needle in needles):
                found.append(process)
        assert len(found) == 1, f"{len(found)} processes match {needles}; tree:\n{self.describe()}"
        return found[0]

    def trainer_rank(self, rank: int) -> psutil.Process:
        self.look()
        for process in self.tree.children():
            if process.environ().get("RANK") == str(rank):
                return process
        raise AssertionError(f"no trainer rank {rank}; tree:\n{self.describe()}")

    def rows(self) -> list[dict]:
        """See `metrics_of`; of the newest run."""
        return metrics_of(self.run_dir)

    def wait_for(self, condition: Callable[[], bool], what: str, *, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            self.look()
            if self.process.poll() is not None:
                raise AssertionError(
                    f"the job ended while waiting for {what}:\n{self.output}{self.log_tails()}"
                )
            assert time.monotonic() < deadline, (
                f"waited {timeout_s} s for {what}:\n{self.output}{self.log_tails()}"
            )
            time.sleep(0.1)

    def wait_for_step(self, step: int, *, timeout_s: float = 240) -> None:
        def reached() -> bool:
            started = self.base.is_dir() and any(self.base.glob("*/run.json"))
            return started and any(row["step"] >= step for row in self.rows())

        self.wait_for(reached, f"the row of step {step}", timeout_s=timeout_s)

    def wait(self, *, timeout_s: float = 280) -> int:
        """Exit code of torchrun."""
        deadline = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self.look()
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(
                    f"the job ran longer than {timeout_s} s:\n{self.output}{self.log_tails()}"
                )
            time.sleep(0.2)
        return self.process.returncode

    def survivors(self, *, within_s: float) -> list[str]:
        """Processes of the tree that still live after `within_s`."""
        deadline = time.monotonic() + within_s
        while True:
            alive = [p for p in self.seen.values() if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
            if not alive or time.monotonic() > deadline:
                return [_describe(process) for process in alive]
            time.sleep(0.2)

    def signal_everything(self, signum: int) -> None:
        """To every process of the tree, as a batch system does it that ends a job."""
        self.look()
        for process in self.seen.values():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signum)

    def kill(self) -> None:
        """SIGKILL for every process of the tree at once, as a power cut would do it."""
        self.signal_everything(signal.SIGKILL)
        self.process.wait(timeout=10)

    def describe(self) -> str:
        self.look()
        return "\n".join(_describe(process) for process in self.seen.values())

    def log_tails(self) -> str:
        if not self.base.is_dir():
            return ""
        tails = []
        for path in sorted(self.run_dir.glob("logs/*.log")):
            tails.append(
                f"\n--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-15:])
            )
        return "".join(tails)


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:150]}"
    except psutil.Error as error:
        return f"{process.pid} {error}"


def metrics_of(run_dir: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl so far; a line that is being written is left out."""
    path = run_dir / "metrics.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def final_history(run_dir: Path) -> dict[int, list[dict]]:
    """step -> recorded trajectories that the final weights were trained on, in the order of the batch."""
    steps: dict[int, list[dict]] = {}
    for line in (run_dir / "trajectories.jsonl").read_text().splitlines():
        record = json.loads(line)
        steps.setdefault(record["step"], []).append(record)
    return steps
