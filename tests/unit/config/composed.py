"""Composed configurations for tests. Composing takes a third of a second, so each one is composed once."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

from megatron_ppo.config.compose import compose_values, load, validate
from megatron_ppo.config.schema import RunConfig

composed_values = cache(lambda *words: compose_values(words))


@cache
def experiment(name: str) -> RunConfig:
    """The configuration of an experiment as it is."""
    return load([f"+experiment={name}"])


def changed(changes: dict[str, Any], *, name: str = "cpu_smoke") -> RunConfig:
    """An experiment with some dotted keys set, as an override on the command line would set them.

    Raises: ConfigError as `compose.load` does.
    """
    values = copy.deepcopy(composed_values(f"+experiment={name}"))
    for key, value in changes.items():
        *parents, leaf = key.split(".")
        section = values
        for parent in parents:
            section = section.setdefault(parent, {})
        section[leaf] = value
    return validate(values)
