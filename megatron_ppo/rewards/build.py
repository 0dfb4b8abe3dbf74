"""Builds a verifier from its dotted name, in whichever process scores."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence

from megatron_ppo.protocol.errors import ConfigError, ScoringError
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.trajectory import Prompt


def build_scorer(target: str, kwargs: Mapping[str, str | int | float]) -> Scorer:
    """The verifier `target`, constructed with `kwargs`.

    Raises: ConfigError if the name cannot be imported or the class does not take these arguments.
    """
    module_name, _, class_name = target.rpartition(".")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"reward._target_ {target!r} cannot be imported: {error}") from error
    try:
        scorer: Scorer = factory(**kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"reward._target_ {target!r} does not accept {dict(kwargs)}: {error}") from error
    return scorer


class GuardedScorer:
    """A `Scorer` in this process: whatever the function raises, the caller meets a ScoringError."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """See `Scorer`. Raises: ScoringError."""
        try:
            return float(self._scorer(prompt, response_token_ids))
        except Exception as error:
            raise ScoringError(
                f"scoring of prompt ordinal {prompt.ordinal} raised {type(error).__name__}: {error}"
            ) from error
