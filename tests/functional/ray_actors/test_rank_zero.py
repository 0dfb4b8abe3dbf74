"""`RankZero` over two ranks: both see the result or the failure, and stay in step afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_ppo.testing.fakes import make_group
from tests.functional.worker_group import WorkerGroup, worker_group

pytestmark = [pytest.mark.ray]

JOBS = "tests.functional.ray_actors.rank_zero_jobs"


@pytest.fixture(scope="module")
def pair() -> Iterator[WorkerGroup]:
    with worker_group() as running:
        yield running


def test_every_rank_gets_the_result_or_the_failure_of_rank_zero(pair: WorkerGroup) -> None:
    zero, one = pair.run(f"{JOBS}:outcomes")
    for seen in (zero, one):
        assert seen["before"] == {"step": 4}
        assert seen["group"] == make_group(ordinal=7, target_step=2)
        assert seen["nothing"] is None
        assert seen["after"] == [1, 2]
    assert zero["calls"] == ["{'step': 4}", "None", "[1, 2]"]
    assert one["calls"] == []
    # Rank 0 waits for the other one only when it has something to say. The group and the failure are no counted calls.
    assert zero["meetings"][::2] == [f"begun after {calls} calls" for calls in (1, 1, 2, 2, 3)]
    assert one["meetings"][::2] == ["begun after 0 calls"] * 5
    assert zero["meetings"][1::2] == one["meetings"][1::2] == ["over"] * 5
    assert zero["raised"] == "NonFiniteError: the reward is NaN"
    assert one["raised"] == (
        "RankZeroFailedError: rank 0 failed during validation after step 5: NonFiniteError: the reward is NaN"
    )


def test_a_result_that_cannot_be_pickled_is_an_error_on_every_rank(pair: WorkerGroup) -> None:
    zero, one = pair.run(f"{JOBS}:result_that_cannot_be_sent")
    cause = "TypeError: the result of the start of the actors is a function that cannot be sent to the other ranks: "
    assert zero[0].startswith(cause)
    assert one[0].startswith(f"RankZeroFailedError: rank 0 failed during the start of the actors: {cause}")
    assert zero[1] == one[1] == "passed"


def test_a_dead_collector_is_raised_by_the_take_of_every_rank(pair: WorkerGroup) -> None:
    zero, one = pair.run(f"{JOBS}:take_without_actors")
    cause = "the collector died: EngineDeadError: killed"
    assert zero == [cause]
    assert one == [f"rank 0 failed during take of step 3: PartDiedError: {cause}"]
