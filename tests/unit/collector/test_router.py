"""Routing over replicas, seeds, and the collector's time-keeping."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.collector.router import ReplicaRouter
from megatron_ppo.collector.seeds import sample_seed
from megatron_ppo.collector.stats import StatsRecorder
from megatron_ppo.protocol.errors import EngineAsideError, GenerationError
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings
from megatron_ppo.testing.fakes import FakeEngine, prompt_ids

no_deadline = settings(deadline=None)  # the machine may be busy; time is not what these tests check

SEEDS_OF_RUN_42 = [4609882205794134092, 1539417076882243527]
SAMPLING = SamplingSettings(max_new_tokens=4)


async def request(router: ReplicaRouter, ordinal: int, samples: int = 1) -> None:
    seeds = [sample_seed(0, ordinal, i) for i in range(samples)]
    while True:  # as whoever rolls out does
        await router.available()
        with suppress(EngineAsideError):
            await router.generate(prompt_ids(ordinal), seeds=seeds, sampling=SAMPLING, deadline_s=30.0)
            return


def test_requests_go_to_the_replica_with_the_fewest_running_sequences() -> None:
    async def scenario() -> None:
        engines = [FakeEngine(), FakeEngine(), FakeEngine()]
        for engine in engines:
            engine.hanging.update(tuple(prompt_ids(ordinal)) for ordinal in range(9))
        router = ReplicaRouter(engines)
        tasks = [
            asyncio.create_task(request(router, ordinal, samples=s))
            for ordinal, s in enumerate((5, 1, 2, 1, 1))
        ]
        await asyncio.sleep(0)
        assert router.load == (5, 2, 3)  # the last one: 2 and 2 are equal, the third was idle longer
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert router.load == (0, 0, 0)  # also after cancellation

    asyncio.run(scenario())


def test_light_load_is_spread_over_all_replicas() -> None:
    async def scenario() -> None:
        engines = [FakeEngine(), FakeEngine()]
        router = ReplicaRouter(engines)
        for ordinal in range(6):
            await request(router, ordinal)
        assert [len(engine.requests) for engine in engines] == [3, 3]

    asyncio.run(scenario())


def test_a_failed_request_frees_its_load() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.fail_next(1)
        router = ReplicaRouter([engine])
        with pytest.raises(GenerationError):
            await request(router, 0)
        assert router.load == (0,)

    asyncio.run(scenario())


def test_a_request_that_dies_with_its_engine_is_an_attempt_that_failed_and_the_next_goes_elsewhere() -> None:
    async def scenario() -> None:
        engines = [FakeEngine(), FakeEngine()]
        router = ReplicaRouter(engines, look_s=0.001)
        engines[0].die("its core was killed")
        with pytest.raises(GenerationError, match="the engine died during generation: its core was killed"):
            await request(router, 0)
        assert router.down == (0,) and router.load == (0, 0)
        for ordinal in range(4):
            await request(router, ordinal)
        assert len(engines[1].requests) == 4
        engines[0].rebuild(version=1)
        while router.down:
            await asyncio.sleep(0.001)
        for ordinal in range(4):
            await request(router, ordinal)
        assert len(engines[0].requests) == 1 + 2
        await router.close()

    asyncio.run(scenario())


def test_without_a_replica_that_serves_everybody_waits_and_nobody_fails() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        router = ReplicaRouter([engine], look_s=0.001)
        engine.die("its core was killed")
        with pytest.raises(GenerationError):
            await request(router, 0)
        waiting = [asyncio.create_task(router.available()), asyncio.create_task(request(router, 1))]
        _, pending = await asyncio.wait(waiting, timeout=0.05)
        assert len(pending) == 2 and len(engine.requests) == 1
        engine.rebuild(version=1)
        await asyncio.wait_for(asyncio.gather(*waiting), 30)
        assert len(engine.requests) == 2
        await router.close()

    asyncio.run(scenario())


def test_a_whole_step_that_dies_with_its_engine_is_asked_for_again_when_it_serves() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        router = ReplicaRouter([engine], look_s=0.001)
        groups = [GroupRequest(prompt_token_ids=tuple(prompt_ids(i)), seeds=(1, 2)) for i in range(3)]
        first = await router.generate_groups(groups, sampling=SAMPLING, deadline_s=30.0)
        engine.die("its core was killed")
        with pytest.raises(GenerationError, match="the engine died during generation"):
            await router.generate_groups(groups, sampling=SAMPLING, deadline_s=30.0)
        assert router.load == (0,)
        with pytest.raises(EngineAsideError, match="no engine serves"):
            await router.generate_groups(groups, sampling=SAMPLING, deadline_s=30.0)
        engine.rebuild(version=0)
        await router.available()
        assert await router.generate_groups(groups, sampling=SAMPLING, deadline_s=30.0) == first
        await router.close()

    asyncio.run(scenario())


def test_a_closed_router_looks_after_nobody() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        router = ReplicaRouter([engine], look_s=0.001)
        engine.die("its core was killed")
        with pytest.raises(GenerationError):
            await request(router, 0)
        await router.close()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(scenario())


def test_a_router_needs_a_replica() -> None:
    with pytest.raises(ValueError, match="at least one engine replica"):
        ReplicaRouter([])


@no_deadline
@given(st.integers(0, 2**64), st.integers(0, 2**40), st.integers(0, 1000))
def test_seeds_fit_into_63_bits_and_depend_on_every_part(run_seed: int, ordinal: int, sample: int) -> None:
    seed = sample_seed(run_seed, ordinal, sample)
    assert 0 <= seed < 2**63
    assert seed == sample_seed(run_seed, ordinal, sample)
    neighbours = {
        sample_seed(run_seed + 1, ordinal, sample),
        sample_seed(run_seed, ordinal + 1, sample),
        sample_seed(run_seed, ordinal, sample + 1),
    }
    assert seed not in neighbours and len(neighbours) == 3


def test_seeds_of_deterministic_runs_depend_on_the_step_too() -> None:
    seeds = {sample_seed(42, 7, 3), *(sample_seed(42, 7, 3, step=step) for step in range(100))}
    assert len(seeds) == 101
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_seeds_are_the_same_in_every_process_and_version() -> None:
    """Fixed numbers: a resumed run must draw what the first one drew."""
    assert [sample_seed(42, 0, 0), sample_seed(42, 7, 3)] == SEEDS_OF_RUN_42


def test_busy_time_is_the_union_of_overlapping_rollouts() -> None:
    async def scenario() -> None:
        recorder = StatsRecorder()

        async def rollout(delay_s: float) -> None:
            await asyncio.sleep(delay_s)
            with recorder.generating():
                await asyncio.sleep(0.1)

        await asyncio.gather(rollout(0.0), rollout(0.05))
        await rollout(0.1)  # 0.1 s idle in between does not count
        stats = recorder.snapshot(in_flight=0)
        assert stats.generation_group_s >= 0.3
        # Union: 0.15 + 0.1; sleeping may be late by any amount, so only the order of the sums is exact.
        assert 0.25 <= stats.generation_busy_s < stats.generation_group_s

    asyncio.run(scenario())


class StandingAside(FakeEngine):
    """Turns requests away while `aside`, as an engine does that a publication has left out."""

    aside = False

    async def serves(self) -> bool:
        return not self.aside and await super().serves()

    async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
        if self.aside:
            raise EngineAsideError("the other engines serve a version that this one does not have yet")
        return await super().generate(*args, **kwargs)  # type: ignore[arg-type]


def test_a_replica_that_stands_aside_gets_nothing_until_it_serves_and_no_request_fails() -> None:
    async def scenario() -> None:
        engines = [StandingAside(), StandingAside()]
        router = ReplicaRouter(engines, look_s=0.01)
        engines[0].aside = True
        for ordinal in range(4):
            await request(router, ordinal)
        assert [len(engine.requests) for engine in engines] == [0, 4] and router.down == (0,)
        assert router.load == (0, 0)
        [answers] = await router.generate_groups(
            [GroupRequest(prompt_token_ids=(1,), seeds=(7,))], sampling=SAMPLING, deadline_s=30.0
        )
        assert len(answers) == 1
        engines[0].aside = False
        await asyncio.sleep(0.1)
        assert router.down == ()
        for ordinal in range(4):
            await request(router, ordinal)
        assert len(engines[0].requests) >= 2
        await router.close()

    asyncio.run(scenario())


def test_a_request_waits_while_all_replicas_stand_aside() -> None:
    async def scenario() -> None:
        engines = [StandingAside(), StandingAside()]
        router = ReplicaRouter(engines, look_s=0.01)
        for engine in engines:
            engine.aside = True
        asked = asyncio.create_task(request(router, 1))
        await asyncio.sleep(0.1)
        assert router.down == (0, 1) and not asked.done()
        engines[1].aside = False
        await asyncio.wait_for(asked, 30.0)
        await router.close()

    asyncio.run(scenario())
