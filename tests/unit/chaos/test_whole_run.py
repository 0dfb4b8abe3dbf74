"""A whole run under every kind of fault at once trains every prompt exactly once, with the responses that it may use.

Collector, router, replay buffer, table of replicas, recovering refit and all wrappers are the real ones; engines, the
transfer of weights and the process of the reward function are fakes. Kills and rebuilds follow the plan and the event
loop, so that a thousand faults take a second.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from megatron_ppo.chaos.collection import FaultyEngine, FaultyScoring
from megatron_ppo.chaos.engines import EngineKillingGroups
from megatron_ppo.chaos.fault_log import FaultLog
from megatron_ppo.chaos.publication import FaultyFleet
from megatron_ppo.chaos.reward import FAULT_KEY, FaultyReward
from megatron_ppo.collector.router import ReplicaRouter
from megatron_ppo.protocol.errors import PartDiedError, ScoringError
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from megatron_ppo.protocol.replicas import Member, PausedEngines, ReplicaState, ReplicaTable
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, Prompt, PromptGroup
from megatron_ppo.refit import recovery
from megatron_ppo.refit.recovery import RecoveringRefit
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine, require
from tests.unit.collector.random_collector import random_collector

RUNS = 25
PROMPTS, GENERATIONS = 3, 2
LONG_S = 60.0
RATES = {
    FaultKind.KILL_ENGINE: 0.4,
    FaultKind.FAIL_GENERATION: 0.2,
    FaultKind.HANG_REWARD: 0.15,
    FaultKind.RAISE_REWARD: 0.15,
    FaultKind.DELAY_REFIT: 1.0,
    FaultKind.FAIL_REFIT: 0.3,
}


class ScoringInOneProcess:
    """A `Scoring` whose reward function "hangs" without taking the time of a deadline."""

    def __init__(self) -> None:
        self._reward = FaultyReward(target="megatron_ppo.testing.fakes.FakeScorer", kwargs={})

    async def score(self, prompt: Prompt, completions: Sequence[Completion]) -> list[float]:
        await asyncio.sleep(0)
        if prompt.metadata.get(FAULT_KEY) == FaultKind.HANG_REWARD:
            raise ScoringError(f"ordinal {prompt.ordinal} took too long; its process was killed")
        try:
            return [self._reward(prompt, completion.token_ids) for completion in completions]
        except RuntimeError as error:
            raise ScoringError(f"ordinal {prompt.ordinal} raised {error}") from error

    def close(self) -> None:
        """Nothing runs."""


class Engines:
    """Fake replicas as `EngineFleet` and `MortalEngines` see them."""

    def __init__(self, replicas: int) -> None:
        self.replicas = [FakeEngine(length_of=lambda seed, _: 1 + seed % 5) for _ in range(replicas)]
        self.table = ReplicaTable(replicas=replicas, max_restarts=10**6)
        for replica in range(replicas):
            self.table.built(replica)
        self._refitted: tuple[Member, ...] = ()
        self._committed = -1

    # EngineFleet, as far as a refit without a transfer needs it

    def muster(self, *, version: int) -> list[str]:
        if not self.table.live():
            self.build(0)  # the real one waits for its keeper here
        self._refitted = self.table.lacking(version)
        return [str(member) for member in self._refitted]

    def begin_refit(self, *, mode: str, timeout_s: float, patience_s: float | None) -> PausedEngines:
        self.table.paused(self._refitted)
        return PausedEngines(ready=[str(member) for member in self._refitted])

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        self._committed = version

    def end_refit(self, *, timeout_s: float) -> None:
        for member in self._refitted:
            engine = self.replicas[member.replica]
            if engine.version < self._committed:
                engine.publish(self._committed)
        self.table.serving(self._refitted, version=self._committed)

    # MortalEngines

    def serving(self) -> list[int]:
        return [member.replica for member in self.table.members(ReplicaState.HEALTHY)]

    def kill(self, replica: int) -> None:
        self.replicas[replica].die("killed by chaos")
        self.table.died(self.table.member(replica), "killed by chaos")

    # What the keeper does

    def build(self, replica: int) -> None:
        self.replicas[replica].rebuild(version=-1)
        self.table.built(replica)

    async def keep_alive(self, rng: random.Random) -> None:
        while True:
            await asyncio.sleep(0)
            for replica, status in enumerate(self.table.statuses()):
                if status.state is ReplicaState.DEAD and rng.random() < 0.1:
                    self.build(replica)


class Gate:
    """An `EngineReplica` that lets requests in only while the replica serves."""

    def __init__(self, engines: Engines, replica: int) -> None:
        self._engines, self._replica = engines, replica

    async def serves(self) -> bool:
        return self._replica in self._engines.serving()

    async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
        engine = self._engines.replicas[self._replica]
        while await engine.serves() and not await self.serves():
            await asyncio.sleep(0)
        return await engine.generate(*args, **kwargs)  # type: ignore[arg-type]


class BareRefit:
    """A `Refit` that steers the engines as the real one does, and moves no bytes."""

    def __init__(self, fleet: FaultyFleet) -> None:
        self._fleet = fleet

    def push(self, *, version: int) -> Mapping[str, float]:
        require(len(self._fleet.muster(version=version)) > 0, "a refit without an engine")
        self._fleet.begin_refit(mode="drain", timeout_s=1.0)
        self._fleet.commit_refit(version=version, recompute_kv=False, timeout_s=1.0)
        self._fleet.end_refit(timeout_s=1.0)
        return {}


class Taking:
    """The learner's side of the buffer; `take` begins to wait and returns what to await."""

    def __init__(self, replay: ReplayService) -> None:
        self._replay = replay

    def take(self, *, target_step: int) -> list[PromptGroup]:
        return asyncio.create_task(  # type: ignore[return-value]
            self._replay.take(target_step=target_step, timeout_s=LONG_S)
        )

    def open(self, *, step: int, frontier: int) -> None:
        raise AssertionError("the test opens windows itself")


