"""A run that could not survive its own faults, or would not have any, is refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest
from composed import changed, experiment

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import load
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.faults import FaultKind


def refusal(changes: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        derive(changed(changes), 1)
    return str(caught.value)


REFUSED: list[tuple[dict[str, Any], list[str]]] = [
    ({"chaos.kill_engine": 1.5}, ["chaos.kill_engine", "got 1.5", "less than or equal to 1"]),
    ({"chaos.fail_generation": -0.1}, ["chaos.fail_generation", "got -0.1", "greater than or equal to 0"]),
    ({"chaos.delay_refit_s": -1.0}, ["chaos.delay_refit_s", "got -1.0", "greater than or equal to 0"]),
    ({"chaos.hang_rewards": 0.1}, ["chaos.hang_rewards", "unknown key", "did you mean chaos.hang_reward?"]),
    ({"chaos.kill_collector": 0.1}, ["chaos.kill_collector", "unknown key"]),
    (
        {"chaos.kill_engine": 1.0, "inference.max_engine_restarts": 0},
        ["chaos.kill_engine", "must be 0", "inference.max_engine_restarts=0"],
    ),
    (
        {"chaos.kill_engine": 1.0, "inference.max_engine_restarts": 1, "run.max_num_steps": 4},
        ["chaos.kill_engine", "strikes 4 steps", "only 1 deaths"],
    ),
    (
        {"chaos.kill_engine": 1e-9, "run.max_num_steps": 4},
        ["chaos.kill_engine", "chaos.seed=0", "none of 4 steps", "another seed"],
    ),
    ({"chaos.fail_refit": 1e-9}, ["chaos.fail_refit", "none of", "publications", "another seed"]),
    (
        {"chaos.fail_refit": 1.0, "refit.max_retries": 3},
        ["chaos.fail_refit", "version 0 fails 4 times in a row", "refit.max_retries allows 3"],
    ),
    (
        {"chaos.hang_reward": 0.1, "reward.isolation": "thread"},
        ["chaos.hang_reward", "must be 0", "reward.isolation=thread"],
    ),
    (
        {"chaos.raise_reward": 0.1, "collector.max_retries": 0},
        ["chaos.raise_reward", "collector.max_retries=0", "schedule.max_generation_failures=0"],
    ),
    (
        {"chaos.raise_reward": 0.1, "run.deterministic": True},
        ["run.deterministic", "must be false with chaos.raise_reward"],
    ),
    (
        {"chaos.delay_refit_s": 120.0, "refit.timeout_s": 120.0},
        ["chaos.delay_refit_s", "got 120.0", "less than refit.timeout_s=120.0"],
    ),
]


@pytest.mark.parametrize(("changes", "fragments"), REFUSED, ids=[str(changes) for changes, _ in REFUSED])
def test_what_could_not_be_survived_or_would_not_happen_is_refused(
    changes: dict[str, Any], fragments: list[str]
) -> None:
    message = refusal(changes)
    assert [fragment for fragment in fragments if fragment not in message] == []


def test_faults_are_off_unless_they_are_asked_for() -> None:
    assert experiment("megatron_40step").chaos.plan().kinds == ()


def test_the_chaos_experiment_has_every_kind_and_can_be_run_without_faults() -> None:
    assert experiment("chaos_40step").chaos.plan().kinds == tuple(FaultKind)
    without = load(["+experiment=chaos_40step", "chaos=disabled"])
    assert without.chaos.plan().kinds == ()
    assert without.gates == experiment("megatron_40step").gates, "the same learning gates"
