"""Owns the evaluation of a whole run directory: its gates, and whether the run came to its end at all.

`scripts/check_gates.py` drives it. Invariant: the same files always give the same verdict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import yaml  # type: ignore[import-untyped]
from rich.console import Console

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.faults import FaultKind, faults_metric
from megatron_ppo.telemetry.gates import (
    Gate,
    GateResult,
    Statistic,
    all_passed,
    evaluate,
    format_gates,
    gate_table,
    parse_gates,
)
from megatron_ppo.telemetry.metrics import MetricValue
from megatron_ppo.telemetry.run_dir import RunDirectory, RunState
from megatron_ppo.telemetry.sinks import read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """Verdict on a run.

    Attributes:
        unfinished: what shows that the run did not reach its end; None when it did.
    """

    results: tuple[GateResult, ...]
    unfinished: str | None

    @property
    def passed(self) -> bool:
        """Whether the run is finished and every gate passed."""
        return self.unfinished is None and all_passed(self.results)


def check_run(run_dir: Path, *, gates_file: Path | None = None) -> RunCheck:
    """Evaluate the gates of `config.yaml`, or of another file, on the run's metrics.

    Raises: ConfigError when a file is missing or malformed, or when there is no gate to check.
    """
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir} does not exist")
    directory = RunDirectory(path=run_dir)
    source = gates_file or directory.config_path
    gates = gates_of(_read_mapping(source))
    if not gates:
        raise ConfigError(f"{source} declares no gates")
    rows = read_rows(directory.metrics_path)
    return RunCheck(results=tuple(evaluate(gates, rows)), unfinished=_why_unfinished(directory))


def gates_of(config: Mapping[str, object]) -> tuple[Gate, ...]:
    """Gates that a configuration declares, and one for each kind of fault that it switches on: it must have happened.

    Raises: ConfigError for a malformed gate.
    """
    chaos = config.get("chaos")
    rates = chaos if isinstance(chaos, Mapping) else {}
    return (
        *parse_gates(config.get("gates")),
        *(
            Gate(
                name=f"{kind}_happened",
                of=Statistic(metric=faults_metric(kind), stat="max"),
                op=">=",
                value=1.0,
                reason=f"chaos.{kind.config_key} is on, and the run survived it",
            )
            for kind in FaultKind
            if rates.get(kind.config_key, 0.0) > 0.0
        ),
    )


def survived_faults(rows: Sequence[Mapping[str, MetricValue]]) -> Mapping[FaultKind, int]:
    """Number of injected faults of each kind that is on, according to the metrics of a run that came to its end."""
    last: dict[FaultKind, int] = {}
    for row in rows:
        last |= {kind: int(row[faults_metric(kind)]) for kind in FaultKind if faults_metric(kind) in row}
    return last


def print_results(results: Sequence[GateResult], stream: TextIO) -> None:
    """A coloured table on a terminal, plain unwrapped lines elsewhere."""
    if stream.isatty():
        Console(file=stream).print(gate_table(results))
    else:
        stream.write(format_gates(results) + "\n")


def _why_unfinished(directory: RunDirectory) -> str | None:
    manifest = directory.read_manifest()
    if manifest.state is RunState.FINISHED:
        return None
    why = f" ({manifest.reason})" if manifest.reason else ""
    return f"{directory.manifest_path.name} says the run is {manifest.state}{why}"


def _read_mapping(path: Path) -> Mapping[str, object]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path} must hold a mapping, got {type(content).__name__}")
    return content
