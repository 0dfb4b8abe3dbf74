"""Scoring off the event loop: in threads of this process, or in processes that can be killed.

Driven by `GroupRollout`, one call per group. Invariant: a call returns finite rewards, one per response, or raises;
a failure never becomes a reward.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_ppo.protocol.errors import NonFiniteError, WaitTimeoutError
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.trajectory import Completion, Prompt
from megatron_ppo.rewards.build import GuardedScorer, build_scorer
from megatron_ppo.rewards.process_pool import ScorerPool


class Scoring(Protocol):
    """Scores whole groups."""

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """Rewards in reward units, one per response.

        Raises: ScoringError when the reward function failed and may be tried again; WaitTimeoutError when it hangs
            and cannot be killed; NonFiniteError for a reward that is NaN or infinite.
        """
        ...

    def close(self) -> None:
        """Take no more work; what runs is killed where that is possible, and not waited for."""
        ...


class BuildsScoring(Protocol):
    """How scoring is made in the collector's process. Can be pickled."""

    def build(self) -> Scoring:
        """Ready to score. Raises: ConfigError when the verifier cannot be built."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringSettings:
    """How the collector's process runs the reward function.

    Attributes:
        target, kwargs: the verifier, as of `build_scorer`.
        isolated: in processes that can be killed.   concurrency: groups that may be scored at once.
        deadline_s: limit of scoring one group.
    """

    target: str
    kwargs: Mapping[str, Any]
    isolated: bool
    concurrency: int
    deadline_s: float

    def build(self) -> Scoring:
        """Ready to score. Raises: ConfigError when the verifier cannot be built."""
        if self.isolated:
            return ProcessScoring(
                target=self.target,
                kwargs=self.kwargs,
                processes=self.concurrency,
                deadline_s=self.deadline_s,
            )
        scorer = build_scorer(self.target, self.kwargs)
        return ThreadScoring(scorer, threads=self.concurrency, deadline_s=self.deadline_s)


class ThreadScoring:
    """Calls the reward function in threads: cheapest, for functions that are known to end.

    Args:
        deadline_s: of one group, the wait for a free thread included.   threads: groups at once.
    """

    def __init__(self, scorer: Scorer, *, threads: int, deadline_s: float) -> None:
        self._scorer = GuardedScorer(scorer)
        self._deadline_s = deadline_s
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="scorer")

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """See `Scoring.score`."""
        work = asyncio.get_running_loop().run_in_executor(self._threads, self._score_all, prompt, completions)
        try:
            async with asyncio.timeout(self._deadline_s):
                rewards = await work
        except TimeoutError as error:
            raise WaitTimeoutError(
                f"scoring of prompt ordinal {prompt.ordinal} took more than {self._deadline_s:.1f} s, and its thread "
                "cannot be killed (reward.isolation=thread)"
            ) from error
        return _finite(prompt, rewards)

    def close(self) -> None:
        """See `Scoring.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _score_all(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        return [self._scorer(prompt, completion.token_ids) for completion in completions]


class ProcessScoring:
    """Calls the reward function in processes that are killed at the deadline; a thread here waits for each.

    Args:
        target, kwargs: the verifier, as of `build_scorer`.   processes: groups at once.
        deadline_s: of one group, from the moment a process is free for it.
    Raises: ConfigError when the verifier cannot be built.
    """

    def __init__(self, *, target: str, kwargs: Mapping[str, Any], processes: int, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._pool = ScorerPool(target=target, kwargs=kwargs, processes=processes)
        self._threads = ThreadPoolExecutor(processes, thread_name_prefix="scorer")
        # In a thread that lives as long as this object, because the kernel ends the process with its thread.
        try:
            self._threads.submit(self._pool.start).result()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the running processes."""
        return self._pool.pids

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        """See `Scoring.score`."""
        responses = [completion.token_ids for completion in completions]
        rewards = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: self._pool.score(prompt, responses, deadline_s=self._deadline_s)
        )
        return _finite(prompt, rewards)

    def close(self) -> None:
        """See `Scoring.close`."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


def _finite(prompt: Prompt, rewards: list[float]) -> list[float]:
    if not all(math.isfinite(reward) for reward in rewards):
        raise NonFiniteError(
            f"rewards of prompt ordinal {prompt.ordinal} are {rewards}, must all be finite", (prompt.ordinal,)
        )
    return rewards
