"""Collector and replay buffer as real Ray actors, with a fake engine in a third: one contract for all."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.chaos.collection import unchanged
from megatron_ppo.collector.scoring import ScoringSettings
from megatron_ppo.protocol.errors import (
    EngineDeadError,
    GroupMismatchError,
    MegatronPPOError,
    PartDiedError,
    WaitTimeoutError,
)
from megatron_ppo.protocol.ports import Replay
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine, make_group

pytestmark = pytest.mark.ray

SCHEDULE = AsyncSchedule(max_num_steps=6, max_trajectory_age_steps=1)
PROMPTS, GENERATIONS = 3, 2
CALL_S = 60.0  # starting an actor takes 10 CPU seconds, more on a loaded machine
NOTICE_S = 15.0  # the promise: from a death to the end of the run


def fake_engine_process() -> type:
    """`FakeEngine` behind the one method by which engine actors are called.

    Defined in a function, so that it travels by value: the actors' processes cannot import this module.
    """

    class FakeEngineProcess:
        def __init__(self) -> None:
            self._engine = FakeEngine(token_latency_s=0.001)
            self._deadly = 0

        async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
            if method == "die_in_next":
                self._deadly = args[0]
                return None
            if method == "generate" and self._deadly:
                self._deadly -= 1
                raise EngineDeadError("this prompt kills its engine")
            result = getattr(self._engine, method)(*args, **kwargs)
            return await result if asyncio.iscoroutine(result) else result

    return FakeEngineProcess


@pytest.fixture
def start(cluster: Path) -> Iterator[Callable[[], tuple[Any, Any, Any]]]:
    """Starts (replay, engine, collector) actors; ends them after the test."""
    import ray

    from megatron_ppo.ray_actors.collector_actor import CollectorActor
    from megatron_ppo.ray_actors.engine_client import RayEngineClient
    from megatron_ppo.ray_actors.replay_actor import ReplayActor

    started: list[Any] = []

    def _start() -> tuple[Any, Any, Any]:
        replay = ReplayActor.remote(
            schedule=SCHEDULE,
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=GENERATIONS,
            log_path=str(cluster / "replay.log"),
            heartbeat_path=str(cluster / "replay.log") + ".beat",
        )
        engine = ray.remote(num_cpus=0, max_concurrency=1000)(fake_engine_process()).remote()
        collector = CollectorActor.remote(
            engines=[RayEngineClient(replica=0, handle=engine)],
            replay=replay,
            scoring=ScoringSettings(
                target="megatron_ppo.testing.fakes.FakeScorer",
                kwargs={},
                isolated=True,
                concurrency=1,
                deadline_s=60.0,
            ),
            around_engine=unchanged,
            prompts={"_target_": "megatron_ppo.testing.fakes.FakePromptStream", "period": 7},
            settings={
                "num_generations": GENERATIONS,
                "sampling": SamplingSettings(max_new_tokens=6),
                "seed": 42,
                "max_concurrent_groups": 4,
                "deadline_s": CALL_S,
                "max_retries": 2,
                "retry_backoff_s": 0.01,
            },
            log_path=str(cluster / "collector.log"),
            heartbeat_path=str(cluster / "collector.log") + ".beat",
        )
        started.extend((replay, engine, collector))
        return replay, engine, collector

    yield _start
    for actor in started:
        ray.kill(actor)


def get(ref: Any) -> Any:
    """The result of a remote call, or its own error."""
    import ray

    try:
        return ray.get(ref, timeout=CALL_S)
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, MegatronPPOError) else error) from error


def pid_of(actor: Any) -> int:
    """Process id of an actor."""
    return int(get(actor.__ray_call__.remote(lambda _: os.getpid())))


def train(replay: Any, engine: Any, steps: range) -> list[int]:
    """Drive the learner's side; the trained ordinals."""
    trained: list[int] = []
    for step in steps:
        version = SCHEDULE.version_at(step)
        if version > 0:
            get(engine.call.remote("publish", version))
        get(replay.open.remote(step=step, frontier=SCHEDULE.frontier(step)))
        groups = get(replay.take.remote(target_step=step, timeout_s=CALL_S))
        assert all(0 <= version - group.min_version <= 1 for group in groups)
        trained += [group.ordinal for group in groups]
    return trained


def test_actors_fill_every_step_and_a_stop_is_acknowledged(
    start: Callable[[], tuple[Any, Any, Any]], cluster: Path
) -> None:
    replay, engine, collector = start()
    running = collector.run.remote()
    assert sorted(train(replay, engine, range(3))) == list(range(3 * PROMPTS))
    get(collector.pause.remote())
    snapshot = get(replay.snapshot.remote())
    get(collector.resume.remote())
    get(collector.stop.remote())
    assert get(running) is None
    assert get(replay.status.remote()).reserved == {}
    stats = get(collector.stats.remote())
    assert stats.groups >= 3 * PROMPTS
    assert (cluster / "collector.log").exists()

    resumed, new_engine, new_collector = start()
    get(resumed.restore.remote(snapshot, resume_step=3))
    new_collector.run.remote()
    rest = train(resumed, new_engine, range(3, 6))
    assert sorted(get(resumed.trained_ordinals.remote())) == list(range(6 * PROMPTS))
    assert len(rest) == 3 * PROMPTS


