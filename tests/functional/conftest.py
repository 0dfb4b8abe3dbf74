"""One group of Megatron workers and a few tiny Hugging Face models for all functional tests that need them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

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
