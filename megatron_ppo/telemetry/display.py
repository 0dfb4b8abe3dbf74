"""Owns what the person at the terminal sees of a run: a live table on a terminal, plain lines elsewhere.

Rank 0's `Telemetry` drives it as a sink. Invariant: showing progress never ends a run; when the stream fails
(a closed terminal, a full pipe) the display reports it once to the log and stays silent.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TextIO, TypeVar, cast

from rich.console import Console, ConsoleDimensions, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatron_ppo.telemetry.metrics import MetricValue

logger = logging.getLogger(__name__)

# Rows kept on the live table; with the header they fit a terminal of 24 lines.
VISIBLE_ROWS = 12
# Steps whose mean duration predicts the rest: recent, because warm-up steps are shorter than later ones.
ETA_WINDOW_STEPS = 10
REFRESH_PER_SECOND = 4

_Method = TypeVar("_Method", bound=Callable[..., None])


def _never_fails(method: _Method) -> _Method:
    """Switch the display off, with one log entry, instead of raising into the run."""

    @functools.wraps(method)
    def guarded(self: ProgressDisplay, *args: Any, **kwargs: Any) -> None:
        if self._failed:
            return
        try:
            method(self, *args, **kwargs)
        except Exception:  # whatever it is, the run matters more than its picture
            self._failed = True
            logger.exception("the progress display failed and is switched off; the run goes on")

    return cast(_Method, guarded)


class _GuardedStream:
    """Drops what can no longer be written, because rich exits the process on a broken pipe."""

    def __init__(self, stream: TextIO) -> None:
        self._target = stream
        self.broken = False

    def write(self, text: str) -> int:
        self._attempt(lambda: self._target.write(text))
        return len(text)

    def flush(self) -> None:
        self._attempt(self._target.flush)

    def isatty(self) -> bool:
        return self._target.isatty()

    def fileno(self) -> int:
        return self._target.fileno()

    def _attempt(self, action: Callable[[], object]) -> None:
        if self.broken:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream was closed
            self.broken = True
            logger.error("the terminal is gone (%s); progress is no longer shown, the run goes on", error)


class _StreamConsole(Console):
    """A console of the size of its own stream; rich's looks at descriptors 0 to 2, which may be log files."""

    @property  # type: ignore[misc]
    def size(self) -> ConsoleDimensions:
        try:
            columns, lines = os.get_terminal_size(self.file.fileno())
        except (OSError, ValueError):
            return super().size
        return ConsoleDimensions(columns, lines) if columns > 0 and lines > 0 else super().size


class ProgressDisplay:
    """Shows every completed step on `stream`.

    Args:
        stream: the terminal, for example what `redirect_process_output` returns.
        live: True draws a live table, False prints a line per step, None is live exactly on a terminal.
    """

    def __init__(
        self, stream: TextIO, *, run_name: str, max_num_steps: int, live: bool | None = None
    ) -> None:
        self._failed = False
        self._run_name = run_name
        self._max_num_steps = max_num_steps
        self._step = 0
        self._validation_accuracy: float | None = None
        self._step_times_s: deque[float] = deque(maxlen=ETA_WINDOW_STEPS)
        self._rows: deque[tuple[str, ...]] = deque(maxlen=VISIBLE_ROWS)
        self._note, self._note_since_s = "", time.monotonic()
        self._stream = _GuardedStream(stream)
        self._console = _StreamConsole(file=cast(TextIO, self._stream), force_terminal=live)
        self._live: Live | None = None
        self._open()

    @property
    def broken(self) -> bool:
        """Whether the display is off, because it or its stream failed."""
        return self._failed or self._stream.broken

    @_never_fails
    def start(self, *, next_step: int) -> None:
        """Show how far the run already is."""
        self._step = max(0, next_step - 1)
        if self._step > 0:
            self.note(f"continuing after step {self._step} of {self._max_num_steps}")

    @_never_fails
    def write(self, row: Mapping[str, MetricValue]) -> None:
        """Show a completed step."""
        self._step = int(row["step"])
        self._validation_accuracy = _number(row, "validation/accuracy", self._validation_accuracy)
        step_time_s = _number(row, "timing/train/total_step_time", None)
        if step_time_s is not None:
            self._step_times_s.append(step_time_s)
        self._note, self._note_since_s = "", time.monotonic()
        cells = self._cells(row, step_time_s)
        self._rows.append(cells)
        if self._live is None:
            labels = ("step", "reward", "val", "age", "time", "bottleneck", "eta")
            line = " | ".join(f"{label} {cell}" for label, cell in zip(labels, cells, strict=True))
            print(line, file=self._stream, flush=True)
        else:
            self._live.refresh()

    @_never_fails
    def note(self, text: str) -> None:
        """Show what the run is doing now, until the next step is complete."""
        if self._live is None:
            print(text, file=self._stream, flush=True)
        else:
            self._note, self._note_since_s = text, time.monotonic()
            self._live.refresh()

    @_never_fails
    def show(self, content: RenderableType) -> None:
        """Print something that stays, for example the table of gates, above the live part."""
        self._console.print(content)

    @_never_fails
    def close(self) -> None:
        """Leave the last table on the terminal and stop drawing."""
        if self._live is not None:
            self._note = ""
            live, self._live = self._live, None
            live.stop()

    @_never_fails
    def _open(self) -> None:
        if self._console.is_terminal:
            live = Live(
                get_renderable=self._render,
                console=self._console,
                refresh_per_second=REFRESH_PER_SECOND,
                # The process's stdout and stderr go to its log file; rich must not take them over.
                redirect_stdout=False,
                redirect_stderr=False,
            )
            live.start()
            self._live = live

    def _cells(self, row: Mapping[str, MetricValue], step_time_s: float | None) -> tuple[str, ...]:
        age = _number(row, "age/max_versions", _number(row, "train/avg_trajectory_age", None))
        return (
            f"{self._step}/{self._max_num_steps}",
            _format(_number(row, "train/reward", None), ".3f"),
            _format(self._validation_accuracy, ".3f"),
            _format(age, "g"),
            _format(step_time_s, ".1f", "s"),
            str(row.get("bottleneck", "-")),
            self._eta(),
        )

    def _eta(self) -> str:
        if not self._step_times_s:
            return "-"
        left_s = sum(self._step_times_s) / len(self._step_times_s) * (self._max_num_steps - self._step)
        minutes, seconds = divmod(round(max(0.0, left_s)), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"

    def _render(self) -> RenderableType:
        table = Table(title=escape(self._run_name), title_justify="left", expand=False)
        for heading in ("step", "reward", "validation", "age", "step time", "bottleneck", "ETA"):
            table.add_column(heading, justify="right", no_wrap=True)
        for cells in tuple(self._rows):  # drawn by another thread, while `write` may append
            table.add_row(*cells)
        bar = ProgressBar(total=self._max_num_steps, completed=self._step, width=60)
        parts: list[RenderableType] = [table, bar]
        if self._note:
            parts.append(Text(f"{self._note} ({time.monotonic() - self._note_since_s:.0f} s)"))
        return Group(*parts)


def _number(row: Mapping[str, MetricValue], key: str, default: float | None) -> float | None:
    value = row.get(key, default)
    return default if isinstance(value, str) else value


def _format(value: float | None, spec: str, unit: str = "") -> str:
    if value is None:
        return "-"
    return f"{value:{spec}} {unit}".rstrip()
