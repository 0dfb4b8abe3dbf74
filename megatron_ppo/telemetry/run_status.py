"""A live or dead run, seen from outside: what it does, how old its signs of life are, when it will be finished.

Driven by `scripts/status.py`. Reads the run directory only, never writes into it, and needs no process of the run.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from statistics import fmean

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.heartbeat import SILENT_AFTER_S, Beat, read_beats
from megatron_ppo.telemetry.metrics import Row
from megatron_ppo.telemetry.run_dir import RunDirectory, RunManifest, RunState, lock_owner
from megatron_ppo.telemetry.sinks import read_rows

# As the progress display predicts: recent steps, because warm-up steps are shorter than later ones.
ETA_WINDOW_STEPS = 10
_SHOWN_METRICS = (
    "train/reward",
    "validation/accuracy",
    "age/max_versions",
    "age/mean_versions",
    "train/buffer_size",
    "engines/healthy",
    "engines/deaths",
    "refit/stragglers",
)


class Life(StrEnum):
    """RUNNING: a process holds the run's lock. DIED: none does, and the run did not say that it ends.

    STOPPED: it was asked to end, and did.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"
    DIED = "died"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """What the files of a run say at one moment.

    Attributes:
        owner: process id in the lock, None when nobody holds it.
        step, max_num_steps: completed and planned steps, None before the run has said so.
        eta_s: seconds to the last step at the pace of the last ones, None when unknown or over.
        row: newest value of every metric.   beats: of every process.
    """

    path: Path
    manifest: RunManifest
    life: Life
    owner: int | None
    now_unix_s: float
    step: int | None
    max_num_steps: int | None
    note: str
    eta_s: float | None
    row: Row
    beats: tuple[Beat, ...]

    @property
    def silent(self) -> tuple[str, ...]:
        """Processes of a running run that give no sign of life."""
        if self.life is not Life.RUNNING:
            return ()
        return tuple(
            beat.process
            for beat in self.beats
            if beat.age_s(self.now_unix_s) > SILENT_AFTER_S or is_gone(beat)
        )

    def as_json(self) -> dict[str, object]:
        """For other programs."""
        return {
            "run": str(self.path),
            "name": self.manifest.name,
            "life": str(self.life),
            "reason": self.manifest.reason,
            "pid": self.owner,
            "step": self.step,
            "max_num_steps": self.max_num_steps,
            "note": self.note,
            "eta_s": self.eta_s,
            "metrics": self.row,
            "processes": {
                beat.process: {
                    "pid": beat.pid,
                    "host": beat.host,
                    "age_s": round(beat.age_s(self.now_unix_s), 3),
                    **beat.detail,
                }
                for beat in self.beats
            },
            "silent": list(self.silent),
        }


def read_status(run_dir: Path, *, now_unix_s: float) -> RunStatus:
    """Read the run's files. Raises: ConfigError when it is no run directory or a file is broken."""
    directory = RunDirectory(path=run_dir)
    manifest = directory.read_manifest()
    owner = lock_owner(directory)
    progress = _read_progress(directory.status_path)
    rows = read_rows(directory.metrics_path) if directory.metrics_path.exists() else []
    newest: Row = {key: value for row in rows for key, value in row.items() if not key.startswith("clock/")}
    life = Life(manifest.state) if owner is None else Life.RUNNING
    if owner is None and manifest.state is RunState.RUNNING:
        life = Life.DIED
    step, max_num_steps = _count(progress, "step"), _count(progress, "max_num_steps")
    if step is None and rows:
        step = int(rows[-1]["step"])
    return RunStatus(
        path=run_dir,
        manifest=manifest,
        life=life,
        owner=owner,
        now_unix_s=now_unix_s,
        step=step,
        max_num_steps=max_num_steps,
        note=str(progress.get("note", "")),
        eta_s=_eta_s(rows, step, max_num_steps) if life is Life.RUNNING else None,
        row=newest,
        beats=tuple(read_beats(directory.heartbeats_dir)),
    )


def format_status(status: RunStatus) -> str:
    """For a person, plain lines."""
    lines = [f"run        {status.manifest.name} in {status.path}", f"state      {_state(status)}"]
    total = "?" if status.max_num_steps is None else status.max_num_steps
    eta = "" if status.eta_s is None else f", {_clock(status.eta_s)} to go"
    lines.append(f"step       {'-' if status.step is None else status.step} of {total}{eta}")
    if status.note:
        lines.append(f"note       {status.note}")
    shown = [f"{key} {status.row[key]}" for key in _SHOWN_METRICS if key in status.row]
    if shown:
        lines.append(f"metrics    {', '.join(shown)}")
    for position, beat in enumerate(status.beats):
        told = describe_beat(beat, now_unix_s=status.now_unix_s, may_be_gone=status.life is not Life.RUNNING)
        lines.append(f"{'processes' if position == 0 else '':<10} {told}")
    return "\n".join(lines)


def describe_beat(beat: Beat, *, now_unix_s: float, may_be_gone: bool) -> str:
    """One line on one process.

    Args:
        may_be_gone: the run has ended, so it is not worth saying that the process has.
    """
    age_s = beat.age_s(now_unix_s)
    where = f"process {beat.pid}" + ("" if beat.host == socket.gethostname() else f" on {beat.host}")
    alive = " (gone)" if not may_be_gone and is_gone(beat) else ""
    detail = dict(beat.detail)
    since = detail.pop("stage_since_unix_s", None)
    if isinstance(since, (int, float)):
        # As of the last beat: what a process does that no longer beats is not known.
        detail["for"] = _clock(max(0.0, beat.beat_unix_s - since))
    if detail.pop("in_meeting", False):
        detail["waits for"] = "other ranks"
    told = ", ".join(f"{key} {value}" for key, value in detail.items() if value is not None)
    return f"{beat.process}: {where}{alive}, last sign {_clock(age_s)} ago" + (f"; {told}" if told else "")


def is_gone(beat: Beat) -> bool:
    """Whether the process has ended; False for one of another host, of which only the age of the beat is known."""
    if beat.host != socket.gethostname():
        return False
    try:
        os.kill(beat.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:  # it exists, as another user's
        return False
    return False


def _read_progress(path: Path) -> Mapping[str, object]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:  # the models are still being built
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold an object, got {type(content).__name__}")
    return content


def _count(progress: Mapping[str, object], key: str) -> int | None:
    value = progress.get(key)
    return value if isinstance(value, int) else None


def _eta_s(rows: Sequence[Row], step: int | None, max_num_steps: int | None) -> float | None:
    key = "timing/train/total_step_time"
    times_s = [float(row[key]) for row in rows if key in row][-ETA_WINDOW_STEPS:]
    if not times_s or step is None or max_num_steps is None:
        return None
    return fmean(times_s) * max(0, max_num_steps - step)


def _state(status: RunStatus) -> str:
    match status.life:
        case Life.RUNNING:
            silent = f"; NO SIGN OF LIFE from {', '.join(status.silent)}" if status.silent else ""
            return f"running, process {status.owner}{silent}"
        case Life.FAILED:
            return f"FAILED: {status.manifest.reason}"
        case Life.STOPPED:
            return f"{status.manifest.reason}; run.resume=auto continues it"
        case Life.DIED:
            return "DIED without a word (no process holds its lock); run.resume=auto continues it"
        case Life.FINISHED:
            return "finished"


def _clock(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{whole:02}"
