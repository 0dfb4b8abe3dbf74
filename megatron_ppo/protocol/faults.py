"""Which faults a run injects into itself, and when: a pure function of (seed, kind, event).

Driven by the configuration check, which looks ahead, and by the wrappers in `megatron_ppo.chaos`. Invariant: the same
plan strikes the same events in every run; a further attempt of the same thing is another event, so it can succeed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """What is injected. The value names its metric, see `faults_metric`."""

    KILL_ENGINE = "kill_engine"
    """The process of an engine replica is killed. Event: step."""
    FAIL_GENERATION = "fail_generation"
    """The responses to a prompt are lost on their way. Event: seed of the first sample, attempt."""
    HANG_REWARD = "hang_reward"
    """The reward function does not return. Event: prompt ordinal, attempt."""
    RAISE_REWARD = "raise_reward"
    """The reward function raises. Event: prompt ordinal, attempt."""
    DELAY_REFIT = "delay_refit"
    """A publication takes longer. Event: weight version, attempt."""
    FAIL_REFIT = "fail_refit"
    """A publication fails when all bytes have arrived. Event: weight version, attempt."""

    @property
    def config_key(self) -> str:
        """The key of the section `chaos` that switches it on; its value is a rate, or seconds."""
        return "delay_refit_s" if self is FaultKind.DELAY_REFIT else self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultPlan:
    """Decides every fault of a run.

    Attributes:
        seed: of all decisions.   rates: probability per event, in [0, 1]; a kind that is absent never strikes.
        max_refit_delay_s: the longest delay of a publication.
    """

    seed: int
    rates: Mapping[FaultKind, float]
    max_refit_delay_s: float = 0.0

    @property
    def kinds(self) -> tuple[FaultKind, ...]:
        """The kinds that are on."""
        return tuple(kind for kind in FaultKind if self.rates.get(kind, 0.0) > 0.0)

    def strikes(self, kind: FaultKind, *event: int) -> bool:
        """Whether `kind` happens at `event`."""
        return self.draw(kind, *event) < self.rates.get(kind, 0.0)

    def draw(self, kind: FaultKind, *event: int) -> float:
        """A uniform number in [0, 1) that belongs to the event."""
        name = "/".join(map(str, (self.seed, kind.value, *event)))
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        # In steps of 2**-53, or the division could round up to 1.
        return (int.from_bytes(digest, "little") >> 11) / 2**53

    def refit_delay_s(self, version: int, attempt: int) -> float:
        """How long the publication of `version` is held up, in seconds, where `DELAY_REFIT` strikes."""
        return self.max_refit_delay_s * self.draw(FaultKind.DELAY_REFIT, version, attempt)


def faults_metric(kind: FaultKind) -> str:
    """Metric that counts the faults of a kind since the run began."""
    return f"chaos/{kind.value}_faults"
