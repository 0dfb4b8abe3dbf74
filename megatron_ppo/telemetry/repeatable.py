"""Which metrics a deterministic run repeats bit for bit: all but those that this module names, each with its reason.

The one definition for tests, tools and documentation. A metric that is new is repeatable until it is named here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ppo.telemetry.metrics import MetricValue, Row

NOT_REPEATED: Mapping[str, str] = {
    "time_unix_s": "the time of day",
    "bottleneck": "decided by a share of the step's time",
    "timing/": "durations and rates",
    "clock/": "the time of day",
    "efficiency/": "shares of the step's time",
    "engines/": "which engines live, and how many have died: faults that the run survived",
    "refit/failed_attempts": "faults that the run survived",
    "checkpoint/failed_saves": "faults that the run survived",
    "collector/": "counted since the collector's process started, so smaller after a resume",
}
"""Key, or prefix that ends in `/` -> why it differs. Besides these: names of seconds and of anything per second, one
part of whose path ends in `_s`.
"""


def is_repeatable(key: str) -> bool:
    """Whether the metric is a function of the configuration and the step."""
    named = any(key.startswith(name) if name.endswith("/") else key == name for name in NOT_REPEATED)
    return not named and not any(part.endswith("_s") for part in key.split("/"))


def repeatable(row: Mapping[str, MetricValue]) -> Row:
    """The part of a row that is the same in every run."""
    return {key: value for key, value in row.items() if is_repeatable(key)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """Two rows do not agree. None: the row of that run lacks the metric."""

    step: int
    metric: str
    first: MetricValue | None
    second: MetricValue | None

    def __str__(self) -> str:
        return f"step {self.step}: {self.metric} is {self.first!r} and {self.second!r}"


def differences(first: Sequence[Row], second: Sequence[Row]) -> list[Difference]:
    """Every repeatable metric in which two runs differ, in the order of the steps; NaN equals NaN.

    Raises: ValueError when a run has two rows of one step.
    """
    mine, yours = _by_step(first), _by_step(second)
    found = []
    for step in sorted({*mine, *yours}):
        left, right = mine.get(step, {}), yours.get(step, {})
        found += [
            Difference(step=step, metric=key, first=left.get(key), second=right.get(key))
            for key in dict.fromkeys((*left, *right))
            if not _equal(left.get(key), right.get(key))
        ]
    return found


def _by_step(rows: Sequence[Row]) -> dict[int, Row]:
    by_step: dict[int, Row] = {}
    for row in rows:
        step = int(row["step"])
        if step in by_step:
            raise ValueError(f"two rows of step {step}")
        by_step[step] = repeatable(row)
    return by_step


def _equal(left: MetricValue | None, right: MetricValue | None) -> bool:
    # As text, which is exact for a float, and tells -0.0 from 0.0 and not one NaN from another.
    return repr(left) == repr(right)
