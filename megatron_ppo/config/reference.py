"""The reference of all keys: default YAML files with a comment at every key, and docs/configuration.md.

Pure text out of the schema; `scripts/make_config_docs.py` writes the files, a unit test compares them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

import yaml  # type: ignore[import-untyped]
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from megatron_ppo.config.algorithm_sections import (
    AdvantageSection,
    AlgorithmSection,
    LossSection,
    ScheduleSection,
    ValueLossSection,
)
from megatron_ppo.config.messages import field_keys, sections_of
from megatron_ppo.config.model_sections import (
    CriticSection,
    ModelShapeSection,
    ModelSource,
    OptimizerSection,
    ParallelismSection,
    PolicySection,
    SchedulerSection,
)
from megatron_ppo.config.recipe_sections import SmolLM2RecipeSection, WarmStartRecipeSection
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.system_sections import (
    ChaosSection,
    CheckpointSection,
    ClusterSection,
    CollectorSection,
    InferenceSection,
    RefitSection,
    RunSection,
    TelemetrySection,
    WatchdogSection,
)
from megatron_ppo.config.task_sections import (
    ChainSumTaskSection,
    CountTaskSection,
    GateReference,
    GateSection,
    Gsm8kTaskSection,
    RewardSection,
    SortTaskSection,
    ValidationSection,
)

# Group file -> section. Nested sections have groups of their own and are left out of their parent's file.
GROUP_FILES: dict[str, type[BaseModel]] = {
    "run/default": RunSection,
    "schedule/one_step": ScheduleSection,
    "algorithm/ppo": AlgorithmSection,
    "advantage/gae": AdvantageSection,
    "loss/clipped": LossSection,
    "value_loss/squared": ValueLossSection,
    "policy/megatron": PolicySection,
    "critic/megatron": CriticSection,
    "model/same_as_policy": ModelSource,
    "parallelism/auto": ParallelismSection,
    "optimizer/adamw": OptimizerSection,
    "scheduler/constant": SchedulerSection,
    "inference/vllm": InferenceSection,
    "refit/broadcast": RefitSection,
    "collector/default": CollectorSection,
    "data/sort3_5": SortTaskSection,
    "data/count_long": CountTaskSection,
    "data/chain_sum": ChainSumTaskSection,
    "data/gsm8k": Gsm8kTaskSection,
    "reward/of_the_task": RewardSection,
    "validation/greedy": ValidationSection,
    "checkpoint/default": CheckpointSection,
    "telemetry/default": TelemetrySection,
    "cluster/local": ClusterSection,
    "watchdog/default": WatchdogSection,
    "chaos/disabled": ChaosSection,
}
RECIPE_FILES: dict[str, tuple[type[BaseModel], dict[str, object]]] = {
    "model/sort3_5_tiny": (WarmStartRecipeSection, {"task": "sort3_5"}),
    "model/count_long_tiny": (WarmStartRecipeSection, {"task": "count_long", "sft_batch_size": 32}),
    "model/smollm2_135m": (SmolLM2RecipeSection, {}),
}
_DOCUMENTED: tuple[tuple[str, type[BaseModel]], ...] = (
    ("policy.model", ModelSource),
    ("policy.model.expected", ModelShapeSection),
    ("policy.model.recipe", WarmStartRecipeSection),
    ("policy.model.recipe", SmolLM2RecipeSection),
    ("gates.<name>", GateSection),
    ("gates.<name>.minus", GateReference),
)
# Sections that policy and critic have in common.
_OF_EACH_MODEL = (
    "parallelism",
    "optimizer",
    "scheduler",
    "recompute",
    "dynamic_batching",
    "sequence_packing",
)
_NOTICE = "# Written by `make docs` from megatron_ppo/config: change the schema, not this file.\n"
_WIDTH = 108


def generated_files(conf: Path) -> dict[str, str]:
    """Path below the repository -> content of every generated file.

    Args:
        conf: the folder whose experiments the documentation lists.
    """
    files = {f"conf/{name}.yaml": group_yaml(section) for name, section in GROUP_FILES.items()}
    for name, (section, values) in RECIPE_FILES.items():
        body = textwrap.indent(_yaml_body(section, values), "  ")
        files[f"conf/{name}.yaml"] = (
            f"{_NOTICE}{_comment(section.__doc__)}path: null\nexpected: null\nrecipe:\n{body}"
        )
    files["docs/configuration.md"] = documentation(conf)
    return files


def group_yaml(section: type[BaseModel]) -> str:
    """A group's default file: every key with its purpose and default; `???` where there is none."""
    return f"{_NOTICE}{_comment(section.__doc__)}{_yaml_body(section, {})}"


