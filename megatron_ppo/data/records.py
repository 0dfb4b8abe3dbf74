"""Rows of a data set on disk: JSON lines, Parquet, or a folder that the `datasets` package wrote.

Driven by the tasks that have a data set. Invariant: rows come in the order of the file, so that a row's index is the
same in every process.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_ppo.protocol.errors import ConfigError

FORMATS = ".jsonl, .jsonl.gz, .parquet, or a folder with .arrow or .parquet files"


def text_rows(path: str | Path, columns: tuple[str, ...], *, key: str) -> Iterator[tuple[str, ...]]:
    """The text in `columns` of every row.

    Args:
        key: dotted configuration key of `path`, for messages.
    Raises: ConfigError for a missing or unreadable file, or a row without one of the columns.
    """
    file = Path(path)
    for number, row in enumerate(_rows(file, key), start=1):
        values = tuple(row.get(column) if isinstance(row, dict) else None for column in columns)
        for column, value in zip(columns, values, strict=True):
            if not isinstance(value, str):
                seen = sorted(row) if isinstance(row, dict) else type(row).__name__
                raise ConfigError(
                    f"{key}: row {number} of {file} has no text in column {column!r}, it has {seen}"
                )
        yield tuple(str(value) for value in values)


def _rows(file: Path, key: str) -> Iterator[Any]:
    if not file.exists():
        raise ConfigError(f"{key}: got {str(file)!r}, which does not exist")
    if file.is_dir():
        parts = sorted([*file.glob("*.arrow"), *file.glob("*.parquet")])
        if not parts:
            raise ConfigError(f"{key}: {str(file)!r} holds no data; allowed: {FORMATS}")
        for part in parts:
            yield from _rows(part, key)
    elif file.name.endswith((".jsonl", ".jsonl.gz")):
        yield from _json_lines(file, key)
    elif file.suffix in (".parquet", ".arrow"):
        yield from _tables(file, key)
    else:
        raise ConfigError(f"{key}: got {str(file)!r}; allowed: {FORMATS}")


def _json_lines(file: Path, key: str) -> Iterator[Any]:
    opened = gzip.open if file.suffix == ".gz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)
            except ValueError as error:
                raise ConfigError(f"{key}: line {number} of {file} is not JSON: {error}") from error


def _tables(file: Path, key: str) -> Iterator[Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{key}: {file} needs the package pyarrow (pip install pyarrow); JSON lines need no package"
        ) from error
    try:
        if file.suffix == ".parquet":
            table = pyarrow.parquet.read_table(file)
        else:
            with pyarrow.OSFile(str(file), "rb") as source:
                table = pyarrow.ipc.open_stream(source).read_all()
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key}: {file} cannot be read: {error}") from error
    yield from table.to_pylist()
