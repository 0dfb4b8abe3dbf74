"""One prompt group from reservation to finished record: generate and score, both with retries.

Owns the retry rule. Driven by the collector, which decides what a failure means.
Invariant: a group is whole or an error; a failed response never becomes an empty one with reward 0.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import TypeVar

from megatron_ppo.collector.scoring import Scoring
from megatron_ppo.collector.seeds import sample_seed
from megatron_ppo.collector.stats import StatsRecorder
from megatron_ppo.protocol.errors import (
    EngineAsideError,
    GenerationError,
    GroupMismatchError,
    ScoringError,
)
from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.ports import PromptStream, RolloutEngine
from megatron_ppo.protocol.trajectory import (
    Completion,
    Prompt,
    PromptGroup,
    Reservation,
    SamplingSettings,
    Trajectory,
)

logger = logging.getLogger(__name__)

T = TypeVar("T")

# The engine enforces the deadline itself; this is for a client whose answer never comes.
DEADLINE_GRACE_S = 5.0


class GroupRollout:
    """Turns reservations into prompt groups.

    Args:
        num_generations: G, responses per prompt.   seed: of the run; see `sample_seed`.
        seed_by_step: sampling seeds depend on the training step too, as deterministic runs have it.
        deadline_s: limit of one generation attempt.   scoring: has a limit of its own.
        max_retries: further attempts after a GenerationError, and after a ScoringError, which scores the same
            responses again.   retry_backoff_s: wait before the first; it doubles.
        note: is told when a reservation's responses are generated, and when they are scored.
        engine_ready: awaited before each generation attempt, outside its deadline: an engine that is being built again
            is waited for and no failure.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        scoring: Scoring,
        prompts: PromptStream,
        num_generations: int,
        sampling: SamplingSettings,
        seed: int,
        seed_by_step: bool,
        deadline_s: float,
        max_retries: int,
        retry_backoff_s: float,
        recorder: StatsRecorder,
        note: Callable[[Reservation, Stage], Awaitable[None]],
        engine_ready: Callable[[], Awaitable[None]],
    ) -> None:
        self._engine = engine
        self._scoring = scoring
        self._prompts = prompts
        self._num_generations = num_generations
        self._sampling = sampling
        self._seed = seed
        self._seed_by_step = seed_by_step
        self._deadline_s = deadline_s
        self._max_retries = max_retries
        self._retry_backoff_s = retry_backoff_s
        self._recorder = recorder
        self._note = note
        self._engine_ready = engine_ready

    def close(self) -> None:
        """Stop taking scoring work; see `Scoring.close`."""
        self._scoring.close()

    async def roll_out(self, reservation: Reservation) -> PromptGroup:
        """Generate and score the group of `reservation`.

        Raises: GenerationError or ScoringError after the last retry; NonFiniteError for a reward that is NaN or
            infinite; WaitTimeoutError when scoring hangs and cannot be killed; whatever a dead engine raises.
        """
        prompt = self._prompts.prompt_at(reservation.ordinal)
        started_at = time.time()
        seeds = self._seeds(reservation)
        completions = await self._with_retries(
            prompt, GenerationError, lambda prompt: self._generate(prompt, seeds)
        )
        finished_at = time.time()
        await self._note(reservation, Stage.GENERATED)
        rewards = await self._with_retries(
            prompt, ScoringError, lambda prompt: self._score(prompt, completions)
        )
        await self._note(reservation, Stage.SCORED)
        trajectories = tuple(
            Trajectory(prompt_token_ids=prompt.token_ids, completion=completion, reward=reward)
            for completion, reward in zip(completions, rewards, strict=True)
        )
        return PromptGroup(
            ordinal=reservation.ordinal,
            target_step=reservation.target_step,
            opened_at_step=reservation.opened_at_step,
            trajectories=trajectories,
            started_at=started_at,
            finished_at=finished_at,
        )

    async def _with_retries(
        self,
        prompt: Prompt,
        failure: type[GenerationError | ScoringError],
        attempt_once: Callable[[Prompt], Awaitable[T]],
    ) -> T:
        backoff_s = self._retry_backoff_s
        for attempt in range(self._max_retries + 1):
            try:
                return await attempt_once(prompt)
            except failure as error:
                if attempt == self._max_retries:
                    raise
                logger.warning(
                    "ordinal %d: attempt %d failed, retrying: %s", prompt.ordinal, attempt + 1, error
                )
                self._recorder.add(retries=1)
                await asyncio.sleep(backoff_s)
                backoff_s *= 2
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _seeds(self, reservation: Reservation) -> list[int]:
        step = reservation.target_step if self._seed_by_step else None
        return [
            sample_seed(self._seed, reservation.ordinal, sample, step=step)
            for sample in range(self._num_generations)
        ]

    async def _generate(self, prompt: Prompt, seeds: Sequence[int]) -> list[Completion]:
        while True:
            await self._engine_ready()
            # Turned away before anything ran: no attempt, and the wait for an engine is not in its deadline.
            with suppress(EngineAsideError), self._recorder.generating():
                return await self._ask_engine(prompt, seeds)

    async def _ask_engine(self, prompt: Prompt, seeds: Sequence[int]) -> list[Completion]:
        limit_s = self._deadline_s + DEADLINE_GRACE_S
        try:
            async with asyncio.timeout(limit_s):
                completions = await self._engine.generate(
                    prompt.token_ids, seeds=seeds, sampling=self._sampling, deadline_s=self._deadline_s
                )
        except TimeoutError as error:
            raise GenerationError(
                f"the engine did not answer for prompt ordinal {prompt.ordinal} within {limit_s:.1f} s"
            ) from error
        if len(completions) != self._num_generations:
            raise GroupMismatchError(
                f"the engine returned {len(completions)} responses to prompt ordinal {prompt.ordinal}, "
                f"asked for {self._num_generations}"
            )
        return completions

    async def _score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Rewards in reward units, one per response."""
        start = time.monotonic()
        try:
            return await self._scoring.score(prompt, completions)
        finally:
            self._recorder.add(scoring_group_s=time.monotonic() - start)
