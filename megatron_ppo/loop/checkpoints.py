"""Checkpoints as files: what a step's folder holds, how it becomes visible, which ones stay.

A folder `step_K` (K completed steps) is written as `tmp_step_K`, flushed to disk and renamed; `latest` moves last.
One that has to go is renamed before it is deleted. So every `step_K` is complete, whenever the process was killed.

Invariants: the replay snapshot and the weights of one folder belong to the same step boundary; no prompt is lost or
trained twice by a resume, whether the finished groups are restored or not.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from megatron_ppo.loop.ports import Metrics
from megatron_ppo.loop.validation import OnRankZero
from megatron_ppo.protocol.errors import CheckpointError
from megatron_ppo.replay.state import from_json, to_json

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
INFO_FILE = "training_info.json"
REPLAY_FILE = "replay_buffer.json"
LATEST_FILE = "latest"
INFO_KEYS = frozenset(
    {"format_version", "step", "weight_version", "identity", "metric", "metric_value", "prompts"}
)


class ModelStore(Protocol):
    """Saves and loads policy and critic with their optimizers; collective over all ranks."""

    def save(self, folder: Path) -> None:
        """Write into the existing `folder`. Returns, or raises, on every rank; every rank's files are complete."""
        ...

    def load(self, folder: Path) -> None:
        """Restore in place. Raises: CheckpointError."""
        ...


class ReplaySnapshots(Protocol):
    """The replay buffer as rank 0 sees it."""

    def snapshot(self) -> str:
        """One atomic snapshot of buffer, targets, ledger and prompt position, as JSON text."""
        ...

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """Continue from a snapshot, or from an empty buffer, at `resume_step` completed steps."""
        ...


