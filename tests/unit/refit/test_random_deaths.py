"""Engines die, or are too slow for a publication, at random moments of a whole run: every prompt is trained once, by
responses of fresh enough weights.

Collector, router, replay buffer, table of replicas and the recovering refit are the real ones. The engines are fakes
that refuse what a real engine would: they let nobody in before a refit has given them the weights.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import pytest

from megatron_ppo.collector.router import ReplicaRouter
from megatron_ppo.collector.scoring import ThreadScoring
from megatron_ppo.protocol.errors import EngineAsideError, EngineDeadError, PartDiedError, RefitError
from megatron_ppo.protocol.replicas import Member, ReplicaState, ReplicaTable
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, PromptGroup, SamplingSettings
from megatron_ppo.refit import recovery
from megatron_ppo.refit.recovery import RecoveringRefit
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine, FakeScorer, require
from tests.unit.collector.random_collector import random_collector

SCHEDULES = 100
LONG_S = 60.0
GENERATIONS = 2


class GatedEngine(FakeEngine):
    """Built without weights; lets requests in only while it has those that are current everywhere.

    Attributes:
        served: responses by version.   aside: a publication has left it out; it takes no new requests.
    """

    def __init__(self, world: World) -> None:
        super().__init__(length_of=lambda seed, _: 1 + seed % 9)
        self.gate = asyncio.Event()
        self.served: Counter[int] = Counter()
        self.aside = False
        self._world = world

    def give(self, version: int) -> None:
        """A refit: running requests go on under the new weights."""
        require(not self.aside or self.num_running == 0, "it was given weights before it had paused")
        self._version = version
        self.aside = False
        self.gate.set()

    def die(self, cause: str) -> None:
        super().die(cause)
        self.gate.clear()
        self.aside = False

    async def serves(self) -> bool:
        return await super().serves() and self.gate.is_set()

    async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
        if self._death is None:  # a dead one refuses at once
            if self.aside:
                raise EngineAsideError("a publication went on without it")
            await self.gate.wait()
        require(
            self._death is not None or self._version == self._world.current,
            f"a request was let in under version {self._version}, current is {self._world.current}",
        )
        completions = await super().generate(*args, **kwargs)  # type: ignore[arg-type]
        self.served[completions[0].spans[-1].version] += 1
        return completions


class ToldAtOnce(ReplicaTable):
    """A failed refit is asked for its death when that is known already."""

    def wait_for_news(self, *, deaths: int, timeout_s: float) -> None:
        require(self.deaths > deaths, "the refit failed without a death")

    def wait_for(self, condition: Callable[[], bool], *, timeout_s: float) -> bool:
        return True  # nobody builds beside the one thread; `World.push` does


class World:
    """One random run. Implements `Refit` over the fake engines."""

    def __init__(self, seed: int) -> None:
        rng = self.rng = random.Random(seed)
        self.schedule = AsyncSchedule(
            max_num_steps=rng.randint(3, 6),
            max_trajectory_age_steps=rng.randint(0, 2),
            policy_training_start_step=rng.randint(0, 2),
        )
        self.prompts = rng.randint(1, 3)
        self.current = -1
        self.engines = [GatedEngine(self) for _ in range(rng.randint(1, 3))]
        self.table = ToldAtOnce(replicas=len(self.engines), max_restarts=10**6)
        for replica in range(len(self.engines)):
            self.table.built(replica)
        self.buffer = PromptGroupBuffer(
            schedule=self.schedule,
            num_prompts_per_step=self.prompts,
            num_generations_per_prompt=GENERATIONS,
        )
        self.replay = ReplayService(self.buffer)
        self.router = ReplicaRouter(self.engines, look_s=0.0)
        self.collector = random_collector(
            rng,
            replay=self.replay,
            engine=self.router,
            engine_ready=self.router.available,
            scoring=ThreadScoring(FakeScorer(), threads=1, deadline_s=LONG_S),
            num_generations=GENERATIONS,
            seed=seed,
            deadline_s=LONG_S,
            most_retries=2,
            reserve_timeout_s=0.002,
        )
        self.refit = RecoveringRefit(
            refit=self,
            engines=self.table,
            raise_if_lost=lambda: None,
            max_retries=1,
            on_rank_zero=lambda what, function: function(),
        )
        self.kills = rng.choice((0.02, 0.1, 0.3))
        self.slowness = rng.choice((0.0, 0.3, 0.8))
        self.left_out = 0

    # --- Refit ----------------------------------------------------------------------------------------------

    def push(self, *, version: int) -> Mapping[str, float]:
        """Some member may die half-way; the others are then paused and do not have the version."""
        if not self.table.lacking(version):
            self._make_one_ready()
        members = self.table.lacking(version)
        self.table.paused(members)
        for member in members:
            self.engines[member.replica].gate.clear()
        members = self._without_slow(members)
        if self.rng.random() < self.kills:
            victim = self.rng.choice(members).replica
            self._kill(victim)
            raise self.rng.choice((RefitError, EngineDeadError))(f"engine replica {victim} died in the refit")
        self.current = version
        for member in members:
            self.engines[member.replica].give(version)
        self.table.serving(members, version=version)
        return {}

    def _make_one_ready(self) -> None:
        """What a real one waits for: a slow one that pauses, or is ended because it does not; or the keeper."""
        for member in self.table.slow():
            if self.engines[member.replica].num_running == 0:
                self.table.has_paused(member)
                return
        slow = [member.replica for member in self.table.slow()]
        replica = slow[0] if slow else self.rng.randrange(len(self.engines))
        if slow:
            self._kill(replica)
        self._build(replica)

    def _without_slow(self, members: Sequence[Member]) -> list[Member]:
        """All but some; one at least."""
        slow = [member for member in members if self.rng.random() < self.slowness][: len(members) - 1]
        self.table.left_out(slow)
        for member in slow:
            self.engines[member.replica].aside = True
        self.left_out += len(slow)
        return [member for member in members if member not in slow]

    # --- what happens ---------------------------------------------------------------------------------------

    def _kill(self, replica: int) -> None:
        self.engines[replica].die("killed")
        self.table.died(self.table.member(replica), "killed")

    def _build(self, replica: int) -> None:
        self.engines[replica].rebuild(version=-1)
        self.table.built(replica)

    async def disturb(self) -> None:
        """Kills engines, and builds them again after a while; notices that slow ones have paused."""
        rng = random.Random(self.rng.random())
        while True:
            await asyncio.sleep(0)
            for member in self.table.slow():
                # What has been let in and has not died; what waits in front of the gate is not counted.
                if self.engines[member.replica].num_running == 0 and rng.random() < 0.3:
                    self.table.has_paused(member)
            replica = rng.randrange(len(self.engines))
            dead = self.table.statuses()[replica].state is ReplicaState.DEAD
            if dead and rng.random() < 0.1:
                self._build(replica)
            elif not dead and rng.random() < self.kills / 10:
                self._kill(replica)

    async def train(self) -> list[PromptGroup]:
        """What the learner does."""
        groups: list[PromptGroup] = []
        self.refit.push(version=0)
        for step in range(self.schedule.max_num_steps):
            await self.replay.open(step=step, frontier=self.schedule.frontier(step))
            taking = asyncio.create_task(self.replay.take(target_step=step, timeout_s=LONG_S))
            while not taking.done():
                self.refit.refresh()
                await asyncio.sleep(0)
            groups += await taking
            if self.schedule.trains_policy(step):
                self.refit.push(version=self.schedule.version_at(step + 1))
        return groups


async def whole_run(seed: int) -> World:
    world = World(seed)
    collecting = asyncio.create_task(world.collector.run())
    disturbing = asyncio.create_task(world.disturb())
    groups = await asyncio.wait_for(world.train(), LONG_S)
    disturbing.cancel()
    await asyncio.gather(disturbing, return_exceptions=True)
    assert disturbing.cancelled(), disturbing.exception()
    assert sorted(g.ordinal for g in groups) == list(range(world.schedule.max_num_steps * world.prompts))
    for group in groups:
        assert len(group.trajectories) == GENERATIONS
        age = world.schedule.version_at(group.target_step) - group.min_version
        assert 0 <= age <= world.schedule.max_trajectory_age_steps
    world.buffer.ledger.check()
    await world.replay.fail("end of the test")
    await asyncio.gather(collecting, return_exceptions=True)
    assert isinstance(collecting.exception(), PartDiedError)
    assert "end of the test" in str(collecting.exception()), "the collector must not have failed before"
    await world.router.close()
    assert world.collector.stats().in_flight == 0
    return world


def test_no_prompt_is_lost_and_no_engine_serves_old_weights_whenever_engines_die(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "NEWS_S", 0.0)
    deaths, retries, left_out = 0, 0.0, 0
    for seed in range(SCHEDULES):
        world = asyncio.run(whole_run(seed))
        deaths += world.table.deaths
        left_out += world.left_out
        retries += world.collector.stats().retries + world.collector.stats().failures
    # Or the test would test nothing.
    assert left_out > SCHEDULES
    assert deaths > 2 * SCHEDULES and retries > SCHEDULES / 2


def test_what_runs_in_a_slow_engine_finishes_under_its_version_and_what_is_new_goes_to_the_others() -> None:
    async def scenario() -> None:
        world = next(world for world in map(World, range(100)) if len(world.engines) == 2)
        world.kills, world.slowness = 0.0, 0.0
        world.refit.push(version=0)
        slow, other = world.engines
        request = {"seeds": [8], "sampling": SamplingSettings(max_new_tokens=9), "deadline_s": LONG_S}
        running = asyncio.create_task(slow.generate([1], **request))
        while not slow.num_running:
            await asyncio.sleep(0)

        world.slowness = 1.0  # one that is ready is left
        world.refit.push(version=1)
        assert world.table.describe() == "0 STALE v0 slow, 1 HEALTHY v1"
        with pytest.raises(EngineAsideError):
            await slow.generate([2], **request)
        [answer] = await world.router.generate([2], **request)
        assert [span.version for span in answer.spans] == [1] and other.requests == [(2,)]
        [answer] = await running
        assert [span.version for span in answer.spans] == [0] and len(answer.token_ids) == 9
        assert not world.refit.refresh(), "nobody has noticed yet that it has paused"

        world.table.has_paused(world.table.member(0))
        assert world.refit.refresh()
        assert world.table.describe() == "0 HEALTHY v1, 1 HEALTHY v1" and await slow.serves()
        await world.router.close()

    asyncio.run(scenario())
