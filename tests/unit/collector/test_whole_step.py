"""StepBatches: one call of the engine per step, all or nothing, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megatron_ppo.collector.whole_step import StepBatches
from megatron_ppo.protocol.errors import EngineDeadError, GenerationError
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings
from megatron_ppo.testing.fakes import FakeEngine, prompt_ids

SAMPLING = SamplingSettings(max_new_tokens=4)
LONG_S = 30.0


class Engine(FakeEngine):
    """Keeps the calls, and may hold them back."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[GroupRequest]] = []
        self.aborted = 0
        self.held = asyncio.Event()
        self.held.set()

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        self.calls.append(list(requests))
        try:
            await self.held.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        return await super().generate_groups(requests, sampling=sampling, deadline_s=deadline_s)


def ask(batches: StepBatches, ordinal: int) -> asyncio.Task[list[Completion]]:
    return asyncio.create_task(
        batches.generate(
            prompt_ids(ordinal), seeds=[2 * ordinal, 2 * ordinal + 1], sampling=SAMPLING, deadline_s=LONG_S
        )
    )


def ordinals(call: Sequence[GroupRequest]) -> list[int]:
    return [request.seeds[0] // 2 for request in call]


def test_the_engine_is_asked_when_the_step_is_complete_and_everyone_gets_their_own_answer() -> None:
    async def scenario() -> None:
        engine = Engine()
        batches = StepBatches(engine)
        for first in (0, 3):
            batches.expect(3)
            asked = [ask(batches, first + index) for index in range(3)]
            answers = await asyncio.gather(*asked)
            for index, answer in enumerate(answers):
                alone = await FakeEngine().generate(
                    prompt_ids(first + index),
                    seeds=[2 * (first + index), 2 * (first + index) + 1],
                    sampling=SAMPLING,
                    deadline_s=LONG_S,
                )
                assert answer == alone
        assert [ordinals(call) for call in engine.calls] == [[0, 1, 2], [3, 4, 5]]

    asyncio.run(scenario())


def test_an_incomplete_step_waits() -> None:
    async def scenario() -> None:
        engine = Engine()
        batches = StepBatches(engine)
        batches.expect(2)
        first = ask(batches, 0)
        await asyncio.sleep(0.02)
        assert engine.calls == [] and not first.done()
        await asyncio.gather(first, ask(batches, 1))
        assert len(engine.calls) == 1

    asyncio.run(scenario())


def test_a_failed_step_fails_for_everyone_and_is_tried_again_as_the_same_batch() -> None:
    async def scenario() -> None:
        engine = Engine()
        batches = StepBatches(engine)
        batches.expect(3)
        engine.fail_next(1)
        failures = await asyncio.gather(*(ask(batches, i) for i in range(3)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [GenerationError] * 3
        await asyncio.gather(*(ask(batches, i) for i in range(3)))
        assert engine.calls[0] == engine.calls[1]

    asyncio.run(scenario())


def test_a_dead_engine_is_not_taken_for_a_failed_request() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.die("gone")
        batches = StepBatches(engine)
        batches.expect(2)
        failures = await asyncio.gather(*(ask(batches, i) for i in range(2)), return_exceptions=True)
        assert [type(failure) for failure in failures] == [EngineDeadError] * 2

    asyncio.run(scenario())


def test_a_cancelled_group_ends_the_batch_in_the_engine_too() -> None:
    async def scenario() -> None:
        engine = Engine()
        engine.held.clear()
        batches = StepBatches(engine)
        batches.expect(2)
        first, second = ask(batches, 0), ask(batches, 1)
        while not engine.calls:
            await asyncio.sleep(0.001)
        first.cancel()
        outcome = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), LONG_S)
        assert isinstance(outcome[0], asyncio.CancelledError)
        assert isinstance(outcome[1], GenerationError)
        assert engine.aborted == 1
        engine.held.set()
        batches.expect(1)
        assert len(await ask(batches, 2)) == 2

    asyncio.run(scenario())


def test_a_group_that_is_cancelled_before_the_step_is_complete_is_forgotten() -> None:
    async def scenario() -> None:
        engine = Engine()
        batches = StepBatches(engine)
        batches.expect(2)
        first = ask(batches, 0)
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await asyncio.gather(ask(batches, 1), ask(batches, 2))
        assert [ordinals(call) for call in engine.calls] == [[1, 2]]

    asyncio.run(scenario())


def test_a_step_is_not_announced_inside_of_another_one() -> None:
    async def scenario() -> None:
        batches = StepBatches(Engine())
        batches.expect(2)
        first = ask(batches, 0)
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="3 groups are announced while a step of 2 is not finished"):
            batches.expect(3)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)

    asyncio.run(scenario())