class Run:
    """One run under chaos."""

    def __init__(self, seed: int, folder: Path) -> None:
        rng = self.rng = random.Random(seed)
        self.plan = FaultPlan(seed=seed, rates=RATES, max_refit_delay_s=1.0)
        self.log = FaultLog(path=folder / f"faults_{seed}.jsonl")
        faults = {"plan": self.plan, "log": self.log}
        self.schedule = AsyncSchedule(
            max_num_steps=8,
            max_trajectory_age_steps=rng.randint(0, 2),
            policy_training_start_step=rng.randint(0, 2),
        )
        self.engines = Engines(rng.randint(1, 3))
        self.buffer = PromptGroupBuffer(
            schedule=self.schedule, num_prompts_per_step=PROMPTS, num_generations_per_prompt=GENERATIONS
        )
        self.replay = ReplayService(self.buffer)
        replicas = [Gate(self.engines, replica) for replica in range(len(self.engines.replicas))]
        self.router = ReplicaRouter(replicas, look_s=0.0)
        self.collector = random_collector(
            rng,
            replay=self.replay,
            engine=FaultyEngine(self.router, plan=self.plan, log=self.log),
            engine_ready=self.router.available,
            scoring=FaultyScoring(ScoringInOneProcess(), plan=self.plan, log=self.log),
            num_generations=GENERATIONS,
            seed=seed,
            deadline_s=LONG_S,
            most_retries=2,
            reserve_timeout_s=0.002,
        )
        self.slept: list[float] = []
        self.refit = RecoveringRefit(
            refit=BareRefit(FaultyFleet(self.engines, sleep=self.slept.append, **faults)),  # type: ignore[arg-type]
            engines=self.engines.table,
            raise_if_lost=lambda: None,
            max_retries=100,
            on_rank_zero=lambda what, function: function(),
        )
        self.groups = EngineKillingGroups(Taking(self.replay), engines=self.engines, **faults)  # type: ignore[arg-type]

    async def train(self) -> list[PromptGroup]:
        """What the learner does."""
        groups: list[PromptGroup] = []
        self.refit.push(version=0)
        for step in range(self.schedule.max_num_steps):
            await self.replay.open(step=step, frontier=self.schedule.frontier(step))
            taking: asyncio.Task[list[PromptGroup]] = self.groups.take(target_step=step)  # type: ignore[assignment]
            while not taking.done():
                self.refit.refresh()
                await asyncio.sleep(0)
            groups += await taking
            if self.schedule.trains_policy(step):
                self.refit.push(version=self.schedule.version_at(step + 1))
        return groups

    async def whole(self) -> list[PromptGroup]:
        """From the first publication to the end of the collector; the trained groups."""
        collecting = asyncio.create_task(self.collector.run())
        keeping = asyncio.create_task(self.engines.keep_alive(self.rng))
        groups = await asyncio.wait_for(self.train(), LONG_S)
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)
        assert keeping.cancelled(), keeping.exception()
        await self.replay.fail("end of the test")
        await asyncio.gather(collecting, return_exceptions=True)
        assert isinstance(collecting.exception(), PartDiedError)
        assert "end of the test" in str(collecting.exception()), "the collector must not have failed before"
        await self.router.close()
        return groups


def test_every_prompt_is_trained_once_under_every_kind_of_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recovery, "NEWS_S", 0.0)
    survived: Counter[FaultKind] = Counter()
    for seed in range(RUNS):
        run = Run(seed, tmp_path)
        groups = asyncio.run(run.whole())
        assert sorted(group.ordinal for group in groups) == list(range(8 * PROMPTS))
        for group in groups:
            assert len(group.trajectories) == GENERATIONS
            age = run.schedule.version_at(group.target_step) - group.min_version
            assert 0 <= age <= run.schedule.max_trajectory_age_steps
        run.buffer.ledger.check()
        counts = run.log.counts()
        assert counts[FaultKind.KILL_ENGINE] == run.engines.table.deaths
        assert counts[FaultKind.DELAY_REFIT] == len(run.slept)
        survived += counts
    assert set(survived) == set(FaultKind)
    assert min(survived.values()) > RUNS, "or the test would test little"


def test_what_is_struck_does_not_depend_on_the_order_of_events(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without deaths, whose place in time is chance, the same seed loses the same answers and rewards."""
    monkeypatch.setattr(recovery, "NEWS_S", 0.0)
    monkeypatch.setitem(RATES, FaultKind.KILL_ENGINE, 0.0)
    records = []
    for name, concurrency in (("one", 1), ("many", 6)):
        (tmp_path / name).mkdir()
        run = Run(5, tmp_path / name)
        run.collector._max_concurrent_groups = concurrency
        asyncio.run(run.whole())
        lines = run.log.path.read_text().splitlines()
        records.append(sorted(line.partition('"kind"')[2] for line in lines))
    assert records[0] == records[1] != []
