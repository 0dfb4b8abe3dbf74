"""Builds what a `_target_` names.

Dotted names are how this low layer reaches the parts above it without importing them: the class that a
section builds, and the torch-free rules that live with a part (see `checks`).
"""

from __future__ import annotations

import importlib
from typing import Any

from megatron_ppo.config.base import BuiltSection
from megatron_ppo.protocol.errors import ConfigError


def resolve(dotted: str) -> Any:
    """The object that `package.module.name` names. Raises: ConfigError if there is none."""
    module_name, _, name = dotted.rpartition(".")
    try:
        return getattr(importlib.import_module(module_name), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        raise ConfigError(f"_target_ {dotted!r} cannot be imported: {error}") from error


def build(section: BuiltSection, **runtime: Any) -> Any:
    """Call the section's target with its fields and the objects that only exist at run time.

    Raises: ConfigError if the target cannot be imported or refuses the values.
    """
    return resolve(section.target)(**section.kwargs(), **runtime)
