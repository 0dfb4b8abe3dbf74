"""Sees from outside when a run comes to the point at which it is to be killed: by its heartbeats and its folder.

Nothing in the run knows of it. The heartbeat of trainer rank 0 shows each change of stage within milliseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kill_plan import STAGE_BEFORE, STAGES, WARM_UP, Kill, Moment, Phase

DEFAULT_STAGE_S = 0.1
"""Guess for a stage that no row has told of."""


@dataclass(frozen=True, slots=True)
class Point:
    """Where the trainer is: stage, and the number of completed steps once its step is done (the row)."""

    stage: str
    row: int | None


@dataclass(slots=True)
class StageWatch:
    """Follows the heartbeat of trainer rank 0 of the life that began at `since_unix_s`."""

    path: Path
    since_unix_s: float
    point: Point = field(default=Point("not started", None))
    _mtime_ns: int = 0

    def look(self) -> Point:
        """Where the trainer is now; costs a stat while nothing has changed."""
        try:
            mtime_ns = os.stat(self.path).st_mtime_ns
            if mtime_ns != self._mtime_ns:
                beat = json.loads(self.path.read_text(encoding="utf-8"))
                if beat["beat_unix_s"] >= self.since_unix_s:
                    self.point = Point(str(beat["detail"]["stage"]), beat["detail"]["step"])
                self._mtime_ns = mtime_ns
        except FileNotFoundError:
            pass
        return self.point


class Trigger:
    """Whether the run has come to the point of a kill. Asked again and again with what is seen.

    Args:
        epochs: rows in which an epoch ends.   checkpoints: `<run dir>/checkpoints`.
    """

    def __init__(self, kill: Kill, *, epochs: frozenset[int], checkpoints: Path) -> None:
        self._kill = kill
        self._epochs = epochs
        self._checkpoints = checkpoints
        self._entered = False

    def delay_s(self, rows: Sequence[Mapping[str, object]]) -> float:
        """How long to wait after it has fired: a part of the stage, as long as that took in the steps before."""
        kill = self._kill
        if kill.phase is Phase.HALF_SAVE:
            return 0.0
        stage = STAGES.get(kill.phase, "exposed_generation")
        match kill.moment:
            case Moment.BEFORE if kill.phase in STAGES:
                # Near the end of what comes before.
                return (0.6 + 0.4 * kill.share) * stage_seconds(rows, STAGE_BEFORE[stage])
            case Moment.AFTER:
                return 0.0
            case _:
                return kill.share * stage_seconds(rows, stage)

    def fires(self, point: Point) -> bool:
        """Whether to kill now, after the seeded delay."""
        kill, row = self._kill, point.row
        if row is None or row < 1:
            return False
        if kill.phase is Phase.HALF_SAVE:
            return row > WARM_UP and self._is_half_written()
        if kill.phase is Phase.WARM_UP:
            return self._in_warm_up(point, row)
        if kill.phase is Phase.EPOCH:
            return self._around(kill.moment, row, point) and point.stage == "exposed_generation"
        return row > WARM_UP and self._in_stage(point, STAGES[kill.phase])

    def _in_warm_up(self, point: Point, row: int) -> bool:
        if self._kill.moment is Moment.AFTER:
            return row > WARM_UP
        stage = "exposed_generation" if self._kill.moment is Moment.BEFORE else "value_training"
        return row <= WARM_UP and point.stage == stage

    def _around(self, moment: Moment, row: int, point: Point) -> bool:
        """Whether the row is the one before, of, or after an epoch's end."""
        shift = {Moment.BEFORE: 1, Moment.DURING: 0, Moment.AFTER: -1}[moment]
        return row + shift in self._epochs and row > 1

    def _in_stage(self, point: Point, stage: str) -> bool:
        moment = self._kill.moment
        if moment is Moment.DURING:
            return point.stage == stage
        if moment is Moment.BEFORE:
            return point.stage == STAGE_BEFORE[stage]
        if point.stage == stage:
            self._entered = True
            return False
        return self._entered

    def _is_half_written(self) -> bool:
        """Some file of the models is there, and the list of files that completes a checkpoint is not."""
        for folder in self._checkpoints.glob("tmp_step_*"):
            if not (folder / "files.json").exists() and any(
                p.is_file() for p in (folder / "models").rglob("*")
            ):
                return True
        return False


def stage_seconds(rows: Sequence[Mapping[str, object]], stage: str) -> float:
    """How long a stage took in the newest row that has it."""
    for row in reversed(rows):
        value = row.get(f"timing/train/{stage}")
        if isinstance(value, float | int):
            return float(value)
    return DEFAULT_STAGE_S
