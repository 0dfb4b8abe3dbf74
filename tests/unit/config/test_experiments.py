"""Every experiment composes, is valid, says only what differs, and resolves to its golden file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from composed import composed_values
from composed import experiment as composed
from omegaconf import OmegaConf

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import CONFIG_DIR, group_choices, load
from megatron_ppo.data.tasks import build_task
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.gates import parse_gates

EXPERIMENTS = group_choices("experiment")
ON_A_CLUSTER = {"qwen2.5_1.5b_gsm8k_2n8g": 8}
"""Experiment -> trainer ranks. Neither their models nor their data are here."""
ON_ONE_MACHINE = [name for name in EXPERIMENTS if name not in ON_A_CLUSTER]
GOLDEN = Path(__file__).parent / "golden"


def test_the_experiments_of_the_documentation_exist() -> None:
    assert set(EXPERIMENTS) >= {
        "cpu_smoke",
        "megatron_40step",
        "megatron_40step_banked",
        "megatron_40step_long",
        "megatron_40step_nowarmup",
        "qwen2.5_1.5b_gsm8k_2n8g",
        "smollm2_135m_chain_sum",
    }


@pytest.mark.parametrize("experiment", ON_ONE_MACHINE)
@pytest.mark.parametrize("world_size", [1, 2])
def test_experiment_is_valid_on_one_and_two_ranks(experiment: str, world_size: int) -> None:
    derived = derive(composed(experiment), world_size)
    assert derived.policy.world_size == derived.critic.world_size == world_size


@pytest.mark.parametrize(("experiment", "world_size"), ON_A_CLUSTER.items())
def test_experiment_of_a_cluster_is_valid_without_model_and_data(experiment: str, world_size: int) -> None:
    derived = derive(composed(experiment), world_size, folders_may_be_absent=True)
    assert derived.policy.world_size == derived.critic.world_size == world_size
    assert any("is not on this machine" in warning for warning in derived.warnings)
    with pytest.raises(ConfigError, match=r"policy\.model\.path: .* is not an existing folder"):
        derive(composed(experiment), world_size)


def test_the_reference_recipe_has_the_numbers_of_its_nightly_run() -> None:
    config = composed("qwen2.5_1.5b_gsm8k_2n8g")
    algorithm, loss = config.algorithm, config.loss
    assert (algorithm.num_prompts_per_step, algorithm.num_generations_per_prompt) == (1024, 1)
    assert (algorithm.ppo_epochs, algorithm.train_global_batch_size, config.run.max_num_steps) == (1, 256, 40)
    assert (config.advantage.gae_lambda_value, config.advantage.gae_lambda_policy) == (1.0, 1.0)
    assert (loss.ratio_clip_min, loss.ratio_clip_max, loss.ratio_clip_c) == (0.2, 0.2, 3.0)
    assert (config.value_loss.cliprange, config.critic.optimizer.lr) == (0.5, 1e-5)
    assert config.schedule.max_trajectory_age_steps == 1
    layouts = derive(config, 8, folders_may_be_absent=True)
    assert str(layouts.policy) == "tp=2 pp=1 cp=2 dp=2"
    assert config.policy.parallelism.sequence_parallel and config.critic.parallelism.sequence_parallel
    assert str(layouts.critic) == "tp=2 pp=1 cp=1 dp=4"
    bounds = {(gate.metric, gate.stat): (gate.op, gate.value) for gate in config.gates.values()}
    assert bounds[("train/token_mult_prob_error", "median")] == ("<", 1.1)
    assert bounds[("train/token_mult_prob_error", "last")] == ("<", 1.1)
    assert bounds[("train/max_seq_mult_prob_error", "median")] == ("<", 1.2)
    assert bounds[("train/reward", "last")] == (">", 0.75)
    assert bounds[("validation/accuracy", "last")] == (">", 0.65)
    assert bounds[("train/avg_trajectory_age", "max")] == ("<=", 1.0)


@pytest.mark.parametrize("experiment", ["megatron_40step", "smollm2_135m_chain_sum"])
def test_experiment_runs_for_one_step_in_debug_mode(experiment: str) -> None:
    config = load([f"+experiment={experiment}", "+debug=one_step"])
    derive(config, 1)
    assert config.run.max_num_steps == 1
    assert config.gates == {}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_equals_its_golden_file(experiment: str) -> None:
    resolved = composed(experiment).resolved()
    golden = yaml.safe_load((GOLDEN / f"{experiment}.yaml").read_text(encoding="utf-8"))
    assert resolved == golden, "intended? then run tests/unit/config/write_golden.py"


def test_there_is_no_golden_file_without_experiment() -> None:
    assert sorted(file.stem for file in GOLDEN.glob("*.yaml")) == EXPERIMENTS


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_holds_no_key_that_equals_the_default(experiment: str) -> None:
    own, overrides = _own_keys_and_group_choices(experiment)
    base = composed_values(*overrides)
    redundant = [key for key, value in _leaves(own) if _at(base, key) == value and _has(base, key)]
    removed_twice = [
        key for key, value in _leaves(own) if key[0] == "gates" and value is None and not _has(base, key)
    ]
    assert redundant == []
    assert removed_twice == []


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_experiment_starts_with_command_hardware_and_expectation(experiment: str) -> None:
    text = (CONFIG_DIR / "experiment" / f"{experiment}.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n# Command: torchrun ")
    assert f"+experiment={experiment}" in text.split("defaults:")[0]
    for word in ("# Hardware: ", "# Expected: "):
        assert word in text.split("defaults:")[0]


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_gates_of_an_experiment_can_be_evaluated(experiment: str) -> None:
    config = composed(experiment)
    gates = parse_gates(config.resolved()["gates"])
    assert [gate.name for gate in gates] == list(config.gates)
    assert gates, "an experiment without gates proves nothing"
    for gate in gates:
        for statistic in (gate.of, gate.minus):
            if statistic is not None and statistic.steps is not None:
                assert statistic.steps[1] <= config.run.max_num_steps
        assert gate.reason


@pytest.mark.parametrize("task", ["sort3_5", "count_long"])
def test_declared_prompt_length_holds_for_every_prompt(task: str) -> None:
    config = composed({"sort3_5": "megatron_40step", "count_long": "megatron_40step_long"}[task])
    spec = build_task(**config.data.kwargs())
    assert spec.max_prompt_tokens <= config.data.max_prompt_tokens


@pytest.mark.parametrize("experiment", [name for name in ON_ONE_MACHINE if name != "smollm2_135m_chain_sum"])
def test_responses_and_validation_fit_the_task_of_the_experiment(experiment: str) -> None:
    config = composed(experiment)
    spec = build_task(**config.data.kwargs())
    assert spec.max_response_tokens <= config.inference.max_new_tokens
    assert len(spec.validation) >= config.validation.max_samples


def _own_keys_and_group_choices(experiment: str) -> tuple[dict[str, Any], list[str]]:
    file = CONFIG_DIR / "experiment" / f"{experiment}.yaml"
    own = OmegaConf.to_container(OmegaConf.load(file))
    assert isinstance(own, dict)
    overrides = []
    for entry in own.pop("defaults", []):
        if isinstance(entry, dict):
            ((group, choice),) = entry.items()
            overrides.append(f"{group.removeprefix('override /')}={choice}")
        elif entry != "_self_":
            overrides.append(f"+experiment={entry}")
    return own, overrides


def _leaves(values: dict[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*above, key))
        else:
            yield (*above, key), value


def _at(values: Any, key: tuple[str, ...]) -> Any:
    for part in key:
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _has(values: Any, key: tuple[str, ...]) -> bool:
    for part in key:
        if not isinstance(values, dict) or part not in values:
            return False
        values = values[part]
    return True
