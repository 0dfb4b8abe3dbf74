"""Records what is flushed to disk and what is renamed, in order: what a loss of power would leave.

Unit tests run without fsync (`conftest`), so nothing else notices a flush that is missing or comes too late.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """A file or folder that was flushed, and what it held then: bytes, or the names in it."""

    path: Path
    held: bytes | frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Renamed:
    """A file or folder that got another name."""

    old: Path
    new: Path


def what_is_in(path: Path) -> bytes | frozenset[str]:
    """As `Flushed.held` has it."""
    return frozenset(child.name for child in path.iterdir()) if path.is_dir() else path.read_bytes()


def record_disk_events(monkeypatch: pytest.MonkeyPatch) -> list[Flushed | Renamed]:
    """The events from here on, in order; the list grows."""
    events: list[Flushed | Renamed] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        events.append(Flushed(path=path, held=what_is_in(path)))

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        real = getattr(os, name)

        def renaming(old: Any, new: Any, real: Any = real) -> None:
            real(old, new)
            events.append(Renamed(old=Path(old), new=Path(new)))

        monkeypatch.setattr(os, name, renaming)
    return events
