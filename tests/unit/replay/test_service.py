"""Waiting on the buffer: wake-ups are never lost, waits are bounded, failures reach every waiter."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import pytest

from megatron_ppo.protocol.errors import GroupMismatchError, PartDiedError, WaitTimeoutError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Reservation
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import make_group

LONG_S = 40.0  # limit of every wait; a wait looks once more when it ends, which would hide a lost wake-up
PROMPT_S = 20.0  # so everything has to be done well before, which takes milliseconds even on a busy machine


def run_promptly(scenario: Coroutine[Any, Any, None]) -> None:
    """Run `scenario`; a wait that only its time limit ended fails the test."""

    async def limited() -> None:
        async with asyncio.timeout(PROMPT_S):
            await scenario

    asyncio.run(limited())


def new_service(*, age: int = 1, prompts: int = 2, start: int = 0, steps: int = 100) -> ReplayService:
    schedule = AsyncSchedule(
        max_num_steps=steps, max_trajectory_age_steps=age, policy_training_start_step=start
    )
    return ReplayService(
        PromptGroupBuffer(schedule=schedule, num_prompts_per_step=prompts, num_generations_per_prompt=1)
    )


async def commit(service: ReplayService, reservation: Reservation, version: int = 0) -> None:
    await service.commit(
        make_group(
            ordinal=reservation.ordinal,
            target_step=reservation.target_step,
            opened_at_step=reservation.opened_at_step,
            versions=(version,),
            num_generations=1,
        )
    )


def test_take_wakes_with_the_last_commit() -> None:
    async def scenario() -> None:
        service = new_service()
        await service.open(step=0, frontier=1)
        first, second = await service.reserve(limit=2, timeout_s=LONG_S)
        waiting = asyncio.create_task(service.take(target_step=0, timeout_s=LONG_S))
        await commit(service, first)
        await asyncio.sleep(0)
        assert not waiting.done()
        await commit(service, second)
        assert [group.ordinal for group in await waiting] == [0, 1]

    run_promptly(scenario())


def test_reserve_wakes_when_the_window_opens() -> None:
    async def scenario() -> None:
        service = new_service()
        waiting = asyncio.create_task(service.reserve(limit=1, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await service.open(step=0, frontier=0)
        assert [r.target_step for r in await waiting] == [0]

    run_promptly(scenario())


def test_reserve_wakes_when_a_slot_is_released() -> None:
    """Report 3: after a tolerated failure at age 1 the parked loop never woke."""

    async def scenario() -> None:
        service = new_service(prompts=1)
        await service.open(step=0, frontier=0)
        (held,) = await service.reserve(limit=1, timeout_s=LONG_S)
        waiting = asyncio.create_task(service.reserve(limit=1, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await service.release(held, reason="failed")
        assert [r.ordinal for r in await waiting] == [held.ordinal]

    run_promptly(scenario())


def test_a_dropped_prompts_slot_goes_to_another_one() -> None:
    async def scenario() -> None:
        service = new_service(prompts=1)
        await service.open(step=0, frontier=0)
        (reservation,) = await service.reserve(limit=1, timeout_s=LONG_S)
        waiting = asyncio.create_task(service.reserve(limit=1, timeout_s=LONG_S))
        await asyncio.sleep(0)
        await service.drop(reservation, reason="its reward function always hangs")
        await service.drop(reservation, reason="repeated")
        (other,) = await waiting
        assert (reservation.ordinal, other.ordinal) == (0, 1)
        assert other.target_step == reservation.target_step
        assert (await service.status()).pending == {}
        with pytest.raises(GroupMismatchError, match="ordinal is dropped"):
            await commit(service, reservation)

    run_promptly(scenario())


def test_reserve_returns_nothing_after_its_limit() -> None:
    async def scenario() -> None:
        service = new_service()
        start = time.monotonic()
        assert await service.reserve(limit=1, timeout_s=0.05) == []
        assert time.monotonic() - start >= 0.05

    run_promptly(scenario())


def test_take_says_what_it_waited_for() -> None:
    async def scenario() -> None:
        service = new_service()
        await service.open(step=0, frontier=1)
        await service.reserve(limit=1, timeout_s=LONG_S)
        with pytest.raises(
            WaitTimeoutError, match=r"step 0 has 0 of 2 groups; .* ordinals \[0\].* ordinal 0,"
        ):
            await service.take(target_step=0, timeout_s=0.05)

    run_promptly(scenario())


def test_a_timed_out_take_consumes_nothing() -> None:
    async def scenario() -> None:
        service = new_service(prompts=1)
        await service.open(step=0, frontier=0)
        (reservation,) = await service.reserve(limit=1, timeout_s=LONG_S)
        with pytest.raises(WaitTimeoutError):
            await service.take(target_step=0, timeout_s=0.01)
        await commit(service, reservation)
        assert len(await service.take(target_step=0, timeout_s=LONG_S)) == 1

    run_promptly(scenario())


def test_a_cancelled_take_consumes_nothing() -> None:
    async def scenario() -> None:
        service = new_service(prompts=1)
        await service.open(step=0, frontier=0)
        (reservation,) = await service.reserve(limit=1, timeout_s=LONG_S)
        waiting = asyncio.create_task(service.take(target_step=0, timeout_s=LONG_S))
        await asyncio.sleep(0)
        waiting.cancel()
        await commit(service, reservation)
        assert (await service.status()).size == 1

    run_promptly(scenario())


def test_the_collectors_failure_reaches_present_and_later_waits() -> None:
    """Report 1: the learner polled an empty buffer for hours."""

    async def scenario() -> None:
        service = new_service()
        await service.open(step=0, frontier=1)
        waiting = asyncio.create_task(service.take(target_step=0, timeout_s=LONG_S))
        await asyncio.sleep(0)
        start = time.monotonic()
        await service.fail("prompt ordinal 3: engine is gone")
        await service.fail("a later, secondary failure")
        with pytest.raises(PartDiedError, match="ordinal 3: engine is gone"):
            await waiting
        assert time.monotonic() - start < 1.0  # at once, not at the time limit
        with pytest.raises(PartDiedError, match="engine is gone"):
            await service.take(target_step=0, timeout_s=LONG_S)
        with pytest.raises(PartDiedError, match="engine is gone"):
            await service.reserve(limit=1, timeout_s=LONG_S)

    run_promptly(scenario())


def test_a_step_beyond_the_window_is_an_error_at_once() -> None:
    async def scenario() -> None:
        service = new_service()
        await service.open(step=0, frontier=1)
        with pytest.raises(GroupMismatchError, match="beyond the frontier"):
            await service.take(target_step=5, timeout_s=LONG_S)

    run_promptly(scenario())


def test_snapshot_and_restore_continue_with_the_same_prompts() -> None:
    async def scenario() -> None:
        service = new_service()
        await service.open(step=0, frontier=1)
        reservations = await service.reserve(limit=4, timeout_s=LONG_S)
        for reservation in reservations[:3]:
            await commit(service, reservation)
        await service.take(target_step=0, timeout_s=LONG_S)
        text = await service.snapshot()

        resumed = new_service()
        await resumed.restore(text, resume_step=1)
        await resumed.open(step=1, frontier=2)
        again = await resumed.reserve(limit=4, timeout_s=LONG_S)
        assert [(r.ordinal, r.target_step) for r in again] == [(3, 1), (4, 2), (5, 2)]
        assert await resumed.trained_ordinals() == (0, 1)
        assert (await resumed.diagnostics()).targets == (1,)

    run_promptly(scenario())


def test_a_missing_snapshot_is_an_empty_buffer() -> None:
    """R13."""

    async def scenario() -> None:
        service = new_service()
        await service.restore(None, resume_step=3)
        await service.open(step=3, frontier=4)
        (reservation,) = await service.reserve(limit=1, timeout_s=LONG_S)
        assert (reservation.ordinal, reservation.target_step) == (0, 3)

    run_promptly(scenario())


def test_a_resumed_step_does_not_wait_for_the_step_after_it() -> None:
    """R9: target s is complete, s + 1 is absent; training starts, and s + 1 gets its producer."""

    async def scenario() -> None:
        service = new_service(prompts=1)
        await service.open(step=0, frontier=1)
        for reservation in await service.reserve(limit=1, timeout_s=LONG_S):
            await commit(service, reservation)
        text = await service.snapshot()
        resumed = new_service(prompts=1)
        await resumed.restore(text, resume_step=0)
        await resumed.open(step=0, frontier=1)
        assert len(await resumed.take(target_step=0, timeout_s=LONG_S)) == 1
        await resumed.open(step=1, frontier=2)
        (reservation,) = await resumed.reserve(limit=1, timeout_s=LONG_S)
        assert reservation.target_step == 1

    run_promptly(scenario())


def test_three_workers_may_commit_at_once() -> None:
    """B11."""

    async def scenario() -> None:
        service = new_service(prompts=3)
        await service.open(step=0, frontier=1)
        reservations = await service.reserve(limit=3, timeout_s=LONG_S)
        await asyncio.gather(*(commit(service, reservation) for reservation in reservations))
        assert (await service.status()).size == 3

    run_promptly(scenario())


async def jitter(rng: random.Random) -> None:
    """Yield to the event loop a random number of times, so that every schedule is another interleaving."""
    for _ in range(rng.choice((0, 0, 1, 2, 5))):
        await asyncio.sleep(0)


async def worker(service: ReplayService, rng: random.Random, version: list[int]) -> None:
    while True:
        try:
            reservations = await service.reserve(limit=rng.randint(1, 3), timeout_s=LONG_S)
        except PartDiedError:
            return
        if not reservations:
            return
        await jitter(rng)
        for reservation in reservations:
            luck = rng.random()
            if luck < 0.2:
                await service.release(reservation, reason="failed")
            elif luck < 0.25:
                await service.drop(reservation, reason="failed for good")
            else:
                sampled_by = version[0]
                await jitter(rng)
                await commit(service, reservation, sampled_by)


async def one_schedule(seed: int) -> None:
    rng = random.Random(seed)
    age, start, steps = rng.randint(0, 3), rng.randint(0, 2), rng.randint(1, 5)
    schedule = AsyncSchedule(
        max_num_steps=steps, max_trajectory_age_steps=age, policy_training_start_step=start
    )
    prompts = rng.randint(1, 3)
    service = new_service(age=age, prompts=prompts, start=start, steps=steps)
    version = [0]
    workers = [
        asyncio.create_task(worker(service, random.Random(f"{seed}/{i}"), version))
        for i in range(rng.randint(1, 4))
    ]
    trained: list[int] = []
    for step in range(steps):
        version[0] = schedule.version_at(step)
        await jitter(rng)
        await service.open(step=step, frontier=schedule.frontier(step))
        groups = await service.take(target_step=step, timeout_s=LONG_S)
        assert all(0 <= schedule.version_at(step) - group.min_version <= age for group in groups)
        trained += [group.ordinal for group in groups]
    assert len(trained) == len(set(trained)) == steps * prompts
    await service.fail("end of the test")
    await asyncio.gather(*workers)


@pytest.mark.parametrize(
    "seeds", [range(300), pytest.param(range(300, 1000), marks=pytest.mark.slow)], ids=str
)
def test_no_wake_up_is_lost_in_random_schedules(seeds: range) -> None:
    for seed in seeds:
        run_promptly(one_schedule(seed))