def test_actor_processes_load_no_torch(start: Callable[[], tuple[Any, Any, Any]]) -> None:
    """A process with torch costs 300 MB, and the run has a budget for all of them."""
    replay, _, collector = start()
    for actor in (replay, collector):
        loaded = get(
            actor.__ray_call__.remote(lambda _: [m for m in __import__("sys").modules if m == "torch"])
        )
        assert loaded == []


def test_a_dead_engine_is_waited_for_and_no_prompt_is_lost(start: Callable[[], tuple[Any, Any, Any]]) -> None:
    replay, engine, collector = start()
    collector.run.remote()
    trained = train(replay, engine, range(1))
    get(engine.call.remote("die", "engine core was killed"))
    get(replay.open.remote(step=1, frontier=2))
    deadline = time.monotonic() + CALL_S
    while get(collector.stats.remote()).retries == 0:
        assert time.monotonic() < deadline, "no request met the dead engine"
        time.sleep(0.05)
    get(engine.call.remote("rebuild", 1))
    groups = get(replay.take.remote(target_step=1, timeout_s=CALL_S))
    trained += [group.ordinal for group in groups]
    trained += train(replay, engine, range(2, 4))
    assert sorted(trained) == list(range(4 * PROMPTS))
    assert get(collector.stats.remote()).failures == 0
    get(collector.stop.remote())


def test_a_prompt_whose_engine_dies_too_often_reaches_the_learner_with_its_cause(
    start: Callable[[], tuple[Any, Any, Any]],
) -> None:
    replay, engine, collector = start()
    running = collector.run.remote()
    get(engine.call.remote("die_in_next", 100))
    begin = time.monotonic()
    get(replay.open.remote(step=0, frontier=1))
    with pytest.raises(
        PartDiedError, match="GenerationError: the engine died during generation: engine replica"
    ):
        get(replay.take.remote(target_step=0, timeout_s=CALL_S))
    with pytest.raises(PartDiedError, match="collection failed: prompt ordinal"):
        get(running)
    assert time.monotonic() - begin < NOTICE_S


def test_a_killed_buffer_ends_the_collector(start: Callable[[], tuple[Any, Any, Any]]) -> None:
    import ray

    replay, engine, collector = start()
    alive = replay.watch.remote()
    running = collector.run.remote()
    train(replay, engine, range(1))
    begin = time.monotonic()
    os.kill(pid_of(replay), signal.SIGKILL)
    with pytest.raises(PartDiedError, match="the replay buffer's process died"):
        get(running)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(alive, timeout=NOTICE_S)
    assert time.monotonic() - begin < NOTICE_S


@pytest.mark.parametrize("kind", ["in one process", "actor"])
def test_the_replay_port_keeps_its_contract(kind: str, start: Callable[[], tuple[Any, Any, Any]]) -> None:
    """One contract for the service and for its actor: results, errors with their own type, idempotence."""
    service = ReplayService(
        PromptGroupBuffer(
            schedule=SCHEDULE, num_prompts_per_step=PROMPTS, num_generations_per_prompt=GENERATIONS
        )
    )

    async def contract(port: Replay, learner: ReplayService) -> None:
        assert await port.reserve(limit=1, timeout_s=0.05) == []
        await learner.open(step=0, frontier=1)
        reservations = await port.reserve(limit=2, timeout_s=CALL_S)
        assert [(r.ordinal, r.target_step, r.opened_at_step) for r in reservations] == [(0, 0, 0), (1, 0, 0)]
        await port.commit(make_group(ordinal=0, target_step=0))
        with pytest.raises(GroupMismatchError, match="the ordinal is ready"):
            await port.commit(make_group(ordinal=0, target_step=0))
        await port.release(reservations[1], reason="failed")
        await port.release(reservations[1], reason="failed")
        assert await port.reserve(limit=1, timeout_s=CALL_S) == [reservations[1]]
        await port.release(reservations[1], reason="failed", failed=True, others_first=True)
        [other] = await port.reserve(limit=1, timeout_s=CALL_S)
        await port.release(other, reason="failed")
        assert other.ordinal == 2
        with pytest.raises(WaitTimeoutError, match="step 0 has 1 of 3 groups"):
            await learner.take(target_step=0, timeout_s=0.05)
        await port.fail("engine is gone")
        with pytest.raises(PartDiedError, match="engine is gone"):
            await port.reserve(limit=1, timeout_s=CALL_S)

    if kind == "actor":
        from megatron_ppo.ray_actors.replay_client import RayReplayClient

        replay, _, _ = start()

        class Learner:
            async def open(self, **kwargs: Any) -> None:
                await asyncio.to_thread(get, replay.open.remote(**kwargs))

            async def take(self, **kwargs: Any) -> Any:
                return await asyncio.to_thread(get, replay.take.remote(**kwargs))

        asyncio.run(contract(RayReplayClient(replay), Learner()))  # type: ignore[arg-type]
    else:
        asyncio.run(contract(service, service))
