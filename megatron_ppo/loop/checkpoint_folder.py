"""Checkpoints as files: what a step's folder holds, when it is complete, how it becomes visible, which ones stay.

A folder `step_K` (K completed steps) is written as `tmp_step_K`, sealed (a list of its files and their sizes, then
everything flushed to disk) and renamed; `latest` moves last. One that has to go is renamed before it is deleted. So
every `step_K` was complete when it appeared, whenever the process was killed, and a file that was lost or cut since
then is noticed by its name.

Standard library only: the config check reads folders before torch is imported. Driven on rank 0 by `RunCheckpoints`.
"""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.loop.identity import Trait, differences
from megatron_ppo.protocol.errors import CheckpointError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 2
INFO_FILE = "training_info.json"
REPLAY_FILE = "replay_buffer.json"
FILES_FILE = "files.json"
LATEST_FILE = "latest"
INFO_KEYS = frozenset(
    {"format_version", "step", "weight_version", "identity", "metric", "metric_value", "prompts"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints stay: the newest `keep` (at least one) and the `keep_best` best by `metric`.

    Attributes:
        metric: None ranks none. Values of another metric are not compared; of equal ones the newer is better.
    """

    keep: int
    keep_best: int
    metric: str | None
    higher_is_better: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a resume found.

    Attributes:
        newest: name of the newest complete checkpoint, if there is one.
        torn: what is wrong with each newer one, newest first.
        told: in what the run differs from it without harm.
    """

    newest: str | None
    torn: tuple[str, ...]
    told: tuple[str, ...] = ()


class CheckpointFolder:
    """`<run dir>/checkpoints`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, step: int) -> None:
        """Make room for the save of `step`; what a killed one has left goes."""
        self.sweep()
        self.temporary(step).mkdir(parents=True)

    def temporary(self, step: int) -> Path:
        """Where the checkpoint of `step` is written."""
        return self.path / f"tmp_step_{step}"

    def final(self, step: int) -> Path:
        """Where it appears when it is complete."""
        return self.path / f"step_{step}"

    def seal(self, step: int) -> None:
        """List the files of a written checkpoint and flush everything to disk; it can be published then."""
        folder = self.temporary(step)
        sizes = {name: size for name, size in sorted(_sizes(folder)) if name != FILES_FILE}
        (folder / FILES_FILE).write_text(json.dumps(sizes, indent=1))
        flush_tree(folder)

    def publish(self, step: int, retention: Retention) -> None:
        """Make the sealed checkpoint of `step` the newest one, and delete those that need not stay."""
        final = self.final(step)
        if final.exists():  # torn, otherwise the run would have continued from it
            _retire(final)
        self.temporary(step).rename(final)
        self._point_latest_at(final.name)
        for folder in self._expired(retention):
            _retire(folder)
        self.sweep()

    def finish_killed_publication(self, newest: str) -> None:
        """Do what a kill after the rename of `newest` has left undone: `latest`, and what is to be deleted."""
        latest = self.path / LATEST_FILE
        if not latest.exists() or latest.read_text() != newest:
            self._point_latest_at(newest)
        self.sweep()

    def saved(self) -> list[Path]:
        """Folders of steps, oldest first. Others, such as a copy that someone made, are left alone."""
        folders = [f for f in self.path.glob("step_*") if f.name.removeprefix("step_").isdecimal()]
        return sorted(folders, key=step_of)

    def sweep(self) -> None:
        """Delete what a failed or killed save, or a retired checkpoint, has left."""
        for pattern in ("tmp_step_*", "old_step_*"):
            for folder in self.path.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)

    def choose(self, identity: Mapping[str, Trait]) -> Choice:
        """The checkpoint to continue from, which must fit the run.

        Raises: CheckpointError if it is of another format, or of a run that this one cannot continue.
        """
        torn: list[str] = []
        for folder in reversed(self.saved()):
            try:
                info = read_complete(folder)
            except (OSError, ValueError) as error:
                torn.append(f"{folder}: {error}")
                continue
            _check_format(folder, info)
            told = differences(folder, info.get("identity"), identity)
            return Choice(newest=folder.name, torn=tuple(torn), told=tuple(told))
        return Choice(newest=None, torn=tuple(torn))

    def _point_latest_at(self, name: str) -> None:
        latest = self.path / f"{LATEST_FILE}.tmp"
        latest.write_text(name)
        _flush(latest)
        latest.replace(self.path / LATEST_FILE)
        _flush(self.path)

    def _expired(self, retention: Retention) -> list[Path]:
        complete: list[Path] = []
        ranked: list[tuple[float, int, Path]] = []
        sign = 1.0 if retention.higher_is_better else -1.0
        for folder in self.saved():
            try:
                info = read_complete(folder)
            except (OSError, ValueError):
                continue  # torn; counting it would let a good one go in its place
            complete.append(folder)
            value = info.get("metric_value") if info.get("metric") == retention.metric else None
            if isinstance(value, int | float) and not math.isnan(value):
                ranked.append((sign * value, step_of(folder), folder))
        kept = set(complete[-max(retention.keep, 1) :])
        best = sorted(ranked, reverse=True)[: retention.keep_best]
        return [folder for folder in complete if folder not in kept.union(folder for _, _, folder in best)]


def read_complete(folder: Path) -> dict[str, object]:
    """`training_info.json` of a complete checkpoint.

    Raises: OSError or ValueError, naming the file, if one is missing or shorter than it was when it was saved.
    """
    info = json.loads((folder / INFO_FILE).read_text())
    if not isinstance(info, dict):
        raise ValueError(f"{INFO_FILE} is not an object")
    if info.get("format_version") != FORMAT_VERSION:  # an error of its own, not a torn checkpoint
        return info
    missing = INFO_KEYS - info.keys()
    if missing:
        raise ValueError(f"{INFO_FILE} lacks {sorted(missing)}")
    sizes = json.loads((folder / FILES_FILE).read_text())
    if not isinstance(sizes, dict):
        raise ValueError(f"{FILES_FILE} is not an object")
    for name, size in sizes.items():
        path = folder / name
        if name == REPLAY_FILE and not path.exists():
            continue  # its groups are generated again
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes, it had {size} when it was saved")
    return info


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that `path` means: a checkpoint itself, or the newest complete one of a run or its folder.

    Args:
        path: `<run dir>`, `<run dir>/checkpoints` or `<run dir>/checkpoints/step_K`.
    Raises: CheckpointError naming what is missing, or that there is none.
    """
    if (path / INFO_FILE).exists() or path.name.startswith("step_"):
        try:
            info = read_complete(path)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} is not a complete checkpoint: {error}") from error
        _check_format(path, info)
        return path
    folder = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    choice = CheckpointFolder(folder).choose({})
    if choice.newest is None:
        found = f"; torn: {'; '.join(choice.torn)}" if choice.torn else ""
        raise CheckpointError(f"{path} holds no complete checkpoint{found}")
    return folder / choice.newest


def step_of(folder: Path) -> int:
    """K of `step_K`."""
    return int(folder.name.removeprefix("step_"))


def flush_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, so that the rename that follows publishes durable data."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _check_format(folder: Path, info: dict[str, object]) -> None:
    if info.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(
            f"{folder}: format_version is {info.get('format_version')}, this version reads {FORMAT_VERSION}"
        )


def _sizes(folder: Path) -> Iterator[tuple[str, int]]:
    for root, _, files in os.walk(folder):
        for name in files:
            path = Path(root) / name
            yield str(path.relative_to(folder)), path.stat().st_size


def _retire(folder: Path) -> None:
    # Deleting takes many operations; a kill between them must not leave half a checkpoint under its own name.
    folder.rename(folder.with_name(f"old_{folder.name}"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
