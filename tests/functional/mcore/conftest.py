"""What the layouts of this folder are compared with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.functional.worker_group import WorkerGroup


@pytest.fixture(scope="session")
def one_process(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> Callable[[str, str], dict[str, Any]]:
    """What every layout must equal: the training in one process, computed once per head and kind of model."""
    known: dict[tuple[str, str], dict[str, Any]] = {}

    def result(kind: str, model: str) -> dict[str, Any]:
        if (kind, model) not in known:
            known[kind, model] = workers.run_alone(
                "tests.functional.mcore.jobs:train", kind=kind, folder=str(tiny_model(model)), layout={}
            )
        return known[kind, model]

    return result
