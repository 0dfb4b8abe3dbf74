"""One Ray cluster for all tests of this folder; it ends before those of whole runs begin."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="package")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder of its logs."""
    from megatron_ppo.ray_actors.cluster import start_local_cluster

    logs = tmp_path_factory.mktemp("logs")
    # Ray starts as many processes at a time as it believes to have CPUs; a test starts up to three actors.
    with start_local_cluster(log_dir=logs, env={"OMP_NUM_THREADS": "1"}, num_cpus=3):
        yield logs
