"""Fakes of what the collector needs: engine, reward function, prompt stream. They import no torch.

Invariant: a fake accepts exactly what the real part accepts; a call that the real part would refuse, or would
    answer
wrongly, raises `CallerError`.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from array import array
from collections.abc import Callable, Sequence

from megatron_ppo.protocol.errors import EngineDeadError, GenerationError
from megatron_ppo.protocol.trajectory import (
    Completion,
    GroupRequest,
    Prompt,
    PromptGroup,
    SamplingSettings,
    Trajectory,
    VersionSpan,
    logprob_array,
    token_array,
)

EOS_ID = 2
FIRST_ID, LAST_ID = 3, 63


class CallerError(AssertionError):
    """The caller broke the contract of a port."""


def require(condition: bool, message: str) -> None:
    """Raise CallerError with `message` unless `condition` holds."""
    if not condition:
        raise CallerError(message)


def skewed_length(seed: int, max_new_tokens: int) -> int:
    """Response length, at least 1: most are short, a few reach the limit, as in real rollouts."""
    return min(max_new_tokens, 1 + int(random.Random(seed).expovariate(1.0) * max_new_tokens / 3))


class FakeEngine:
    """A `RolloutEngine` and `WholeStepEngine` without a model: tokens depend on the seed only, versions on `publish`.

    Args:
        token_latency_s: time per token of a sequence; 0 still yields to the event loop at every token.
        length_of: (seed, max_new_tokens) -> response length.

    Attributes:
        failing, hanging: prompts (token ids) whose requests fail, or run into their deadline.
    """

    def __init__(
        self,
        *,
        token_latency_s: float = 0.0,
        length_of: Callable[[int, int], int] = skewed_length,
    ) -> None:
        self.failing: set[tuple[int, ...]] = set()
        self.hanging: set[tuple[int, ...]] = set()
        self.num_running = 0
        self.max_running = 0
        self.requests: list[tuple[int, ...]] = []
        self._version = 0
        self._token_latency_s = token_latency_s
        self._length_of = length_of
        self._failures_left = 0
        self._death: str | None = None
        self._lives = 0

    @property
    def version(self) -> int:
        """Weight version that samples the next token."""
        return self._version

    def publish(self, version: int) -> None:
        """Serve `version` from the next token on, also in running requests."""
        require(version > self._version, f"version {version} is published after {self._version}")
        self._version = version

    def fail_next(self, count: int) -> None:
        """Let the next `count` requests fail."""
        self._failures_left = count

    def die(self, cause: str) -> None:
        """Stop serving: running and later requests raise EngineDeadError."""
        self._death = cause
        self._lives += 1

    def rebuild(self, version: int) -> None:
        """Serve again, with these weights; what ran when it died stays dead."""
        require(self._death is not None, "an engine that is alive is not built again")
        self._death, self._version = None, version

    async def serves(self) -> bool:
        """See `EngineReplica.serves`."""
        return self._death is None

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`."""
        self._check_call(prompt_token_ids, seeds, sampling, deadline_s)
        prompt = tuple(prompt_token_ids)
        self.requests.append(prompt)
        self.num_running += len(seeds)
        self.max_running = max(self.max_running, self.num_running)
        try:
            async with asyncio.timeout(deadline_s):
                if prompt in self.hanging:
                    await asyncio.Event().wait()
                self._maybe_fail(prompt)
                return await asyncio.gather(*(self._sample(seed, sampling, self._lives) for seed in seeds))
        except TimeoutError as error:
            raise GenerationError(f"the request did not finish within {deadline_s} s") from error
        finally:
            self.num_running -= len(seeds)

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """See `WholeStepEngine.generate_groups`."""
        require(len(requests) > 0, "a call without requests")
        return await asyncio.gather(
            *(
                self.generate(
                    request.prompt_token_ids, seeds=request.seeds, sampling=sampling, deadline_s=deadline_s
                )
                for request in requests
            )
        )

    def _check_call(
        self, prompt: Sequence[int], seeds: Sequence[int], sampling: SamplingSettings, deadline_s: float
    ) -> None:
        require(len(prompt) > 0 and all(token >= 0 for token in prompt), f"bad prompt token ids: {prompt}")
        require(len(seeds) > 0, "a request needs at least one seed")
        require(len(set(seeds)) == len(seeds), f"equal seeds give equal samples: {seeds}")
        require(all(0 <= seed < 2**63 for seed in seeds), f"seeds must lie in [0, 2**63), got {seeds}")
        require(sampling.max_new_tokens >= 1, f"max_new_tokens must be >= 1, got {sampling.max_new_tokens}")
        require(deadline_s > 0, f"deadline_s must be > 0, got {deadline_s}")

    def _maybe_fail(self, prompt: tuple[int, ...]) -> None:
        if self._death is not None:
            raise EngineDeadError(self._death)
        if self._failures_left:
            self._failures_left -= 1
            raise GenerationError("this request was told to fail")
        if prompt in self.failing:
            raise GenerationError(f"requests for the prompt {prompt} fail")

    async def _sample(self, seed: int, sampling: SamplingSettings, life: int) -> Completion:
        length = self._length_of(seed, sampling.max_new_tokens)
        ended_by_eos = length < sampling.max_new_tokens
        rng = random.Random(seed)
        tokens, versions = [], []
        for position in range(length):
            await asyncio.sleep(self._token_latency_s)
            if self._lives != life:
                raise EngineDeadError(self._death or "the engine died and was built again")
            last = position == length - 1
            tokens.append(EOS_ID if last and ended_by_eos else rng.randint(FIRST_ID, LAST_ID))
            versions.append(self._version)
        return Completion(
            token_ids=token_array(tokens),
            logprobs=logprob_array([-0.1 - rng.random() for _ in tokens]),
            finish_reason="stop" if ended_by_eos else "length",
            spans=spans_of(versions),
        )


