"""The death of an engine in the middle of a step.

Lives on all trainer ranks around `GroupSource`; only rank 0 kills. Invariant: at most one engine is killed in a step,
and only one that serves.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Protocol

from megatron_ppo.chaos.fault_log import FaultLog
from megatron_ppo.loop.ports import GroupSource
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from megatron_ppo.protocol.trajectory import PromptGroup

logger = logging.getLogger(__name__)


class MortalEngines(Protocol):
    """The engines, on rank 0. `ray_actors.inference_group.InferenceGroup` implements it."""

    def serving(self) -> Sequence[int]:
        """Replicas that serve."""
        ...

    def kill(self, replica: int) -> None:
        """Kill the process of a replica without a warning; returns at once."""
        ...


class EngineKillingGroups:
    """A `GroupSource` that kills an engine in some steps, just before the learner waits for the step's groups.

    The engines then generate for the windows that are open, so responses die with the engine.

    Args:
        engines: on rank 0 only, None elsewhere.
    """

    def __init__(
        self, source: GroupSource, *, engines: MortalEngines | None, plan: FaultPlan, log: FaultLog
    ) -> None:
        self._source = source
        self._engines = engines
        self._plan = plan
        self._log = log

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """See `GroupSource.take`."""
        if self._engines is not None and self._plan.strikes(FaultKind.KILL_ENGINE, target_step):
            self._kill_one(self._engines, target_step)
        return self._source.take(target_step=target_step)

    def open(self, *, step: int, frontier: int) -> None:
        """See `GroupSource.open`."""
        self._source.open(step=step, frontier=frontier)

    def _kill_one(self, engines: MortalEngines, step: int) -> None:
        serving = engines.serving()
        if not serving:
            logger.info("chaos.kill_engine: no engine serves in step %d, so none is killed", step + 1)
            return
        # Of the numbers below the rate, so that it is spread over all replicas again.
        share = self._plan.draw(FaultKind.KILL_ENGINE, step) / self._plan.rates[FaultKind.KILL_ENGINE]
        replica = serving[int(share * len(serving))]
        self._log.append(FaultKind.KILL_ENGINE, step)
        logger.warning("chaos.kill_engine: engine replica %d is killed in step %d", replica, step + 1)
        engines.kill(replica)