class RunCheckpoints:
    """The run's checkpoint folder.

    Args:
        folder: `<run dir>/checkpoints`.   resume: whether to continue from its newest complete checkpoint.
        keep: how many of the newest to keep.   metric: of which the best checkpoint is kept as well, the
            largest or the smallest by `higher_is_better`.
        identity: what must be equal to continue (seed, model, task); compared on restore.
        load_replay_buffer: False regenerates the whole window instead of restoring finished groups; so does a
            missing file of groups. The position in the prompt stream is restored in any case.
    """

    def __init__(
        self,
        *,
        folder: Path,
        resume: bool,
        keep: int,
        metric: str | None,
        higher_is_better: bool,
        identity: dict[str, str],
        load_replay_buffer: bool,
        models: ModelStore,
        replay: ReplaySnapshots | None,
        version_at: Callable[[int], int],
        on_rank_zero: OnRankZero[object],
    ) -> None:
        self._folder = folder
        self._resume = resume
        self._keep = keep
        self._metric = metric
        self._sign = 1.0 if higher_is_better else -1.0
        self._identity = identity
        self._load_replay_buffer = load_replay_buffer
        self._models = models
        self._replay = replay
        self._version_at = version_at
        self._on_rank_zero = on_rank_zero

    def restore(self) -> int:
        """Continue from the newest complete checkpoint, if resuming and there is one."""
        newest = self._on_rank_zero("choice of checkpoint", self._newest_complete)
        if newest is None:
            self._on_rank_zero("start of the replay buffer", lambda: self._restore_replay(None, 0))
            return 0
        step = int(str(newest).removeprefix("step_"))
        logger.info("resuming from %s", self._folder / str(newest))
        self._models.load(self._folder / str(newest))
        self._on_rank_zero("restore of the replay buffer", lambda: self._restore_replay(str(newest), step))
        return step

    def save(self, *, step: int, metrics: Metrics) -> None:
        """Save after `step` completed steps."""
        started = time.monotonic()
        temporary, final = self._folder / f"tmp_step_{step}", self._folder / f"step_{step}"
        self._on_rank_zero(f"start of checkpoint {step}", lambda: self._begin(temporary))
        # The learner is here, so nothing is trained between the snapshot and the weights; groups that land
        # meanwhile are pending in the snapshot and are generated again after a restore.
        self._on_rank_zero(
            f"snapshot of checkpoint {step}", lambda: self._write_side_files(temporary, step, metrics)
        )
        self._models.save(temporary)
        self._on_rank_zero(f"publication of checkpoint {step}", lambda: self._publish(temporary, final))
        logger.info("saved %s in %.1f s", final, time.monotonic() - started)

    def _newest_complete(self) -> str | None:
        if not self._resume:
            return None
        for folder in reversed(self._saved()):
            try:
                info = _read_info(folder)
            except (OSError, ValueError) as error:
                logger.warning("skipping torn checkpoint %s: %s", folder, error)
                continue
            self._check_identity(folder, info)
            return folder.name
        return None

    def _check_identity(self, folder: Path, info: dict[str, object]) -> None:
        if info.get("format_version") != FORMAT_VERSION:
            raise CheckpointError(
                f"{folder}: format_version is {info.get('format_version')}, this version reads {FORMAT_VERSION}"
            )
        saved = info.get("identity")
        for key, value in self._identity.items():
            seen = saved.get(key) if isinstance(saved, dict) else None
            if seen != value:
                raise CheckpointError(f"{folder}: {key} was {seen} when it was saved, the run has {value}")

    def _restore_replay(self, checkpoint: str | None, step: int) -> None:
        assert self._replay is not None, "only rank 0 holds the replay buffer"
        snapshot = None if checkpoint is None else self._snapshot_of(self._folder / checkpoint)
        self._replay.restore(snapshot, resume_step=step)

    def _snapshot_of(self, folder: Path) -> str:
        path = folder / REPLAY_FILE
        if self._load_replay_buffer and path.exists():
            return path.read_text()
        if self._load_replay_buffer:
            logger.warning("%s is missing; the groups that it held are generated again", path)
        return json.dumps(_read_info(folder)["prompts"])

    def _begin(self, temporary: Path) -> None:
        self._sweep()
        temporary.mkdir(parents=True)

    def _write_side_files(self, folder: Path, step: int, metrics: Metrics) -> None:
        assert self._replay is not None, "only rank 0 holds the replay buffer"
        snapshot = self._replay.snapshot()
        (folder / REPLAY_FILE).write_text(snapshot)
        ranking = metrics.get(self._metric) if self._metric else None
        if self._metric is not None and ranking is None:
            logger.warning("checkpoint %d is not ranked: its step has no metric %s", step, self._metric)
        info = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "weight_version": self._version_at(step),
            "identity": self._identity,
            "metric": self._metric,
            "metric_value": ranking,
            "prompts": json.loads(without_groups(snapshot)),
        }
        (folder / INFO_FILE).write_text(json.dumps(info, indent=1))

    def _publish(self, temporary: Path, final: Path) -> None:
        flush_tree(temporary)
        if final.exists():  # torn, otherwise the run would have continued from it
            _retire(final)
        temporary.rename(final)
        latest = self._folder / f"{LATEST_FILE}.tmp"
        latest.write_text(final.name)
        _flush(latest)
        latest.replace(self._folder / LATEST_FILE)
        _flush(self._folder)
        for folder in self._expired():
            _retire(folder)
        self._sweep()

    def _expired(self) -> list[Path]:
        """Of the complete ones, all but the newest `keep` and the best by the metric (of equal ones the newer)."""
        complete: list[Path] = []
        ranked: list[tuple[float, int, Path]] = []
        for folder in self._saved():
            try:
                info = _read_info(folder)
            except (OSError, ValueError):
                continue  # torn; counting it would let a good one go in its place
            complete.append(folder)
            value = info.get("metric_value") if info.get("metric") == self._metric else None
            if isinstance(value, int | float) and not math.isnan(value):
                ranked.append((self._sign * value, _step_of(folder), folder))
        kept = set(complete[-max(self._keep, 1) :])
        if ranked:
            kept.add(max(ranked)[2])
        return [folder for folder in complete if folder not in kept]

    def _saved(self) -> list[Path]:
        """Folders of steps, oldest first. Others, such as a copy that someone made, are left alone."""
        folders = [f for f in self._folder.glob("step_*") if f.name.removeprefix("step_").isdecimal()]
        return sorted(folders, key=_step_of)

    def _sweep(self) -> None:
        """Delete what a killed save or a retired checkpoint has left."""
        for pattern in ("tmp_step_*", "old_step_*"):
            for folder in self._folder.glob(pattern):
                shutil.rmtree(folder, ignore_errors=True)


def without_groups(snapshot: str) -> str:
    """The snapshot with its finished groups dropped; their ordinals become pending on restore."""
    return to_json(dataclasses.replace(from_json(snapshot), groups=()))


def flush_tree(folder: Path) -> None:
    """fsync every file and folder below `folder`, so that the rename that follows publishes durable data."""
    for root, _, files in os.walk(folder):
        for name in files:
            _flush(Path(root) / name)
        _flush(Path(root))


def _retire(folder: Path) -> None:
    # Deleting takes many operations; a kill between them must not leave half a checkpoint under its own name.
    folder.rename(folder.with_name(f"old_{folder.name}"))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _read_info(folder: Path) -> dict[str, object]:
    """Raises: OSError or ValueError for a torn checkpoint."""
    info = json.loads((folder / INFO_FILE).read_text())
    if not isinstance(info, dict):
        raise ValueError(f"{INFO_FILE} is not an object")
    missing = INFO_KEYS - info.keys()
    if missing and info.get("format_version") == FORMAT_VERSION:  # another format is an error of its own
        raise ValueError(f"{INFO_FILE} lacks {sorted(missing)}")
    return info