def spans_of(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Spans of equal consecutive weight versions, one version per token."""
    cuts = [0, *(i for i in range(1, len(versions)) if versions[i] != versions[i - 1]), len(versions)]
    return tuple(
        VersionSpan(version=versions[start], start=start, end=end) for start, end in itertools.pairwise(cuts)
    )


class FakeScorer:
    """A `Scorer`: by default 1.0 for a response that ended by itself.

    Args:
        reward_of: (prompt, response token ids) -> reward; may raise.
    """

    def __init__(self, reward_of: Callable[[Prompt, Sequence[int]], float] | None = None) -> None:
        self._reward_of = reward_of or (lambda _, response: float(response[-1] == EOS_ID))
        self.num_calls = 0

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """See `Scorer`."""
        require(len(response_token_ids) > 0, f"an empty response to ordinal {prompt.ordinal} is to be scored")
        self.num_calls += 1
        return self._reward_of(prompt, response_token_ids)


class FakePromptStream:
    """A `PromptStream` of `period` different prompts that repeats for ever."""

    def __init__(self, *, period: int = 1_000_000) -> None:
        self._period = period

    def prompt_at(self, ordinal: int) -> Prompt:
        """See `PromptStream.prompt_at`."""
        require(ordinal >= 0, f"ordinals count from 0, got {ordinal}")
        number = ordinal % self._period
        return Prompt(ordinal=ordinal, token_ids=prompt_ids(number), text=f"{number}=", answer=str(number))


def prompt_ids(ordinal: int) -> array[int]:
    """Token ids of `FakePromptStream`'s prompt, one token per decimal digit."""
    return token_array([1, *(FIRST_ID + int(digit) for digit in str(ordinal))])


def make_group(
    *,
    ordinal: int,
    target_step: int,
    opened_at_step: int = 0,
    versions: Sequence[int] = (0, 0),
    num_generations: int = 2,
    duration_s: float = 1.0,
    reward: float = 1.0,
) -> PromptGroup:
    """A group whose every response was sampled by `versions`, one version per token."""
    completion = Completion(
        token_ids=token_array([FIRST_ID + i % (LAST_ID - FIRST_ID) for i in range(len(versions))]),
        logprobs=logprob_array([-0.25 - 0.125 * (i % 4) for i in range(len(versions))]),
        finish_reason="length",
        spans=spans_of(versions),
    )
    trajectory = Trajectory(prompt_token_ids=prompt_ids(ordinal), completion=completion, reward=reward)
    return PromptGroup(
        ordinal=ordinal,
        target_step=target_step,
        opened_at_step=opened_at_step,
        trajectories=(trajectory,) * num_generations,
        started_at=1000.0,
        finished_at=1000.0 + duration_s,
    )