def _yaml_body(section: type[BaseModel], values: dict[str, object]) -> str:
    lines = []
    for name, field in field_keys(section):
        if name in ("parallelism", "optimizer", "scheduler", "model"):
            continue
        value = values.get(name, _default(field, name, section))
        unit = _unit(field)
        lines.append(_comment(f"{field.description}{f' [{unit}]' if unit else ''}"))
        if isinstance(value, BaseModel):
            # A part without a group of its own.
            lines.append(f"{name}:\n{textwrap.indent(_yaml_body(type(value), {}), '  ')}")
        else:
            lines.append(yaml.safe_dump({name: value}, width=10_000, allow_unicode=True))
    return "".join(lines)


def _default(field: FieldInfo, name: str, section: type[BaseModel]) -> object:
    value = field.get_default(call_default_factory=True, validated_data={})
    if value is not PydanticUndefined:
        return value
    if name == "task" and get_origin(field.annotation) is Literal:
        return get_args(field.annotation)[0]
    return "???"


def _comment(text: str | None) -> str:
    lines = textwrap.wrap(" ".join((text or "").split()), _WIDTH - 2)
    return "".join(f"# {line}\n" for line in lines)


def documentation(conf: Path) -> str:
    """docs/configuration.md."""
    parts = [
        "# Configuration\n",
        "Written by `make docs` from `megatron_ppo/config`.\n",
        "Hydra composes `conf/config.yaml`, the groups that it lists and one `+experiment=…`; overrides such "
        "as `run.seed=1` come last. The schema checks names, types and bounds, `derive` the rules between "
        "sections, before anything is started. `python scripts/check_config.py +experiment=…` does just that "
        "and prints what follows from the configuration.\n",
        "## Experiments\n",
        *_experiments(conf),
    ]
    for name, field in field_keys(RunConfig):
        for section in sections_of(field.annotation):
            if name != "gates":
                parts += [f"## `{name}`\n" if section is sections_of(field.annotation)[0] else ""]
                parts += list(_section_text(name, section))
    parts.append("## Further sections\n")
    for name, section in _DOCUMENTED:
        parts += list(_section_text(name, section))
    return "\n".join(part for part in parts if part).rstrip() + "\n"


def _experiments(conf: Path) -> Iterator[str]:
    for file in sorted((conf / "experiment").glob("*.yaml")):
        comments = []
        for line in file.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            if "@package" not in line:
                comments.append(line.lstrip("# "))
        yield f"### `{file.stem}`\n\n" + "\n".join(f"{line}  " for line in comments if line) + "\n"


def _section_text(name: str, section: type[BaseModel]) -> Iterator[str]:
    yield " ".join((section.__doc__ or "").split()) + "\n"
    yield "| key | default | type | purpose |\n|---|---|---|---|"
    nested = []
    for key, field in field_keys(section):
        inner = sections_of(field.annotation)
        if inner and key in _OF_EACH_MODEL:
            nested.append((f"{name}.{key}", inner[0]))
            continue
        default = _default(field, key, section)
        shown = "mandatory" if default == "???" else f"`{_shown(default)}`"
        unit = _unit(field)
        purpose = f"{field.description}{f' [{unit}]' if unit else ''}".replace("|", "\\|")
        yield f"| `{name}.{key}` | {shown} | {_type(field)} | {purpose} |"
    yield ""
    # Both models have the same keys there; they are described once.
    for inner_name, inner_section in nested if name == "policy" else ():
        yield f"### `{inner_name}`\n"
        yield from _section_text(inner_name, inner_section)
    if nested and name != "policy":
        *names, last = (f"`{key}`" for key in _OF_EACH_MODEL)
        yield f"{', '.join(names)} and {last} have the keys of the policy's.\n"


def _shown(value: object) -> str:
    if isinstance(value, BaseModel):
        return "see below"
    return str(yaml.safe_dump(value, default_flow_style=True)).removesuffix("\n").removesuffix("\n...")


def _type(field: FieldInfo) -> str:
    return _type_name(field.annotation)


def _type_name(annotation: Any) -> str:
    if annotation is NoneType:
        return "null"
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{_shown(choice)}`" for choice in get_args(annotation))
    if isinstance(annotation, type) and not get_args(annotation):
        return "section" if issubclass(annotation, BaseModel) else annotation.__name__
    if get_origin(annotation) in (dict, tuple, list):
        return {dict: "mapping", tuple: "[first, last]", list: "list"}[get_origin(annotation)]
    return " or ".join(dict.fromkeys(_type_name(part) for part in get_args(annotation))) or "value"


def _unit(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    return str(extra["unit"]) if isinstance(extra, dict) and "unit" in extra else ""
