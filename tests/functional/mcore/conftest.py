"""What the layouts of this folder are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional.worker_group import WorkerGroup


@pytest.fixture(scope="session")
def one_process(workers: WorkerGroup, tiny_model: Callable[[str], Path]) -> Callable[..., dict[str, Any]]:
    """What every layout must equal: the training in one process, computed once per head, kind of model and format."""
    known: dict[tuple[str, str, str], dict[str, Any]] = {}

    def result(kind: str, model: str, precision: str = "fp32") -> dict[str, Any]:
        if (kind, model, precision) not in known:
            known[kind, model, precision] = workers.run_alone(
                "tests.functional.mcore.jobs:train",
                kind=kind,
                folder=str(tiny_model(model)),
                layout={},
                precision=precision,
            )
        return known[kind, model, precision]

    return result
