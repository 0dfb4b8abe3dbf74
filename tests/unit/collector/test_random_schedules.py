"""Collector and replay buffer under random interleavings: whoever waits is woken, and no prompt is lost.

Every wait of the buffer may last longer than a whole schedule may, so that a lost wake-up fails the test and is not
hidden by a wait that looks once more when its time is up.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence

import pytest

from megatron_ppo.protocol.errors import GenerationError, PartDiedError, ScoringError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, Prompt, PromptGroup
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine
from tests.unit.collector.random_collector import random_collector

LONG_S = 40.0
PROMPT_S = 20.0  # a schedule takes milliseconds, also on a loaded machine
GENERATIONS = 2


async def jitter(rng: random.Random) -> None:
    """Yield to the event loop a random number of times, so that every schedule is another interleaving."""
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        await asyncio.sleep(0)


class UnreliableEngine(FakeEngine):
    """Answers after a random time, or fails."""

    def __init__(self, rng: random.Random, *, failure_rate: float) -> None:
        super().__init__(length_of=lambda seed, _: 1 + seed % 4)
        self._rng = rng
        self._failure_rate = failure_rate

    async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
        await jitter(self._rng)
        if self._rng.random() < self._failure_rate:
            raise GenerationError("now and then")
        return await super().generate(*args, **kwargs)  # type: ignore[arg-type]


class UnreliableScoring:
    """A `Scoring` without threads: scores after a random time, or fails."""

    def __init__(self, rng: random.Random, *, failure_rate: float) -> None:
        self._rng = rng
        self._failure_rate = failure_rate
        self.closed = False

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        await jitter(self._rng)
        if self._rng.random() < self._failure_rate:
            raise ScoringError(f"prompt {prompt.ordinal}: now and then")
        return [float(len(completion.token_ids)) for completion in completions]

    def close(self) -> None:
        self.closed = True


class Scene:
    """Everything of one random schedule."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.steps, self.prompts = rng.randint(1, 4), rng.randint(1, 3)
        self.schedule = AsyncSchedule(
            max_num_steps=self.steps,
            max_trajectory_age_steps=rng.randint(0, 3),
            policy_training_start_step=rng.randint(0, 2),
        )
        self.buffer = PromptGroupBuffer(
            schedule=self.schedule,
            num_prompts_per_step=self.prompts,
            num_generations_per_prompt=GENERATIONS,
        )
        self.replay = ReplayService(self.buffer)
        failure_rate = rng.choice((0.0, 0.1, 0.3))
        self.engine = UnreliableEngine(random.Random(f"{seed}/engine"), failure_rate=failure_rate)
        self.scoring = UnreliableScoring(random.Random(f"{seed}/scoring"), failure_rate=failure_rate)
        # A pause waits for the request that is open, so where there are pauses it has to be short.
        self.pauses = rng.random() < 0.5
        self.collector = random_collector(
            rng,
            replay=self.replay,
            engine=self.engine,
            scoring=self.scoring,
            num_generations=GENERATIONS,
            seed=seed,
            deadline_s=LONG_S,
            most_retries=1,
            reserve_timeout_s=0.002 if self.pauses else LONG_S,
        )

    async def train(self) -> list[PromptGroup]:
        """What the learner does."""
        groups: list[PromptGroup] = []
        for step in range(self.steps):
            version = self.schedule.version_at(step)
            if version > self.engine.version:
                self.engine.publish(version)
            await jitter(self.rng)
            await self.replay.open(step=step, frontier=self.schedule.frontier(step))
            groups += await self.replay.take(target_step=step, timeout_s=LONG_S)
        return groups

    async def disturb(self) -> None:
        """Pauses and drains at random moments, each followed by a resume."""
        rng = random.Random(self.rng.random())
        while True:
            for _ in range(rng.randint(1, 40)):
                await asyncio.sleep(0)
            act = self.collector.drain if rng.random() < 0.5 else self.collector.pause
            await act(timeout_s=LONG_S)
            await jitter(rng)
            await self.collector.resume()


async def whole_run(seed: int) -> None:
    scene = Scene(seed)
    collecting = asyncio.create_task(scene.collector.run())
    disturbing = asyncio.create_task(scene.disturb()) if scene.pauses else None
    groups = await scene.train()
    if disturbing is not None:
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        assert disturbing.cancelled(), disturbing.exception()
        await scene.collector.resume()
    ordinals = sorted(group.ordinal for group in groups)
    assert ordinals == list(range(scene.steps * scene.prompts))  # each once, none skipped
    await scene.replay.fail("end of the test")  # wakes a request that would wait for LONG_S
    await asyncio.gather(collecting, return_exceptions=True)
    assert isinstance(collecting.exception(), PartDiedError)
    scene.buffer.ledger.check()
    assert scene.scoring.closed and scene.collector.stats().in_flight == 0


async def stopped_run(seed: int) -> None:
    scene = Scene(seed)
    collecting = asyncio.create_task(scene.collector.run())
    training = asyncio.create_task(scene.train())
    for _ in range(scene.rng.randint(0, 60)):
        await asyncio.sleep(0)
    stopping = asyncio.create_task(scene.collector.stop(timeout_s=LONG_S))
    if not scene.pauses:  # the request that is open ends by itself where it is short
        await jitter(scene.rng)
        await scene.replay.fail("end of the test")
    await stopping
    training.cancel()
    await asyncio.gather(collecting, training, return_exceptions=True)
    status = await scene.replay.status()
    assert status.reserved == {}  # nothing is held by a collector that is gone
    scene.buffer.ledger.check()


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 3000), marks=pytest.mark.slow)], ids=str
)
def test_no_wake_up_is_lost_between_collector_and_buffer_in_random_schedules(seeds: range) -> None:
    for seed in seeds:
        asyncio.run(asyncio.wait_for(whole_run(seed), PROMPT_S))


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 2000), marks=pytest.mark.slow)], ids=str
)
def test_a_stop_at_any_moment_is_acknowledged_and_leaves_no_reservation(seeds: range) -> None:
    for seed in seeds:
        asyncio.run(asyncio.wait_for(stopped_run(seed), PROMPT_S))
