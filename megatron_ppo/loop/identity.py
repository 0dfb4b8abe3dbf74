"""What a run has in common with the checkpoint that it continues from, and what follows from a difference.

Driven by `CheckpointFolder.choose` at a resume, with the traits that the app computes from configuration and files.
Invariant: a difference is never passed over in silence: it is refused with the reason, or it is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.protocol.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class Trait:
    """One trait of a run.

    Attributes:
        value: as it is saved with a checkpoint; a digest, or words.
        because: why a change is refused, or why it does no harm.
        refused: whether a run with another value may not continue.
    """

    value: str
    because: str
    refused: bool = True


def differences(folder: Path, saved: object, traits: Mapping[str, Trait]) -> list[str]:
    """What is to be told about the checkpoint in `folder`, one line each.

    Args:
        saved: the traits by name as the checkpoint has them, from JSON; an older one may lack some.
    Raises: CheckpointError for the first trait whose change is refused, with what was to be told before it.
    """
    told = []
    for name, trait in traits.items():
        seen = saved.get(name) if isinstance(saved, Mapping) else None
        if seen == trait.value:
            continue
        if seen is None:
            told.append(f"{folder}: {name} was not recorded when it was saved, so it is not compared")
            continue
        what = f"{folder}: {name} was {seen} when it was saved, the run has {trait.value}"
        if trait.refused:
            raise CheckpointError("\n".join([f"{what}; {trait.because}", *told]))
        told.append(f"{what}; the run goes on, {trait.because}")
    return told
