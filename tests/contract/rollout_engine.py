"""What every `RolloutEngine` must do. Unit tests hold the fake to it, functional tests the real engine.

Each check is a coroutine over a `Subject`, to be run on the engine's own event loop; `CHECKS` lists them in order,
the one that ends the engine last.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import pytest

from megatron_ppo.protocol.errors import EngineDeadError, GenerationError
from megatron_ppo.protocol.ports import RolloutEngine
from megatron_ppo.protocol.trajectory import Completion, SamplingSettings

PROMPT = (3, 4, 5)
LIMIT_S = 60.0
"""A request takes well under a second; only a hang or a very busy machine takes that long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An engine, and the handles that the port leaves to others.

    Attributes:
        publish: serve a new version, without waiting for running requests; returns the version.
        version: what is served now.   running: sequences that are being sampled.
        long_response: tokens that take the engine well over 0.3 s.
        kill: end the engine for good.
    """

    engine: RolloutEngine
    publish: Callable[[], Awaitable[int]]
    version: Callable[[], int]
    running: Callable[[], Awaitable[int]]
    long_response: int
    kill: Callable[[], Awaitable[None]]

    async def generate(
        self, *seeds: int, max_new_tokens: int = 8, deadline_s: float = LIMIT_S
    ) -> list[Completion]:
        """Responses to the one prompt."""
        sampling = SamplingSettings(max_new_tokens=max_new_tokens)
        return await self.engine.generate(PROMPT, seeds=seeds, sampling=sampling, deadline_s=deadline_s)

    async def until_running(self, count: int) -> None:
        """Wait until `count` sequences are being sampled."""
        deadline = time.monotonic() + LIMIT_S
        while await self.running() != count:
            assert time.monotonic() < deadline, f"waited {LIMIT_S} s for {count} running sequences"
            await asyncio.sleep(0.005)


async def one_completion_per_seed_in_order(subject: Subject) -> None:
    """The seed decides the sample, whatever its place in the request."""
    first, second, third = await subject.generate(11, 12, 13)
    again = await subject.generate(13, 11)
    assert [c.token_ids for c in again] == [third.token_ids, first.token_ids]
    assert len({tuple(c.token_ids) for c in (first, second, third)}) == 3


async def completions_are_whole_and_within_their_limit(subject: Subject) -> None:
    """Lengths, finish reasons and log-probs make sense together."""
    for limit in (1, 5):
        for completion in await subject.generate(1, 2, 3, 4, max_new_tokens=limit):
            length = len(completion.token_ids)
            assert 1 <= length <= limit == (length if completion.finish_reason == "length" else limit)
            assert all(token >= 0 for token in completion.token_ids)
            assert all(math.isfinite(nats) and nats <= 0.0 for nats in completion.logprobs)


async def every_token_carries_the_version_that_sampled_it(subject: Subject) -> None:
    """One span of the served version, also after a publish."""
    for publishes in range(3):
        version = await subject.publish() if publishes else subject.version()
        for completion in await subject.generate(1, 2):
            assert [span.version for span in completion.spans] == [version]


async def a_publish_under_running_requests_loses_none_of_them(subject: Subject) -> None:
    """They go on, with both versions in their spans, and newer requests are of the newer version alone."""
    old = subject.version()
    long = subject.long_response
    running = [asyncio.create_task(subject.generate(s, max_new_tokens=long)) for s in (1, 2)]
    await subject.until_running(2)
    await asyncio.sleep(0.1)  # time for some tokens of the old version
    new = await subject.publish()
    [fresh] = await subject.generate(3, max_new_tokens=4)
    assert [span.version for span in fresh.spans] == [new]
    for [completion] in await asyncio.gather(*running):
        assert [span.version for span in completion.spans] == [old, new]


async def a_request_past_its_deadline_fails_and_stops_sampling(subject: Subject) -> None:
    """Nothing goes on in the background, and the engine serves on."""
    start = time.monotonic()
    with pytest.raises(GenerationError, match=r"0\.2 s"):
        await subject.generate(1, 2, max_new_tokens=subject.long_response, deadline_s=0.2)
    assert time.monotonic() - start < LIMIT_S / 2
    await subject.until_running(0)
    assert len(await subject.generate(1)) == 1


async def a_cancelled_request_stops_sampling(subject: Subject) -> None:
    """The collector cancels its rollouts when it stops."""
    task = asyncio.create_task(subject.generate(1, 2, max_new_tokens=subject.long_response))
    await subject.until_running(2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await subject.until_running(0)


async def a_dead_engine_says_so_at_once(subject: Subject) -> None:
    """Not as a failed request, which would be tried again."""
    await subject.kill()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(subject.generate(1), timeout=LIMIT_S / 2)


CHECKS = (
    one_completion_per_seed_in_order,
    completions_are_whole_and_within_their_limit,
    every_token_carries_the_version_that_sampled_it,
    a_publish_under_running_requests_loses_none_of_them,
    a_request_past_its_deadline_fails_and_stops_sampling,
    a_cancelled_request_stops_sampling,
    a_dead_engine_says_so_at_once,
)
