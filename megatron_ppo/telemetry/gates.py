"""Owns the pass-or-fail conditions of a run: parsing, evaluation against metrics rows, and their table.

The entry point drives it at the end of a run, `scripts/check_gates.py` at any time later. Invariant: a gate
never passes for want of data: a missing metric, a missing step or a value that is not finite fails it, and
the result says so.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass

from rich.table import Table

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.metrics import MetricValue

STATS: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "median": statistics.median,
    "min": min,
    "max": max,
    "first": lambda values: values[0],
    "last": lambda values: values[-1],
}
OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistic:
    """One number out of the metrics rows.

    Attributes:
        metric: key in `metrics.jsonl`.   stat: key of STATS.
        steps: first and last completed step, inclusive; None is every row, row 0 included.
    """

    metric: str
    stat: str
    steps: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if self.stat not in STATS:
            raise ConfigError(f"stat must be one of {', '.join(STATS)}, got {self.stat!r}")
        if self.steps is not None and not 0 <= self.steps[0] <= self.steps[1]:
            raise ConfigError(f"steps must be [first, last] with 0 <= first <= last, got {list(self.steps)}")

    def __str__(self) -> str:
        window = "all" if self.steps is None else f"{self.steps[0]}-{self.steps[1]}"
        return f"{self.stat} {self.metric} [{window}]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """`observed op value`, where observed is one statistic, or the difference of two.

    Attributes:
        minus: subtracted from `of`; None subtracts nothing.   op: key of OPERATORS.
        reason: why the bound is what it is, for the reader of the table.
    """

    name: str
    of: Statistic
    minus: Statistic | None = None
    op: str
    value: float
    reason: str = ""

    def __post_init__(self) -> None:
        if self.op not in OPERATORS:
            raise ConfigError(f"op must be one of {' '.join(OPERATORS)}, got {self.op!r}")
        if not math.isfinite(self.value):
            raise ConfigError(f"value must be finite, got {self.value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GateResult:
    """Outcome of one gate.

    Attributes:
        observed: None when it could not be computed.   detail: why not; empty otherwise.
    """

    gate: Gate
    observed: float | None
    passed: bool
    detail: str = ""


class _NoValueError(Exception):
    """The statistic cannot be computed; the message says why."""


def parse_gates(section: object) -> tuple[Gate, ...]:
    """Gates of a configuration: a mapping of name to gate, where a null switches one off, or a list of gates.

    Raises: ConfigError naming the gate, the key, the value seen and the values allowed.
    """
    named: list[tuple[str, object]] = []
    if isinstance(section, Mapping):
        named = [(str(name), fields) for name, fields in section.items() if fields is not None]
    elif isinstance(section, Sequence) and not isinstance(section, str):
        for index, fields in enumerate(section):
            own_name = fields.get("name") if isinstance(fields, Mapping) else None
            named.append((str(own_name or index), fields))
    elif section is not None:
        raise ConfigError(f"gates must be a mapping or a list, got {section!r}")
    gates = []
    for name, fields in named:
        try:
            gates.append(_parse_gate(name, fields))
        except ConfigError as error:
            raise ConfigError(f"gates.{name}: {error}") from None
    return tuple(gates)


def evaluate(gates: Iterable[Gate], rows: Sequence[Mapping[str, MetricValue]]) -> list[GateResult]:
    """The result of every gate, in order.

    Args:
        rows: as `telemetry.sinks.read_rows` returns them, ordered by `step`.
    """
    return [_evaluate_one(gate, rows) for gate in gates]


def all_passed(results: Iterable[GateResult]) -> bool:
    """Whether no gate failed."""
    return all(result.passed for result in results)


def gate_table(results: Sequence[GateResult]) -> Table:
    """The results as a rich table, for a terminal."""
    passed = sum(result.passed for result in results)
    table = Table(title=f"Gates: {passed} of {len(results)} passed", title_justify="left")
    for heading in ("", "gate", "observed", "required", "statistic", "note"):
        table.add_column(heading, overflow="fold")
    for result in results:
        style = "green" if result.passed else "bold red"
        table.add_row(*_cells(result), style=style)
    return table


def format_gates(results: Sequence[GateResult]) -> str:
    """The results as plain text, one line per gate, never wrapped."""
    passed = sum(result.passed for result in results)
    cells = [("", "gate", "observed", "required", "statistic", "note"), *map(_cells, results)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(cells[0]))]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in cells
    ]
    return "\n".join([f"Gates: {passed} of {len(results)} passed", *lines])


def results_as_json(results: Iterable[GateResult]) -> list[dict[str, object]]:
    """The results as JSON values, the content of `gates.json`."""
    return [
        {
            **asdict(result.gate),
            "observed": result.observed,
            "passed": result.passed,
            "detail": result.detail,
        }
        for result in results
    ]


def _evaluate_one(gate: Gate, rows: Sequence[Mapping[str, MetricValue]]) -> GateResult:
    try:
        observed = _value_of(gate.of, rows)
        if gate.minus is not None:
            observed -= _value_of(gate.minus, rows)
    except _NoValueError as error:
        return GateResult(gate=gate, observed=None, passed=False, detail=str(error))
    return GateResult(gate=gate, observed=observed, passed=OPERATORS[gate.op](observed, gate.value))


def _value_of(statistic: Statistic, rows: Sequence[Mapping[str, MetricValue]]) -> float:
    metric, steps = statistic.metric, statistic.steps
    if steps is not None:
        rows = [row for row in rows if steps[0] <= int(row["step"]) <= steps[1]]
        missing = sorted(set(range(steps[0], steps[1] + 1)) - {int(row["step"]) for row in rows})
        # Row 0 exists only when the run validated before step 1.
        missing = [step for step in missing if step > 0]
        if missing:
            raise _NoValueError(f"no row of step {_ranges(missing)}")
    values: list[float] = []
    for row in rows:
        value = row.get(metric)
        if value is None:
            continue
        if isinstance(value, str) or not math.isfinite(value):
            raise _NoValueError(f"{metric} is {value} at step {row['step']}")
        values.append(value)
    if not values:
        where = "in any row" if steps is None else f"in steps {steps[0]}-{steps[1]}"
        raise _NoValueError(f"no {metric} {where}")
    return float(STATS[statistic.stat](values))


def _ranges(steps: Sequence[int]) -> str:
    """`[3, 4, 5, 9]` as `3-5, 9`."""
    runs: list[list[int]] = []
    for step in steps:
        if runs and step == runs[-1][1] + 1:
            runs[-1][1] = step
        else:
            runs.append([step, step])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _parse_gate(name: str, fields: object) -> Gate:
    values = _mapping(
        fields,
        required={"metric", "op", "value"},
        optional={"name", "stat", "steps", "minus", "reason"},
    )
    of = Statistic(
        metric=_text(values, "metric"),
        stat=_text(values, "stat", default="mean"),
        steps=_parse_steps(values.get("steps")),
    )
    minus: Statistic | None = None
    if values.get("minus") is not None:
        other = _mapping(values["minus"], required=set(), optional={"stat", "steps", "metric"})
        minus = Statistic(
            metric=_text(other, "metric", default=of.metric),
            stat=_text(other, "stat", default="mean"),
            steps=_parse_steps(other.get("steps")),
        )
    value = values["value"]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"value must be a number, got {value!r}")
    reason = _text(values, "reason", default="")
    return Gate(name=name, of=of, minus=minus, op=_text(values, "op"), value=float(value), reason=reason)


def _mapping(fields: object, *, required: set[str], optional: set[str]) -> Mapping[str, object]:
    if not isinstance(fields, Mapping):
        raise ConfigError(f"must be a mapping, got {fields!r}")
    absent = sorted(required - set(fields))
    if absent:
        raise ConfigError(f"missing {', '.join(absent)}")
    unknown = sorted(str(key) for key in fields if key not in required | optional)
    if unknown:
        raise ConfigError(
            f"unknown key {', '.join(unknown)}; allowed: {', '.join(sorted(required | optional))}"
        )
    return fields


def _text(fields: Mapping[str, object], key: str, *, default: str | None = None) -> str:
    value = fields.get(key)
    value = default if value is None else value
    if not isinstance(value, str):
        raise ConfigError(f"{key} must be text, got {value!r}")
    return value


def _parse_steps(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        first, last = value
        if type(first) is int and type(last) is int:
            return first, last
    raise ConfigError(f"steps must be [first, last] in completed steps, or null, got {value!r}")


def _cells(result: GateResult) -> tuple[str, str, str, str, str, str]:
    gate = result.gate
    formula = str(gate.of) if gate.minus is None else f"{gate.of} - {gate.minus}"
    observed = "none" if result.observed is None else f"{result.observed:.6g}"
    verdict = "pass" if result.passed else "FAIL"
    return verdict, gate.name, observed, f"{gate.op} {gate.value:g}", formula, result.detail or gate.reason
