"""Faults of a publication: it takes longer, or fails when every byte has arrived.

Lives on trainer rank 0, around the engines as the refit sees them. Invariant: both strike while the engines are paused
and before any of them has the new version, which is the worst moment: nobody serves, and all was in vain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from megatron_ppo.chaos.fault_log import Attempts, FaultLog
from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from megatron_ppo.protocol.replicas import PausedEngines, PauseMode
from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest
from megatron_ppo.refit.fleet import EngineFleet, PendingCalls


class FaultyFleet:
    """An `EngineFleet` whose commit is late, or does not happen.

    Args:
        sleep: waits for some seconds.
    """

    def __init__(
        self,
        fleet: EngineFleet,
        *,
        plan: FaultPlan,
        log: FaultLog,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._fleet = fleet
        self._plan = plan
        self._log = log
        self._sleep = sleep
        self._attempts = Attempts()

    def muster(self, *, version: int) -> Sequence[str]:
        """See `EngineFleet.muster`."""
        return self._fleet.muster(version=version)

    def join_refit_group(self, spec: RefitGroupSpec) -> PendingCalls:
        """See `EngineFleet.join_refit_group`."""
        return self._fleet.join_refit_group(spec)

    def begin_refit(
        self, *, mode: PauseMode, timeout_s: float, patience_s: float | None = None
    ) -> PausedEngines:
        """See `EngineFleet.begin_refit`."""
        return self._fleet.begin_refit(mode=mode, timeout_s=timeout_s, patience_s=patience_s)

    def receive_weights(self, manifest: WeightManifest) -> PendingCalls:
        """See `EngineFleet.receive_weights`."""
        return self._fleet.receive_weights(manifest)

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """See `EngineFleet.commit_refit`. Raises: RefitError where that is the fault."""
        event = (version, self._attempts.next(version))
        if self._plan.strikes(FaultKind.DELAY_REFIT, *event):
            self._log.append(FaultKind.DELAY_REFIT, *event)
            self._sleep(self._plan.refit_delay_s(*event))
        if self._plan.strikes(FaultKind.FAIL_REFIT, *event):
            self._log.append(FaultKind.FAIL_REFIT, *event)
            raise RefitError(f"chaos.fail_refit: attempt {event[1] + 1} at version {version} fails")
        self._fleet.commit_refit(version=version, recompute_kv=recompute_kv, timeout_s=timeout_s)

    def end_refit(self, *, timeout_s: float) -> None:
        """See `EngineFleet.end_refit`."""
        self._fleet.end_refit(timeout_s=timeout_s)
