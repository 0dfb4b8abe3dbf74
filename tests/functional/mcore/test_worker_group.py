"""The shared workers run jobs of one, two and four ranks in any order."""

from __future__ import annotations

import os
import signal

import pytest

from tests.functional.worker_group import WorkerError, WorkerGroup, worker_group

pytestmark = pytest.mark.megatron

JOB = "tests.functional.mcore.jobs:rank_and_size"


def test_jobs_of_all_sizes_follow_one_another_on_the_same_workers(workers: WorkerGroup) -> None:
    for size in (2, 1, 4, 2, 4, 1):
        results = [workers.run_alone(JOB)] if size == 1 else workers.run(JOB, world_size=size)
        assert results == [(rank, size, sum(range(size))) for rank in range(size)]


def test_a_worker_that_dies_costs_one_job() -> None:
    with worker_group() as group:
        group.run(JOB)
        os.kill(group.process_ids[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 died with exit code -9"):
            group.run(JOB)
        assert group.run(JOB) == [(rank, 2, 1) for rank in range(2)]
