"""What the documentation states as numbers is what the code computes."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.schedule import AsyncSchedule

ROOT = Path(__file__).resolve().parents[2]
TABLE = re.compile(r"^A = (\d+), W = (\d+)(?:, L = (\d+))?[^\n]*:\n\n(\|.*?\n)\n", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)[^)]*\)")
PATH_IN_CODE = re.compile(r"`((?:megatron_ppo|scripts|tests|docs|conf|requirements|benchmarks)/[\w./{}*-]+)`")


def window_tables() -> list[tuple[AsyncSchedule, str]]:
    """The schedules of docs/async.md with the text of their tables."""
    text = (ROOT / "docs/async.md").read_text(encoding="utf-8")
    return [
        (
            AsyncSchedule(
                max_num_steps=1000,
                max_trajectory_age_steps=int(age),
                policy_training_start_step=int(start),
                warmup_generation_lead_steps=int(lead) if lead else None,
            ),
            table,
        )
        for age, start, lead, table in TABLE.findall(text)
    ]


def test_async_document_has_its_four_window_tables() -> None:
    assert len(window_tables()) == 4


@pytest.mark.parametrize("index", range(4))
def test_window_tables_are_what_the_schedule_computes(index: int) -> None:
    schedule, table = window_tables()[index]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]
    opened_at: dict[int, int] = {}
    for step, row in enumerate(rows):
        new = [t for t in range(schedule.frontier(step) + 1) if t not in opened_at]
        opened_at |= dict.fromkeys(new, step)
        version = schedule.version_at(opened_at[step])
        expected = [
            step,
            schedule.version_at(step),
            schedule.frontier(step),
            ", ".join(map(str, new)) or "-",
            version,
            schedule.age(generation_version=version, target_step=step),
            step - opened_at[step],
        ]
        assert row == [str(value) for value in expected]


@pytest.mark.parametrize(
    "document",
    sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
)
def test_files_that_a_document_names_exist(document: str) -> None:
    path = ROOT / document
    text = path.read_text(encoding="utf-8")
    missing = [target for target in LINK.findall(text) if not (path.parent / target).exists()]
    missing += [target for target in PATH_IN_CODE.findall(text) if not list(ROOT.glob(target.rstrip("/")))]
    assert not missing, f"{document} names {missing}"


@functools.cache
def config_keys() -> frozenset[str]:
    """Dotted keys of the whole configuration, sections included."""
    schema = RunConfig.model_json_schema(by_alias=True)
    return frozenset(_keys_below(schema, schema["$defs"], ""))


def _keys_below(section: dict[str, Any], definitions: dict[str, Any], prefix: str) -> set[str]:
    keys: set[str] = set()
    for name, value in section.get("properties", {}).items():
        keys.add(prefix + name)
        for reference in re.findall(r"#/\$defs/(\w+)", str(value)):
            keys |= _keys_below(definitions[reference], definitions, f"{prefix}{name}.")
    return keys


@pytest.mark.parametrize(
    "document",
    sorted(str(path.relative_to(ROOT)) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]),
)
def test_configuration_keys_that_a_document_names_exist(document: str) -> None:
    sections = "|".join(key for key in config_keys() if "." not in key)
    text = (ROOT / document).read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{sections})(?:\.[a-z]\w+)+)(?:=[^`]*)?`", text))
    named = {key for key in named if not key.endswith(".json")}
    # `data.batch` and the like are modules.
    modules = {key for key in named if (ROOT / "megatron_ppo" / f"{key.replace('.', '/')}.py").exists()}
    assert not named - config_keys() - modules
