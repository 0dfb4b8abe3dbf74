"""Validation of the current inference weights on held-out prompts.

Validation requests go to the same engines as collection, with their own sampling settings, and never enter the
replay buffer. Collection goes on beside it: the learner is here, so no new version can be published meanwhile and
every validation response is of the version that was just published (checked).

A response that cannot be generated or scored ends no run: it is left out and counted, never taken for a reward of 0.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean
from typing import Protocol, TypeVar

from megatron_ppo.loop.ports import Metrics
from megatron_ppo.protocol.errors import GenerationError, GroupMismatchError, NonFiniteError, ScoringError
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.trajectory import Completion, Prompt, SamplingSettings

logger = logging.getLogger(__name__)

T = TypeVar("T")
OnRankZero = Callable[[str, Callable[[], T]], T]

ATTEMPTS = 2
"""At the generation of all responses, within one deadline."""
FAILURES_LIMIT_S = 300.0
"""Once failed attempts at scoring have taken this long, the reward function is not asked about the other responses."""


class BlockingGenerator(Protocol):
    """The engines as rank 0 sees them."""

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingSettings,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        """One completion per prompt, in order. Raises: GenerationError."""
        ...


class EngineValidator:
    """Scores one response to each held-out prompt.

    Args:
        prompts: the held-out prompts, all of them are used.
        sampling: greedy by default, so that the same weights give the same accuracy.
        expected_version: the version that the engines must be serving at a completed step.
        scorer: its ScoringError is the failure of one response.
        deadline_s: of the generation.   clock: seconds.
        on_rank_zero: runs a function on rank 0 and gives every rank its result (or its error).
    """

    def __init__(
        self,
        *,
        engines: BlockingGenerator | None,
        prompts: Sequence[Prompt],
        scorer: Scorer,
        sampling: SamplingSettings,
        expected_version: Callable[[int], int],
        seed: int,
        deadline_s: float,
        on_rank_zero: OnRankZero[Metrics],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._scorer = scorer
        self._sampling = sampling
        self._expected_version = expected_version
        self._seed = seed
        self._deadline_s = deadline_s
        self._on_rank_zero = on_rank_zero
        self._clock = clock

    def run(self, *, step: int) -> Metrics:
        """`validation/accuracy` (mean reward) and statistics of the responses after `step` completed steps.

        `validation/failed_generations` counts prompts without a response, `validation/failed_scores` responses without
        a reward; they are in no mean, and a mean of nothing is not in the result. Lengths are in tokens.

        Raises: GroupMismatchError when a token is not of the step's own version; NonFiniteError.
        """
        return self._on_rank_zero(f"validation after step {step}", lambda: self._validate(step))

    def _validate(self, step: int) -> Metrics:
        completions = self._generate(step)
        rewards = self._score(step, completions)
        metrics = {
            "validation/num_samples": float(len(completions)),
            "validation/failed_generations": float(len(self._prompts) - len(completions)),
            "validation/failed_scores": float(len(completions) - len(rewards)),
        }
        if rewards:
            metrics["validation/accuracy"] = fmean(rewards)
        if completions:
            metrics["validation/avg_length"] = fmean(len(c.token_ids) for c in completions)
            metrics["validation/truncation_rate"] = fmean(c.finish_reason == "length" for c in completions)
        return metrics

    def _generate(self, step: int) -> list[Completion]:
        """One response per prompt; none at all when the generation fails."""
        assert self._engines is not None, "only rank 0 validates"
        deadline = self._clock() + self._deadline_s
        for attempt in range(1, ATTEMPTS + 1):
            try:
                completions = self._engines.generate_many(
                    [prompt.token_ids for prompt in self._prompts],
                    sampling=self._sampling,
                    seeds=[self._seed + index for index in range(len(self._prompts))],
                    deadline_s=deadline - self._clock(),
                )
            except GenerationError as error:
                logger.warning("validation after step %d: attempt %d failed: %s", step, attempt, error)
                if self._clock() >= deadline:
                    break
            else:
                self._check_versions(step, completions)
                return completions
        logger.error("validation after step %d: no responses; the run goes on without their accuracy", step)
        return []

    def _check_versions(self, step: int, completions: Sequence[Completion]) -> None:
        expected = self._expected_version(step)
        seen = {span.version for completion in completions for span in completion.spans}
        if seen != {expected}:
            raise GroupMismatchError(
                f"validation after step {step} was sampled by weight versions {sorted(seen)}, expected {expected} only"
            )

    def _score(self, step: int, completions: Sequence[Completion]) -> list[float]:
        """The rewards of the responses that could be scored."""
        if not completions:
            return []
        rewards: list[float] = []
        bad: list[int] = []
        failing_s = 0.0
        for prompt, completion in zip(self._prompts, completions, strict=True):
            if failing_s >= FAILURES_LIMIT_S:
                logger.error(
                    "validation after step %d: %.0f s of failed scoring; no more is scored", step, failing_s
                )
                break
            began = self._clock()
            try:
                reward = self._scorer(prompt, completion.token_ids)
            except ScoringError as error:
                failing_s += self._clock() - began
                logger.error("validation after step %d, a response is left out: %s", step, error)
                continue
            rewards.append(reward)
            if not isfinite(reward):
                bad.append(prompt.ordinal)
        if bad:
            raise NonFiniteError(
                f"validation after step {step}: the reward of held-out prompts {bad} is NaN or infinite",
                tuple(bad),
            )
        return rewards
