"""Validation of the current inference weights on held-out prompts.

Validation requests go to the same engines as collection, with their own sampling settings, and never enter the
replay buffer. Collection goes on beside it: the learner is here, so no new version can be published meanwhile and
every validation response is of the version that was just published (checked).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import isfinite
from statistics import fmean
from typing import Protocol, TypeVar

from megatron_ppo.loop.ports import Metrics
from megatron_ppo.protocol.errors import GroupMismatchError, NonFiniteError
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.trajectory import Completion, Prompt, SamplingSettings

T = TypeVar("T")
OnRankZero = Callable[[str, Callable[[], T]], T]


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
        """One completion per prompt, in order."""
        ...


class EngineValidator:
    """Scores one response to each held-out prompt.

    Args:
        prompts: the held-out prompts, all of them are used.
        sampling: greedy by default, so that the same weights give the same accuracy.
        expected_version: the version that the engines must be serving at a completed step.
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
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._scorer = scorer
        self._sampling = sampling
        self._expected_version = expected_version
        self._seed = seed
        self._deadline_s = deadline_s
        self._on_rank_zero = on_rank_zero

    def run(self, *, step: int) -> Metrics:
        """`validation/accuracy` (mean reward) and `validation/avg_length` (tokens) after `step` completed steps.

        Raises: GroupMismatchError when a token is not of the step's own version; NonFiniteError.
        """
        return self._on_rank_zero(f"validation after step {step}", lambda: self._validate(step))

    def _validate(self, step: int) -> Metrics:
        assert self._engines is not None, "only rank 0 validates"
        completions = self._engines.generate_many(
            [prompt.token_ids for prompt in self._prompts],
            sampling=self._sampling,
            seeds=[self._seed + index for index in range(len(self._prompts))],
            deadline_s=self._deadline_s,
        )
        expected = self._expected_version(step)
        seen = {span.version for completion in completions for span in completion.spans}
        if seen != {expected}:
            raise GroupMismatchError(
                f"validation after step {step} was sampled by weight versions {sorted(seen)}, expected {expected} only"
            )
        rewards = [
            self._scorer(prompt, completion.token_ids)
            for prompt, completion in zip(self._prompts, completions, strict=True)
        ]
        bad = tuple(
            p.ordinal for p, reward in zip(self._prompts, rewards, strict=True) if not isfinite(reward)
        )
        if bad:
            raise NonFiniteError(
                f"validation after step {step}: the reward of held-out prompts {list(bad)} is NaN or infinite",
                bad,
            )
        return {
            "validation/accuracy": fmean(rewards),
            "validation/avg_length": fmean(len(completion.token_ids) for completion in completions),
            "validation/truncation_rate": fmean(c.finish_reason == "length" for c in completions),
            "validation/num_samples": float(len(completions)),
        }
