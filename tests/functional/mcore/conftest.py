"""One group of Megatron workers and a few tiny Hugging Face models for all tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.functional.worker_group import WorkerGroup, worker_group


@pytest.fixture(scope="session")
def workers() -> Iterator[WorkerGroup]:
    """Up to four ranks; each starts when a test first needs it."""
    with worker_group() as group:
        yield group


@pytest.fixture(scope="session")
def tiny_model(workers: WorkerGroup, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a random model of one kind (see `jobs.MODEL_KINDS`), made once per kind."""
    made: dict[str, Path] = {}

    def folder_of(kind: str) -> Path:
        if kind not in made:
            folder = tmp_path_factory.mktemp(kind)
            workers.run_alone("tests.functional.mcore.jobs:make_model", folder=str(folder), kind=kind)
            made[kind] = folder
        return made[kind]

    return folder_of


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
