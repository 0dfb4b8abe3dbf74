"""The fakes do what the real parts do: the same checks run on vLLM in functional/inference/test_engine_contract.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch

from megatron_ppo.testing.fakes import FakeEngine
from megatron_ppo.testing.loop_fakes import FakeGroupSource, StepOrder
from tests.contract import group_source, rollout_engine
from tests.contract.group_source import GENERATIONS, PROMPTS, SCHEDULE
from tests.unit.loop import fake_run
from tests.unit.loop.one_process import live_collection


@pytest.mark.parametrize("check", rollout_engine.CHECKS)
def test_the_fake_engine_keeps_the_contract_of_engines(check: Callable[..., Any]) -> None:
    # 40 tokens of 20 ms: long enough to be interrupted, and short ones take no longer than 0.2 s.
    engine = FakeEngine(
        token_latency_s=0.02, length_of=lambda seed, limit: limit if limit > 8 else 1 + seed % limit
    )

    async def publish() -> int:
        engine.publish(engine.version + 1)
        return engine.version

    async def running() -> int:
        return engine.num_running

    async def kill() -> None:
        engine.die("killed by the test")

    subject = rollout_engine.Subject(
        engine=engine,
        publish=publish,
        version=lambda: engine.version,
        running=running,
        long_response=40,
        kill=kill,
    )
    asyncio.run(check(subject))


def learn_through(order: StepOrder) -> Callable[[int], None]:
    """Everything that the order expects between a take and the next window."""

    def learn(step: int) -> None:
        order.valued()
        order.scored()
        order.critic_updated()
        if SCHEDULE.trains_policy(step):
            order.policy_updated()
            order.pushed(SCHEDULE.version_at(step + 1))

    return learn


@contextmanager
def subject_over(kind: str) -> Iterator[group_source.Subject]:
    torch.set_num_threads(1)
    assert (PROMPTS, GENERATIONS) == (fake_run.PROMPTS, fake_run.GENERATIONS)
    order = StepOrder(schedule=SCHEDULE, ppo_epochs=1)
    order.pushed(0)
    work = fake_run.WorkLog()
    learn = learn_through(order)
    if kind == "fake":
        source: Any = FakeGroupSource(
            order,
            schedule=SCHEDULE,
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=GENERATIONS,
        )
        context: Any = nullcontext(source)
    elif kind == "instant":
        context = nullcontext(fake_run.InstantCollection(order, schedule=SCHEDULE, work=work))
    else:
        context = live_collection(order, schedule=SCHEDULE, work=work, engine=FakeEngine())
    with context as source:

        def learn_and_publish(step: int) -> None:
            learn(step)
            version = SCHEDULE.version_at(step + 1)
            if kind == "live" and version > source.engine.version:
                source.call(_publish(source.engine, version))

        yield group_source.Subject(source=source, fill=lambda version: None, learn=learn_and_publish)
        if kind == "instant":
            source.close()


async def _publish(engine: FakeEngine, version: int) -> None:
    engine.publish(version)


@pytest.mark.parametrize("kind", ["fake", "instant", "live"])
@pytest.mark.parametrize("check", group_source.CHECKS)
def test_sources_of_the_unit_tests_keep_the_contract_of_group_sources(
    kind: str, check: Callable[[group_source.Subject], None]
) -> None:
    with subject_over(kind) as subject:
        check(subject)
