"""Puts the wrappers of `megatron_ppo.chaos` around the parts of a run, or leaves the parts as they are.

Driven by `app.actors` and `app.parts`, which ask once per seam. Invariant: with `chaos` off every part is the one that
was given, and nothing is written.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_ppo.chaos.collection import FaultyEngineFactory, FaultyScoringSettings, unchanged
from megatron_ppo.chaos.engines import EngineKillingGroups, MortalEngines
from megatron_ppo.chaos.fault_log import FaultLog
from megatron_ppo.chaos.publication import FaultyFleet
from megatron_ppo.collector.scoring import BuildsScoring, ScoringSettings
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.loop.ports import GroupSource, Metrics
from megatron_ppo.protocol.faults import FaultPlan, faults_metric
from megatron_ppo.protocol.ports import RolloutEngine
from megatron_ppo.refit.fleet import EngineFleet
from megatron_ppo.telemetry.run_dir import RunDirectory


class Seams(Protocol):
    """The places of a run where faults are injected."""

    def around_engine(self) -> Callable[[RolloutEngine], RolloutEngine]:
        """For the collector's process: what it asks for responses. Can be pickled."""
        ...

    def scoring(self, settings: ScoringSettings) -> BuildsScoring:
        """For the collector's process: how it scores. Can be pickled."""
        ...

    def fleet(self, fleet: EngineFleet) -> EngineFleet:
        """The engines as the refit sees them, on rank 0."""
        ...

    def groups(self, source: GroupSource, *, engines: MortalEngines | None) -> GroupSource:
        """The learner's side of the buffer, on every rank; `engines` on rank 0 only."""
        ...

    def statistics(self) -> Metrics:
        """Faults so far, by kind."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class NoFaults:
    """Changes nothing."""

    def around_engine(self) -> Callable[[RolloutEngine], RolloutEngine]:
        """See `Seams`."""
        return unchanged

    def scoring(self, settings: ScoringSettings) -> BuildsScoring:
        """See `Seams`."""
        return settings

    def fleet(self, fleet: EngineFleet) -> EngineFleet:
        """See `Seams`."""
        return fleet

    def groups(self, source: GroupSource, *, engines: MortalEngines | None) -> GroupSource:
        """See `Seams`."""
        return source

    def statistics(self) -> Metrics:
        """See `Seams`."""
        return {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Injects what `plan` says and records it in `log`."""

    plan: FaultPlan
    log: FaultLog

    def around_engine(self) -> Callable[[RolloutEngine], RolloutEngine]:
        """See `Seams`."""
        return FaultyEngineFactory(plan=self.plan, log=self.log)

    def scoring(self, settings: ScoringSettings) -> BuildsScoring:
        """See `Seams`."""
        return FaultyScoringSettings(settings=settings, plan=self.plan, log=self.log)

    def fleet(self, fleet: EngineFleet) -> EngineFleet:
        """See `Seams`."""
        return FaultyFleet(fleet, plan=self.plan, log=self.log)

    def groups(self, source: GroupSource, *, engines: MortalEngines | None) -> GroupSource:
        """See `Seams`."""
        return EngineKillingGroups(source, engines=engines, plan=self.plan, log=self.log)

    def statistics(self) -> Metrics:
        """See `Seams`."""
        counts = self.log.counts()
        return {faults_metric(kind): float(counts[kind]) for kind in self.plan.kinds}


def seams_of(config: RunConfig, directory: RunDirectory) -> Seams:
    """The seams of one run: with faults if `chaos` asks for any."""
    plan = config.chaos.plan()
    if not plan.kinds:
        return NoFaults()
    return Faults(plan=plan, log=FaultLog(path=directory.faults_path))
