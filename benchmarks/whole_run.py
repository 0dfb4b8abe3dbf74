"""The default experiment as a user runs it: peak memory of the whole process tree, wall time, and where it goes.

    python -m benchmarks.whole_run [--experiment megatron_40step] [--nproc 1]

Exit code 1 when a limit is exceeded. Memory is PSS: shared pages are divided among the processes that map them, so
the sum over the tree counts nothing twice.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import psutil

from benchmarks.job import FinishedJob, prepare_models, run_job
from benchmarks.report import machine, save, show_machine, show_table

MAX_PSS_BYTES = 6e9
MAX_WALL_S = 360.0


@dataclass(slots=True)
class MemoryWatch:
    """Samples the PSS of a process tree.

    Attributes:
        peak_bytes: largest sum seen.   at_peak: bytes by kind of process then.   samples: taken so far.
    """

    peak_bytes: int = 0
    at_peak: dict[str, int] = field(default_factory=dict)
    samples: int = 0

    def __call__(self, processes: Sequence[psutil.Process]) -> None:
        """Take a sample."""
        by_kind: dict[str, int] = {}
        for process in processes:
            try:
                size, kind = process.memory_full_info().pss, _kind(process)
            except psutil.Error:  # it ended between the listing and this look
                continue
            by_kind[kind] = by_kind.get(kind, 0) + size
        self.samples += 1
        if (total := sum(by_kind.values())) > self.peak_bytes:
            self.peak_bytes, self.at_peak = total, by_kind


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--experiment", default="megatron_40step")
    parser.add_argument("--nproc", type=int, default=1, help="trainer ranks (default: %(default)s)")
    options = parser.parse_args(arguments)
    facts = machine()
    show_machine(facts)
    words = [f"+experiment={options.experiment}"]
    prepare_models(words)
    watch = MemoryWatch()
    job = run_job(words, label=options.experiment, nproc=options.nproc, timeout_s=3600, look=watch)
    wall_s = job.ended_unix_s - job.started_unix_s
    _show_memory(watch)
    parts = _parts(job)
    show_table(
        "where the wall time went",
        ["", "s", "share"],
        [[name, f"{seconds:.1f}", f"{100 * seconds / wall_s:.0f} %"] for name, seconds in parts.items()],
    )
    limits = {
        f"peak memory {watch.peak_bytes / 1e9:.2f} GB, at most {MAX_PSS_BYTES / 1e9:.0f} GB": (
            watch.peak_bytes <= MAX_PSS_BYTES
        ),
        f"wall time {wall_s:.0f} s, at most {MAX_WALL_S:.0f} s (load before: {job.load:.1f})": wall_s
        <= MAX_WALL_S,
        "the gates of the experiment": job.passed,
    }
    print()
    for text, held in limits.items():
        print(f"{'ok    ' if held else 'MISSED'} {text}", flush=True)
    save(
        "whole_run",
        facts,
        {
            "experiment": options.experiment,
            "nproc": options.nproc,
            "peak_pss_bytes": watch.peak_bytes,
            "pss_bytes_at_peak": watch.at_peak,
            "wall_s": wall_s,
            "wall_parts_s": parts,
            "load_before": job.load,
            "gates_passed": job.passed,
        },
    )
    return 0 if all(limits.values()) else 1


def _show_memory(watch: MemoryWatch) -> None:
    rows = [
        [kind, f"{size / 2**20:.0f}"] for kind, size in sorted(watch.at_peak.items(), key=lambda i: -i[1])
    ]
    rows.append([f"sum, the largest of {watch.samples} samples", f"{watch.peak_bytes / 2**20:.0f}"])
    show_table("memory at its peak", ["processes", "PSS, MiB"], rows)


def _parts(job: FinishedJob) -> dict[str, float]:
    """Seconds of the whole command, from torchrun's start to its end."""
    first, last = job.rows[0], job.rows[-1]
    timers = ("idle/validation", "exposed_generation", "update", "weight_sync")
    sums = {
        name: sum(
            float(row.get(f"timing/{phase}/{name}", 0.0)) for row in job.rows for phase in ("train", "setup")
        )
        for name in timers
    }
    loop_s = float(last["clock/step_end_s"]) - float(first["clock/step_start_s"])
    return {
        "start of processes and models": float(first["clock/step_start_s"]) - job.started_unix_s,
        "validation": sums["idle/validation"],
        "wait for groups": sums["exposed_generation"],
        "updates": sums["update"],
        "refits with their probe": sums["weight_sync"],
        "rest of the loop: scoring, checkpoints, metrics": loop_s - sum(sums.values()),
        "last checkpoint, gates, end of processes": job.ended_unix_s - float(last["clock/step_end_s"]),
    }


def _kind(process: psutil.Process) -> str:
    """What a process is, from its command line and its parent's."""
    line = " ".join(process.cmdline())
    for needle, kind in (
        ("torch.distributed.run", "torchrun"),
        ("train_async_ppo.py", "trainer"),
        ("ray::EngineActor", "engine actor"),
        ("EngineCore", "vLLM engine core"),
        ("ray::CollectorActor", "collector"),
        ("ray::ReplayActor", "replay buffer"),
    ):
        if needle in line:
            return kind
    if "multiprocessing" in line:
        parent = process.parent()
        of_engine = parent is not None and "ray::EngineActor" in " ".join(parent.cmdline())
        return "vLLM engine core" if of_engine else "trainer's checkpoint writers"
    return "Ray's own processes"


if __name__ == "__main__":
    sys.exit(main())
