"""Jobs of this folder run in real processes; each launch is ended, whatever its test does."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from launcher import TORCHRUN, Launched


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    """launch(*words, nproc=1, base="run", max_restarts=0, program=TORCHRUN): starts a job in the test's own folder."""
    launched: list[Launched] = []

    def start(
        *words: str,
        nproc: int = 1,
        base: str = "run",
        max_restarts: int = 0,
        program: Sequence[str] = TORCHRUN,
    ) -> Launched:
        launched.append(
            Launched(tmp_path / base, words, nproc=nproc, max_restarts=max_restarts, program=program)
        )
        return launched[-1]

    yield start
    for job in launched:
        if job.process.poll() is None:
            job.kill()
