"""Readable errors: one message with key, value seen, value allowed, and a suggestion for a misspelt key.

Driven by `compose` for the errors of Hydra and pydantic. Owns the list of all dotted keys of the schema.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.errors import ConfigError

_LIST_LIMIT = 12


def config_error(problems: Sequence[str]) -> ConfigError:
    """One error for all problems, the first line a heading."""
    if len(problems) == 1:
        return ConfigError(f"bad configuration: {problems[0]}")
    lines = "".join(f"\n  - {problem}" for problem in problems)
    return ConfigError(f"bad configuration, {len(problems)} problems:{lines}")


def sections_of(annotation: Any) -> tuple[type[BaseModel], ...]:
    """Section classes that a field's annotation admits."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return (annotation,)
    return tuple(section for part in get_args(annotation) for section in sections_of(part))


def field_keys(section: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """YAML name and declaration of every field of a section."""
    for name, field in section.model_fields.items():
        yield field.alias or name, field


@cache
def known_keys() -> tuple[str, ...]:
    """Every dotted key of the schema; entries of `gates` are left out, their names are free."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, field in field_keys(section):
            yield f"{prefix}{name}"
            if name != "gates":
                for nested in sections_of(field.annotation):
                    yield from walk(nested, f"{prefix}{name}.")

    return tuple(dict.fromkeys(walk(RunConfig, "")))


def suggestion(key: str) -> str:
    """`; did you mean …?` for a misspelt key, else the keys that its section has."""
    parent, _, leaf = key.rpartition(".")
    siblings = [
        known[len(parent) + 1 if parent else 0 :]
        for known in known_keys()
        if known.rpartition(".")[0] == parent
    ]
    if not parent:
        siblings.append("experiment")  # a group of files and no key, but chosen on the same command line
    close = difflib.get_close_matches(leaf, siblings, n=1, cutoff=0.7)
    if close:
        return f"; did you mean {parent + '.' if parent else ''}{close[0]}?"
    leaves = {known.rpartition(".")[2]: known for known in reversed(known_keys())}
    elsewhere = difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.85)
    if elsewhere:
        return f"; did you mean {leaves[elsewhere[0]]}?"
    if parent and parent not in known_keys():
        return suggestion(parent)  # the section is what is misspelt
    if siblings:
        return f"; {parent or 'the configuration'} has: {_listed(siblings)}"
    return ""


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _LIST_LIMIT
    return ", ".join(names[:_LIST_LIMIT]) + (f" and {more} more" if more > 0 else "")


def schema_problems(error: ValidationError, values: Mapping[str, Any]) -> list[str]:
    """Pydantic's findings, one line each."""
    return [_schema_problem(detail, values) for detail in error.errors(include_url=False)]


def _schema_problem(detail: Mapping[str, Any], values: Mapping[str, Any]) -> str:
    key, kind, seen = dotted(detail["loc"], values), detail["type"], detail["input"]
    if kind == "extra_forbidden":
        return f"{key}: unknown key (value {seen!r}){suggestion(key)}"
    if kind == "missing":
        return f"{key}: must be set, it has no default"
    if kind.startswith("union_tag"):
        context = detail["ctx"]
        choice = (
            f"{key}.{'_target_' if 'target' in context['discriminator'] else context['discriminator'][1:-1]}"
        )
        if kind == "union_tag_not_found":
            return f"{choice}: must be set, it has no default"
        return f"{choice}: got {context['tag']!r}; allowed: {context['expected_tags']}"
    if kind == "literal_error":
        return f"{key}: got {seen!r}; allowed: {detail['ctx']['expected']}"
    if kind == "value_error":
        return f"{key}: {detail['ctx']['error']}"
    message = str(detail["msg"]).removeprefix("Input should be ")
    return f"{key}: got {seen!r}; must be {message}"


def dotted(location: Sequence[int | str], values: Any) -> str:
    """The key of an error's location, without the tags that pydantic inserts for unions."""
    parts: list[str] = []
    for index, part in enumerate(location):
        inside = isinstance(values, Mapping) and part in values
        if isinstance(values, list | tuple) and isinstance(part, int) and part < len(values):
            parts[-1] += f"[{part}]"
            values = values[part]
        elif inside:
            parts.append(str(part))
            values = values[part]
        elif index == len(location) - 1:
            parts.append(str(part))
    return ".".join(parts) or "configuration"


def hydra_problem(error: Exception) -> str:
    """Hydra's composition error as one line."""
    text = str(error)
    if unknown := re.search(r"Could not override '([^']+)'", text):
        key = unknown[1]
        if "defaults list" in text:
            return f"{key}: no such group choice is set by default; write +{key}=… to add one"
        if key in known_keys():  # its entries have free names, which Hydra lets a word add but not replace
            return f"{key}: new entries are added one by one; write +{key}.NAME=VALUE"
        return f"{key}: unknown key{suggestion(key)}"
    if missing := re.search(r"Could not find '([^']+)'", text):
        group, _, choice = missing[1].rpartition("/")
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        close = difflib.get_close_matches(choice, options, n=1)
        hint = f"; did you mean {close[0]}?" if close else ""
        available = ", ".join(options) or "nothing"
        return f"{group or 'config'}: {choice!r} does not exist; available: {available}{hint}"
    if mandatory := re.search(r"You must specify '([^']+)'", text):
        options = re.findall(r"^\t(\S+)$", text, flags=re.MULTILINE)
        return f"{mandatory[1]}: must be chosen; available: {', '.join(options) or 'see conf/'}"
    return " ".join(text.partition("\nSee http")[0].split())
