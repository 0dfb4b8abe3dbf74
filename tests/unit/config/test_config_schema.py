"""The schema documents every key, agrees with the parts that take its values, and with the YAML files."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from composed import changed, composed_values, experiment
from pydantic import BaseModel, ValidationError

from megatron_ppo.collector.collector import Collector
from megatron_ppo.config.algorithm_sections import (
    AdvantageSection,
    LossSection,
    ScheduleSection,
    ValueLossSection,
)
from megatron_ppo.config.base import Section
from megatron_ppo.config.compose import CONFIG_DIR, load
from megatron_ppo.config.messages import sections_of
from megatron_ppo.config.model_sections import OptimizerSection, SchedulerSection, TrainedModelSection
from megatron_ppo.config.recipe_sections import SmolLM2RecipeSection, WarmStartRecipeSection
from megatron_ppo.config.reference import generated_files
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.system_sections import InferenceSection
from megatron_ppo.config.targets import build
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.mcore.settings import (
    OptimizerSettings,
    OverlapSettings,
    SchedulerSettings,
    TrainingSettings,
)
from megatron_ppo.numerics.loss_settings import PolicyLossSettings, ValueLossSettings
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.recipe import RECIPES, SmolLM2Recipe, WarmStartRecipe

ROOT = CONFIG_DIR.parent
SMOKE = ["+experiment=cpu_smoke"]


def _sections(section: type[BaseModel] = RunConfig) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for nested in sections_of(field.annotation):
            yield from _sections(nested)


def test_every_key_is_described() -> None:
    undescribed = [
        f"{section.__name__}.{name}"
        for section in _sections()
        for name, field in section.model_fields.items()
        if not field.description or not field.description.endswith((".", "`"))
    ]
    assert undescribed == []
    assert [section.__name__ for section in _sections() if not section.__doc__] == []


def test_keys_with_a_unit_in_their_name_declare_it() -> None:
    units = {"_s": "s", "_bytes": "bytes", "_nats": "nats", "_tokens": "tokens", "_steps": "steps"}
    for section in _sections():
        for name, field in section.model_fields.items():
            for suffix, unit in units.items():
                if name.endswith(suffix) and name not in (
                    "steps",
                    "max_trajectory_age_steps",
                    "lr_warmup_steps",
                ):
                    extra = field.json_schema_extra
                    shown = extra.get("unit") if isinstance(extra, dict) else None
                    assert shown in (unit, "ticks"), f"{section.__name__}.{name}"


def test_default_files_and_documentation_are_up_to_date() -> None:
    stale = [
        name
        for name, text in generated_files(CONFIG_DIR).items()
        if not (ROOT / name).is_file() or (ROOT / name).read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: make docs"


def test_yaml_files_hold_every_key_so_that_every_key_can_be_overridden() -> None:
    composed = composed_values(*SMOKE)

    def missing(section: Section, values: object, above: str) -> list[str]:
        assert isinstance(values, dict)
        found = []
        for name, field in type(section).model_fields.items():
            key = field.alias or name
            value = getattr(section, name)
            if key not in values:
                found.append(f"{above}{key}")
            elif isinstance(value, Section):
                found += missing(value, values[key], f"{above}{key}.")
        return found

    assert missing(experiment("cpu_smoke"), composed, "") == []


@pytest.mark.parametrize(
    ("section", "record"),
    [
        (LossSection, PolicyLossSettings),
        (ValueLossSection, ValueLossSettings),
        (WarmStartRecipeSection, WarmStartRecipe),
        (SmolLM2RecipeSection, SmolLM2Recipe),
    ],
)
def test_section_has_the_fields_and_defaults_of_the_record_it_builds(section: type, record: type) -> None:
    values = section()
    built = build(values)
    assert isinstance(built, record)
    assert values.kwargs() == dataclasses.asdict(built)
    assert built == record()


def test_optimizer_and_scheduler_sections_have_the_fields_of_their_records() -> None:
    for section, record in ((OptimizerSection, OptimizerSettings), (SchedulerSection, SchedulerSettings)):
        own = set(section.model_fields)
        theirs = {field.name for field in dataclasses.fields(record)}
        assert own - theirs == set()


def test_advantage_section_has_the_arguments_and_defaults_of_its_estimator() -> None:
    arguments = inspect.signature(GAE).parameters
    for name, value in AdvantageSection().kwargs().items():
        assert name in arguments
        default = arguments[name].default
        assert default in (inspect.Parameter.empty, value), name


def test_collector_section_holds_arguments_of_the_collector() -> None:
    arguments = inspect.signature(Collector).parameters
    of_scoring = {"scorer_threads", "scoring_deadline_s"}  # `ScoringSettings`
    assert set(experiment("cpu_smoke").collector.kwargs()) - of_scoring <= set(arguments)


def test_inference_section_holds_arguments_of_the_engine() -> None:
    # Read as text: importing the module would load vLLM.
    tree = ast.parse((ROOT / "megatron_ppo/inference/engine.py").read_text(encoding="utf-8"))
    (cls,) = (node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "VllmEngine")
    (init,) = (node for node in cls.body if isinstance(node, ast.FunctionDef) and node.name == "__init__")
    keywords = set(experiment("cpu_smoke").inference.engine_kwargs(max_model_len=17))
    assert keywords <= {argument.arg for argument in init.args.kwonlyargs}


def test_sections_of_the_trained_models_hold_what_their_settings_ask_for() -> None:
    records = (TrainingSettings, OverlapSettings)
    asked = {field.name for record in records for field in dataclasses.fields(record)}
    made_by_the_app = {"train_batches", "score_batches", "overlap"}
    assert asked - made_by_the_app <= set(TrainedModelSection.model_fields)


def test_engine_arguments_pass_through_beside_the_kv_cache_format() -> None:
    section = InferenceSection(max_new_tokens=8, engine={"swap_space": 0})
    assert section.engine_kwargs(max_model_len=20)["extra_engine_args"] == {
        "swap_space": 0,
        "kv_cache_dtype": "auto",
    }


@pytest.mark.parametrize(("recipe", "file"), [("sort3_5", "sort3_5_tiny"), ("count_long", "count_long_tiny")])
def test_model_files_equal_the_named_recipes(recipe: str, file: str) -> None:
    config = load([*SMOKE, f"model@policy.model={file}"])
    assert config.policy.model.recipe is not None
    assert build(config.policy.model.recipe) == RECIPES[recipe]


def test_configuration_cannot_be_changed_after_validation() -> None:
    config = experiment("cpu_smoke")
    with pytest.raises(ValidationError, match="frozen"):
        config.run.seed = 7


def test_resolved_configuration_validates_to_itself() -> None:
    config = experiment("cpu_smoke")
    assert RunConfig.model_validate(config.resolved()) == config


def test_both_warmup_names_mean_the_same() -> None:
    old = ScheduleSection(policy_training_start_step=4, warmup_max_trajectory_age_steps=3)
    new = ScheduleSection(policy_training_start_step=4, warmup_generation_lead_steps=3)
    both = ScheduleSection(
        policy_training_start_step=4, warmup_generation_lead_steps=3, warmup_max_trajectory_age_steps=3
    )
    assert old == new == both
    assert old.warmup_generation_lead_steps == 3


def test_a_null_gate_in_an_overlay_removes_the_gate() -> None:
    with_gates = experiment("cpu_smoke")
    without = changed({"gates.same_version_probe": None})
    assert set(with_gates.gates) - set(without.gates) == {"same_version_probe"}


def test_numbers_are_not_made_out_of_other_types() -> None:
    for value in (True, "1", 1.0):
        with pytest.raises(ConfigError, match=r"algorithm\.ppo_epochs: got"):
            changed({"algorithm.ppo_epochs": value})


def test_documentation_lists_every_section(tmp_path: Path) -> None:
    text = generated_files(tmp_path)["docs/configuration.md"]
    for name in RunConfig.model_fields:
        assert f"## `{name}`" in text or f"`{name}." in text


def test_every_key_is_read_somewhere() -> None:
    # A key that nothing reads would be accepted and ignored. Sections handed over whole count as read, and so do
    # choices with a single option.
    sources = [
        *(ROOT / "megatron_ppo" / "app").glob("*.py"),
        *(ROOT / "megatron_ppo" / "config").glob("*.py"),
    ]
    text = "\n".join(source.read_text(encoding="utf-8") for source in sources if source.name != "convert.py")
    handed_over = {
        "advantage",
        "loss",
        "value_loss",
        "collector",
        "data",
        "gates",
        "chaos",
        "policy",
        "critic",
    }
    unread = []
    for name, field in RunConfig.model_fields.items():
        for section in sections_of(field.annotation) if name not in handed_over else ():
            for key, declaration in section.model_fields.items():
                if not re.search(rf'\b({name}|self)\.{key}\b|"{key}"', text):
                    unread += [f"{name}.{key}"] if len(get_args(declaration.annotation)) != 1 else []
    assert unread == []


def test_the_tasks_verifier_is_used_unless_another_is_named() -> None:
    own = changed({}).reward.spec(target="a.B", kwargs={"width": 5})
    assert own == {"_target_": "a.B", "width": 5}
    other = {"_target_": "megatron_ppo.rewards.chunk_match.ChunkMatch", "options": {"chunk_tokens": 2}}
    spec = changed({"reward": other}).reward.spec(target="a.B", kwargs={"width": 5})
    assert spec == {"_target_": "megatron_ppo.rewards.chunk_match.ChunkMatch", "chunk_tokens": 2}
    with pytest.raises(ConfigError, match=r"reward: options: got .*; must be empty while _target_ is null"):
        changed({"reward.options": {"chunk_tokens": 2}})
