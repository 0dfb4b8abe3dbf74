"""Two run directories compared bit for bit. Driven by `scripts/compare_runs.py` and the tests of deterministic runs.

Invariant: only what both could hold is compared, and how much that was is part of the answer, so that a comparison of
nothing does not pass for equality.
"""

from __future__ import annotations

import filecmp
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.checkpoint_pieces import DATA_SUFFIX, INDEX_FILE, differing_pieces
from megatron_ppo.telemetry.pickle_text import torch_file_text
from megatron_ppo.telemetry.repeatable import differences, repeatable
from megatron_ppo.telemetry.run_dir import RunDirectory
from megatron_ppo.telemetry.sinks import read_rows

NOT_COMPARED = {
    "files.json": "the sizes of the other files, some of which hold the path of the run",
    "config.yaml": "the path of the run, and how it is shown",
}
"""File of a checkpoint -> why its bytes differ between equal runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Attributes:
    findings: one line per difference; metrics first, in the order of the steps.
    num_rows, num_values: rows of both runs' steps, and repeatable metrics in them.
    checkpoints: names of those that both hold.
    num_files: files in these, compared by bytes and, where those differ, by content if the format has one.
    """

    findings: tuple[str, ...]
    num_rows: int
    num_values: int
    checkpoints: tuple[str, ...]
    num_files: int


def compare_runs(first: Path, second: Path) -> Comparison:
    """Metrics and checkpoints of two runs. Raises: ConfigError for a folder that is no run."""
    folders = [RunDirectory(path=path) for path in (first, second)]
    rows = [read_rows(folder.metrics_path) for folder in folders]
    try:
        findings = [str(difference) for difference in differences(*rows)]
    except ValueError as error:
        raise ConfigError(f"{first} and {second} cannot be compared: {error}") from error
    saved = [_checkpoints(folder.checkpoints_dir) for folder in folders]
    common = sorted(saved[0].keys() & saved[1].keys(), key=lambda name: int(name.removeprefix("step_")))
    num_files = 0
    for name in common:
        num_files += sum(path.is_file() for path in saved[0][name].rglob("*"))
        findings += [f"{name}: {line}" for line in _differing_files(saved[0][name], saved[1][name])]
    return Comparison(
        findings=tuple(findings),
        num_rows=len(rows[0]),
        num_values=sum(len(repeatable(row)) for row in rows[0]),
        checkpoints=tuple(common),
        num_files=num_files,
    )


def _checkpoints(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("step_*") if path.is_dir()}


def _differing_files(first: Path, second: Path) -> Iterator[str]:
    names = [
        {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
        for folder in (first, second)
    ]
    of_pieces: set[Path] = set()
    for name in sorted(names[0] | names[1]):
        if name not in names[0] or name not in names[1]:
            yield f"{name} is missing in the {'first' if name not in names[0] else 'second'} run"
        elif Path(name).name in NOT_COMPARED or filecmp.cmp(first / name, second / name, shallow=False):
            continue
        elif Path(name).name == INDEX_FILE or Path(name).suffix == DATA_SUFFIX:
            of_pieces.add(Path(name).parent)
        elif not _say_the_same(first / name, second / name):
            yield f"{name} has another content"
    for folder in sorted(of_pieces):
        try:
            yield from (f"{folder}: {line}" for line in differing_pieces(first / folder, second / folder))
        except (OSError, ValueError) as error:
            yield f"{folder} has another content, and cannot be read piece by piece: {error}"


def _say_the_same(first: Path, second: Path) -> bool:
    """Whether files of other bytes have the same content; True only for those of `torch.save`, which hold a pickle."""
    try:
        return first.suffix == ".pt" and torch_file_text(first) == torch_file_text(second)
    except ValueError:
        return False
