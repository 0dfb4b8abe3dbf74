"""Faults on the way of a prompt group: lost responses, and reward functions that hang or raise.

Lives in the collector's process, around the router and around `Scoring`. Imports neither torch nor Ray.
Invariant: a fault takes the way that the real one would take; the collector cannot tell them apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from megatron_ppo.chaos.fault_log import Attempts, FaultLog
from megatron_ppo.chaos.reward import FAULT_KEY
from megatron_ppo.collector.scoring import Scoring, ScoringSettings
from megatron_ppo.protocol.errors import GenerationError
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from megatron_ppo.protocol.ports import RolloutEngine
from megatron_ppo.protocol.trajectory import Completion, Prompt, SamplingSettings

_REWARD_KINDS = (FaultKind.HANG_REWARD, FaultKind.RAISE_REWARD)


class FaultyEngine:
    """A `RolloutEngine` that loses some of its answers.

    A prompt is recognised by the seed of its first sample, which belongs to it alone.
    """

    def __init__(self, engine: RolloutEngine, *, plan: FaultPlan, log: FaultLog) -> None:
        self._engine = engine
        self._plan = plan
        self._log = log
        self._attempts = Attempts()

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        event = (seeds[0], self._attempts.next(seeds[0]))
        completions = await self._engine.generate(
            prompt_token_ids, seeds=seeds, sampling=sampling, deadline_s=deadline_s
        )
        if self._plan.strikes(FaultKind.FAIL_GENERATION, *event):
            self._log.append(FaultKind.FAIL_GENERATION, *event)
            raise GenerationError(f"chaos.fail_generation: the answer to attempt {event[1] + 1} was lost")
        self._attempts.succeeded(seeds[0])
        return completions


def unchanged(engine: RolloutEngine) -> RolloutEngine:
    """What `FaultyEngineFactory` is without faults; stands here because the collector's process imports its module."""
    return engine


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyEngineFactory:
    """Puts the faults around the router, in the process that has it."""

    plan: FaultPlan
    log: FaultLog

    def __call__(self, engine: RolloutEngine) -> FaultyEngine:
        return FaultyEngine(engine, plan=self.plan, log=self.log)


class FaultyScoring:
    """A `Scoring` that lets the reward function hang or raise for some groups.

    It only marks the prompt: the fault itself happens inside the reward function's own process, in `FaultyReward`.
    """

    def __init__(self, scoring: Scoring, *, plan: FaultPlan, log: FaultLog) -> None:
        self._scoring = scoring
        self._plan = plan
        self._log = log
        self._attempts = Attempts()

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """See `Scoring.score`."""
        event = (prompt.ordinal, self._attempts.next(prompt.ordinal))
        for kind in _REWARD_KINDS:
            if self._plan.strikes(kind, *event):
                self._log.append(kind, *event)
                metadata = {**prompt.metadata, FAULT_KEY: kind.value}
                return await self._scoring.score(dataclasses.replace(prompt, metadata=metadata), completions)
        rewards = await self._scoring.score(prompt, completions)
        self._attempts.succeeded(prompt.ordinal)
        return rewards

    def close(self) -> None:
        """See `Scoring.close`."""
        self._scoring.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultyScoringSettings:
    """`ScoringSettings` whose reward function obeys the plan. Implements `collector.scoring.BuildsScoring`."""

    settings: ScoringSettings
    plan: FaultPlan
    log: FaultLog

    def build(self) -> Scoring:
        """See `ScoringSettings.build`."""
        inner = dataclasses.replace(
            self.settings,
            target="megatron_ppo.chaos.reward.FaultyReward",
            kwargs={"target": self.settings.target, "kwargs": dict(self.settings.kwargs)},
        )
        return FaultyScoring(inner.build(), plan=self.plan, log=self.log)
