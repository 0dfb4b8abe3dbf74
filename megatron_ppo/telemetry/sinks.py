"""Owns the files that metrics end in: `metrics.jsonl`, TensorBoard events, `status.json`; reads rows back.

Rank 0's `Telemetry` drives the sinks. Invariant of `metrics.jsonl`: one JSON object per line, `step` strictly
increasing, also over any number of killed and resumed runs.
"""

from __future__ import annotations

import io
import json
import logging
import math
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.metrics import MetricValue, Row, Sink, StageListener, Telemetry
from megatron_ppo.telemetry.run_dir import RunDirectory, write_json_atomically

if TYPE_CHECKING:
    from tensorboard.summary.writer.event_file_writer import EventFileWriter  # type: ignore[import-untyped]

logger = logging.getLogger(__name__)

# JSON has no literal for these; as strings they survive every parser and are still told apart.
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class JsonlSink:
    """`metrics.jsonl`: appends one object per row; each line reaches the kernel in one write.

    Args:
        path: the file; created by `start` when missing. Until then it stays as an earlier process left it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_step: int | None = None
        self._stream: io.FileIO | None = None

    def start(self, *, next_step: int) -> None:
        """Drop rows at or beyond `next_step` and a torn last line, atomically, then open for appending."""
        kept = _truncate(self._path, next_step=next_step)
        self._last_step = int(kept[-1]["step"]) if kept else None
        self._stream = io.FileIO(self._path, "ab")

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Append one row. Raises: ValueError unless its `step` is higher than every step before."""
        if self._stream is None:
            raise ValueError(f"{self._path} is not open for rows: `start` was not called, or `close` was")
        step = row["step"]
        if not isinstance(step, int) or (self._last_step is not None and step <= self._last_step):
            raise ValueError(f"row of step {step!r} follows step {self._last_step} in {self._path}")
        self._last_step = step
        self._stream.write(_encode(row))

    def note(self, text: str) -> None:
        """Notes are no metrics."""

    def close(self) -> None:
        """Close the file."""
        if self._stream is not None:
            self._stream.close()
            self._stream = None


class TensorBoardSink:
    """TensorBoard scalars at `step`, through the writer of the tensorboard package, which needs no torch."""

    def __init__(self, events_dir: Path) -> None:
        # Loaded here: the import takes a second that scripts which only read rows should not pay.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog  # type: ignore[import-untyped]
        from tensorboard.compat.proto.summary_pb2 import Summary  # type: ignore[import-untyped]
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event_type, self._session_type, self._summary_type = Event, SessionLog, Summary
        events_dir.mkdir(parents=True, exist_ok=True)
        self._writer: EventFileWriter | None = EventFileWriter(str(events_dir))

    def start(self, *, next_step: int) -> None:
        """Hide what earlier processes wrote at or beyond `next_step`: TensorBoard drops it on this event."""
        if self._writer is not None and next_step > 1:
            session = self._session_type(status=self._session_type.START)
            self._writer.add_event(
                self._event_type(wall_time=time.time(), step=next_step, session_log=session)
            )

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Write the numbers of the row; strings and clocks have no curve."""
        if self._writer is None:
            return
        values = [
            self._summary_type.Value(tag=key, simple_value=float(value))
            for key, value in row.items()
            if isinstance(value, (int, float)) and key != "step" and not key.startswith(("clock/", "time_"))
        ]
        event = self._event_type(
            wall_time=float(row["time_unix_s"]),
            step=int(row["step"]),
            summary=self._summary_type(value=values),
        )
        self._writer.add_event(event)
        self._writer.flush()

    def note(self, text: str) -> None:
        """Notes are no metrics."""

    def close(self) -> None:
        """Write what is buffered and stop the writer's thread."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


class StatusSink:
    """`status.json`: where the run is, for people and scripts that look from outside; replaced atomically."""

    def __init__(self, path: Path, *, max_num_steps: int) -> None:
        self._path = path
        self._metrics: dict[str, MetricValue] = {}
        self._status: dict[str, object] = {
            "step": None,
            "max_num_steps": max_num_steps,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "note": "",
            "metrics": self._metrics,
        }
        self._write()

    def start(self, *, next_step: int) -> None:
        """Show the completed steps of the checkpoint that the run continues from."""
        self._status["step"] = max(0, next_step - 1)
        self._write()

    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Keep the newest value of every metric, so that values which come every few steps stay visible."""
        self._metrics.update(
            {key: _legal(value) for key, value in row.items() if not key.startswith("clock/")}
        )
        self._status.update(step=row["step"], note="")
        self._write()

    def note(self, text: str) -> None:
        """What the run is doing between two steps."""
        self._status["note"] = text
        self._write()

    def close(self) -> None:
        """The file stays as the last step left it."""

    def _write(self) -> None:
        self._status["updated_unix_s"] = time.time()
        write_json_atomically(self._path, self._status)


def build_telemetry(
    directory: RunDirectory,
    *,
    max_num_steps: int,
    num_trainer_ranks: int,
    tensorboard: bool,
    displays: Sequence[Sink] = (),
    on_stage: StageListener | None = None,
) -> Telemetry:
    """Rank 0's telemetry: rows to `metrics.jsonl` first, then `status.json`, TensorBoard and the displays."""
    sinks: list[Sink] = [
        JsonlSink(directory.metrics_path),
        StatusSink(directory.status_path, max_num_steps=max_num_steps),
    ]
    if tensorboard:
        sinks.append(TensorBoardSink(directory.events_dir))
    return Telemetry(sinks=[*sinks, *displays], num_trainer_ranks=num_trainer_ranks, on_stage=on_stage)


def read_rows(path: Path) -> list[Row]:
    """Rows of a `metrics.jsonl`, in order; a last line that a crash tore is dropped with a warning.

    Raises: ConfigError when the file is missing, or a line before the last is no row.
    """
    try:
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise ConfigError(f"metrics file {path} cannot be read: {error.strerror}") from error
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(_decode(line))
        except ValueError as error:
            if number == len(lines) and not line.endswith(b"\n"):
                logger.warning("%s: dropped the torn last line %d (%d bytes)", path, number, len(line))
                break
            raise ConfigError(f"{path}, line {number} is no metrics row: {error}") from error
    return rows


def _truncate(path: Path, *, next_step: int) -> list[Row]:
    """Drop the rows at or beyond `next_step` and a torn last line, atomically; return the kept rows."""
    rows = read_rows(path) if path.exists() else []
    kept = [row for row in rows if int(row["step"]) < next_step]
    if len(kept) < len(rows):
        logger.warning(
            "%s: dropped %d rows of steps >= %d, which run again", path, len(rows) - len(kept), next_step
        )
    missing = sorted(set(range(1, next_step)) - {int(row["step"]) for row in kept})
    if missing:
        logger.warning("%s has no rows of the completed steps %s", path, missing)
    _replace_lines(path, map(_encode, kept))
    return kept


def _replace_lines(path: Path, lines: Iterable[bytes]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as stream:
        stream.writelines(lines)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)


def _encode(row: Mapping[str, MetricValue]) -> bytes:
    legal = {key: _legal(value) for key, value in row.items()}
    return (json.dumps(legal, allow_nan=False) + "\n").encode()


def _decode(line: bytes) -> Row:
    fields = json.loads(line)
    if not isinstance(fields, dict) or not isinstance(fields.get("step"), int):
        raise ValueError("it is no JSON object with a whole number `step`")
    return {
        key: _NON_FINITE[value] if isinstance(value, str) and value in _NON_FINITE else value
        for key, value in fields.items()
    }


def _legal(value: MetricValue) -> MetricValue:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
    return value
