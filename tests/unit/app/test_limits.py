"""The other ranks outwait everything that rank 0 may do alone."""

from __future__ import annotations

import inspect
import re

import pytest

import megatron_ppo.loop.async_ppo as loop
from megatron_ppo.app.limits import GENERATION_TIMEOUT_S, MEETING_S, control_timeout_s, stage_deadlines
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


def test_every_stage_of_the_loop_has_a_deadline_of_its_own_which_the_configuration_moves() -> None:
    stages = set(re.findall(r'timed\("([^"]+)"\)', inspect.getsource(loop)))
    assert "policy_training" in stages
    deadlines = stage_deadlines(
        changed({"watchdog.training_s": 11.0, "watchdog.refit_s": 500.0, "cluster.groups_timeout_s": 50.0}),
        rank=0,
    )
    assert stages <= deadlines.of.keys()
    assert deadlines.limit("policy_training") == (11.0, "watchdog.training_s")
    assert deadlines.limit("weight_sync") == (500.0, "watchdog.refit_s")
    assert deadlines.limit("exposed_generation")[0] > 50.0
    assert deadlines.limit("between stages") == (1800.0, "watchdog.other_s")


def test_the_watchdog_comes_after_the_limits_of_the_start() -> None:
    for key in ("cluster.prepare_timeout_s", "inference.start_timeout_s", "refit.timeout_s"):
        config = changed({key: 1500.0})
        assert stage_deadlines(config, rank=0).limit("starting")[0] > max(1500.0, control_timeout_s(config))


def test_rank_zero_alone_has_a_limit_for_the_others_and_only_where_they_wait_for_it() -> None:
    config = changed({})
    deadlines = stage_deadlines(config, rank=0)
    assert set(deadlines.meetings) == {"exposed_generation"}
    assert deadlines.meetings["exposed_generation"][0] == MEETING_S <= 120.0
    assert deadlines.limit("exposed_generation")[0] > 10 * MEETING_S
    # The others wait for rank 0 for as long as it polls, and more.
    assert stage_deadlines(config, rank=1).meetings == {}
    assert stage_deadlines(config, rank=1).of == deadlines.of
