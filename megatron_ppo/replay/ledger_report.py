"""What a run's ledger says, as lines of text: the life of one prompt, the totals, what is still open.

Driven by `scripts/ledger.py`. Reads only, so it works on a live run and on a dead one.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.moves import Stage
from megatron_ppo.replay.history import Entry, read_entries, read_history
from megatron_ppo.telemetry.run_dir import RunDirectory


def ledger_path(run_dir: Path) -> Path:
    """The ledger file of a run. Raises: ConfigError if there is none."""
    if not run_dir.is_dir():
        raise ConfigError(f"run directory {run_dir} does not exist")
    path = RunDirectory(path=run_dir).ledger_path
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; is {run_dir} a run directory, outputs/<name>/<run id>?")
    return path


def explain(path: Path, ordinal: int) -> Iterator[str]:
    """Every move of `ordinal`, oldest first, then where it is.

    Raises: ConfigError for a negative ordinal, or one that never moved; CheckpointError for a damaged file.
    """
    if ordinal < 0:
        raise ConfigError(f"ordinals count from 0, got {ordinal}")
    last: Entry | None = None
    attempt = 0
    for entry in read_entries(path, ordinal=ordinal):
        attempt = entry.attempt
        if entry.move is not None:
            last = entry
            yield _move_line(entry)
    if last is None or last.move is None:
        known = len(read_history(path))
        raise ConfigError(f"ordinal {ordinal} never moved; the ledger knows ordinals below {known}")
    yield f"ordinal {ordinal}: {_where(last.move.stage, last.attempt, attempt)}"


def summary(path: Path) -> Iterator[str]:
    """Attempts, ordinals per stage, and reasons of drops. Raises: CheckpointError for a damaged file."""
    starts: list[Entry] = []
    reasons: dict[str, int] = {}
    for entry in read_entries(path):
        if entry.move is None:
            starts.append(entry)
        elif entry.move.stage in (Stage.DROPPED, Stage.ROLLED_BACK, Stage.RELEASED):
            key = f"{entry.move.stage}: {_without_digits(entry.move.reason)}"
            reasons[key] = reasons.get(key, 0) + 1
    history = read_history(path)
    for start in starts:
        yield f"attempt {start.attempt} started {_time(start.time_unix_s)} at {start.step} completed steps"
    for stage in Stage:
        yield f"{stage:<12} {history.count(stage)}"
    for reason, count in sorted(reasons.items(), key=lambda item: -item[1]):
        yield f"{count} x {reason}"


def pending(path: Path) -> Iterator[str]:
    """Last move of every ordinal that is neither trained nor dropped. Raises: CheckpointError if damaged."""
    history = read_history(path)
    open_ordinals = set(history.pending())
    last: dict[int, Entry] = {}
    for entry in read_entries(path):
        if entry.move is not None and entry.move.ordinal in open_ordinals:
            last[entry.move.ordinal] = entry
    for ordinal in sorted(last):
        yield f"ordinal {ordinal}: {_move_line(last[ordinal])}"


def _move_line(entry: Entry) -> str:
    move = entry.move
    assert move is not None
    parts = [_time(entry.time_unix_s), f"attempt {entry.attempt}", str(move.stage)]
    if move.step is not None:
        parts.append(f"at step {move.step}")
    if move.target_step is not None:
        parts.append(f"for step {move.target_step}")
    if move.min_version is not None:
        mixed = "" if move.min_version == move.max_version else f"..{move.max_version}"
        parts.append(f"versions {move.min_version}{mixed}")
    if move.reason is not None:
        parts.append(f"({move.reason})")
    return "  ".join(parts)


def _where(stage: Stage, attempt: int, newest: int) -> str:
    if stage in (Stage.TRAINED, Stage.DROPPED):
        return f"{stage}, for good unless the run resumes from an earlier checkpoint"
    if stage in (Stage.RELEASED, Stage.ROLLED_BACK):
        return f"waits to be handed out again, {stage} in attempt {attempt}"
    return f"{stage}, by attempt {attempt} of {newest}"


def _time(unix_s: float) -> str:
    return datetime.datetime.fromtimestamp(unix_s, tz=datetime.UTC).isoformat(timespec="milliseconds")


def _without_digits(reason: str | None) -> str:
    """Reasons of one kind differ in numbers only."""
    return "".join("#" if c.isdigit() else c for c in reason or "no reason given")
