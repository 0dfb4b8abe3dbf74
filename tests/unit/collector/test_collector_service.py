"""The collector as its process builds it, in this process: parts by name, acknowledged calls, signs of life."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.collector.scoring import ScoringSettings
from megatron_ppo.collector.service import CollectorService
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.ports import RolloutEngine
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup, SamplingSettings
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.telemetry.heartbeat import Heartbeat
from megatron_ppo.testing.fakes import FakeEngine

PROMPTS, GENERATIONS, STEPS = 3, 2, 4
LONG_S = 30.0  # far above what a test takes, also on a loaded machine


class Replica(FakeEngine):
    """An engine that never dies."""

    async def serves(self) -> bool:
        return True


def new_replay() -> ReplayService:
    return ReplayService(
        PromptGroupBuffer(
            schedule=AsyncSchedule(max_num_steps=STEPS),
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=GENERATIONS,
        )
    )


def new_service(replay: ReplayService, **changes: Any) -> CollectorService:
    parts: dict[str, Any] = {
        "engines": [Replica()],
        "whole_steps": False,
        "scoring": ScoringSettings(
            target="megatron_ppo.testing.fakes.FakeScorer",
            kwargs={},
            isolated=False,
            concurrency=1,
            deadline_s=LONG_S,
        ),
        "around_engine": lambda engine: engine,
        "prompts": {"_target_": "megatron_ppo.testing.fakes.FakePromptStream", "period": 7},
        "settings": {
            "num_generations": GENERATIONS,
            "sampling": SamplingSettings(max_new_tokens=6),
            "seed": 42,
            "max_concurrent_groups": PROMPTS,
            "deadline_s": LONG_S,
            "max_retries": 0,
            "retry_backoff_s": 0.0,
            "reserve_timeout_s": 0.05,
        },
    }
    return CollectorService(replay=replay, **{**parts, **changes})


async def take(replay: ReplayService, step: int) -> list[PromptGroup]:
    await replay.open(step=step, frontier=step)
    return await replay.take(target_step=step, timeout_s=LONG_S)


@pytest.mark.parametrize("whole_steps", [False, True])
def test_it_collects_from_parts_that_it_builds_by_name(whole_steps: bool) -> None:
    asked: list[RolloutEngine] = []

    def seen(engine: RolloutEngine) -> RolloutEngine:
        asked.append(engine)
        return engine

    async def scenario() -> None:
        replay = new_replay()
        service = new_service(replay, whole_steps=whole_steps, around_engine=seen)
        running = asyncio.create_task(service.run())
        groups = [group for step in range(2) for group in await take(replay, step)]
        assert sorted(group.ordinal for group in groups) == list(range(2 * PROMPTS))
        assert (await service.stats()).groups == 2 * PROMPTS
        await service.stop()
        await asyncio.wait_for(running, LONG_S)

    asyncio.run(scenario())
    assert [type(engine).__name__ for engine in asked] == ["StepBatches" if whole_steps else "ReplicaRouter"]


def test_nothing_is_dispatched_between_the_acknowledged_pause_and_resume() -> None:
    async def scenario() -> None:
        replay, engine = new_replay(), Replica()
        service = new_service(replay, engines=[engine])
        running = asyncio.create_task(service.run())
        await take(replay, 0)
        await service.pause()
        before = list(engine.requests)
        await replay.open(step=1, frontier=1)
        await asyncio.sleep(0.2)  # four times as long as a reservation waits
        assert engine.requests == before
        await service.resume()
        assert len(await replay.take(target_step=1, timeout_s=LONG_S)) == PROMPTS
        await service.stop()
        await asyncio.wait_for(running, LONG_S)

    asyncio.run(scenario())


def test_signs_of_life_are_beaten_from_its_loop_and_end_with_the_block(tmp_path: Path) -> None:
    async def scenario() -> None:
        service = new_service(new_replay())
        path = tmp_path / "beats" / "collector.json"
        async with Heartbeat(path, describe=service.describe).running():
            while not path.exists():
                await asyncio.sleep(0.01)
        detail = json.loads(path.read_text())["detail"]
        assert detail == {
            "in_flight": 0, "groups": 0, "failures": 0, "dropped": 0, "engines_down": None, "loop_lag_s": 0.0,
        }  # fmt: skip
        await asyncio.sleep(0)
        assert [task.get_name() for task in asyncio.all_tasks() if task.get_name() == "heartbeat"] == []

    asyncio.run(asyncio.wait_for(scenario(), LONG_S))


def test_whole_steps_need_a_single_engine() -> None:
    with pytest.raises(ConfigError, match="whole steps go to one engine, got 2"):
        new_service(new_replay(), whole_steps=True, engines=[Replica(), Replica()])
