"""The other ranks outwait everything that rank 0 may do alone."""

from __future__ import annotations

import pytest

from megatron_ppo.app.limits import GENERATION_TIMEOUT_S, control_timeout_s
from tests.unit.config.composed import changed


@pytest.mark.parametrize(
    ("key", "least"),
    [
        ("cluster.process_group_timeout_s", 5000.0),
        ("cluster.prepare_timeout_s", 10000.0),
        ("inference.start_timeout_s", 5000.0),
        ("refit.timeout_s", 10000.0),
    ],
)
def test_a_limit_of_rank_zero_raises_that_of_the_ranks_that_wait_for_it(key: str, least: float) -> None:
    assert control_timeout_s(changed({key: 5000.0})) > least


def test_a_publication_that_first_waits_for_an_engine_is_outwaited() -> None:
    config = changed({"inference.start_timeout_s": 5000.0, "refit.timeout_s": 1000.0})
    assert control_timeout_s(config) > 5000.0 + 2 * 1000.0


def test_a_short_collective_limit_does_not_cut_a_validation_off() -> None:
    assert control_timeout_s(changed({"cluster.process_group_timeout_s": 5.0})) > GENERATION_TIMEOUT_S
