"""What all sections have in common. Owns the field declaration that carries unit and purpose.

Driven by the section modules; `reference` reads the same declarations, so that documentation, default YAML
files and validation cannot disagree.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field

# What every generator takes: NumPy's have 32 bits, and torch's 64 also hold the step and the epoch.
MAX_SEED = 2**32 - 1


class Section(BaseModel):
    """A frozen part of the configuration. Unknown keys and values of another type are errors."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, validate_default=True
    )

    def kwargs(self) -> dict[str, Any]:
        """The section as constructor keyword arguments of its target: plain values, without `_target_`."""
        return self.model_dump(exclude={"target"})


class BuiltSection(Section):
    """A section with a `_target_`: dotted path of the class that takes its fields as keyword arguments."""

    target: str = Field(alias="_target_")


def setting(default: Any = ..., doc: str = "", *, unit: str = "", **limits: Any) -> Any:
    """Declare a field.

    Args:
        default: the value when the key is absent; `...` makes the key mandatory.
        doc: purpose in one or two sentences.   unit: of the value, empty where it has none.
        limits: pydantic's bounds (`ge`, `gt`, `le`, `lt`, `min_length`, …) and `default_factory`.
    """
    extra: dict[str, Any] | None = {"unit": unit} if unit else None
    if "default_factory" in limits:
        return Field(description=doc, json_schema_extra=extra, **limits)
    return Field(default, description=doc, json_schema_extra=extra, **limits)


def target_field(path: str) -> Any:
    """Declare the `_target_` of a section; the field's Literal type lists what may be chosen."""
    return Field(path, alias="_target_", description="Class that this section builds.")
