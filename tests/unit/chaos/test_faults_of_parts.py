"""Each wrapper strikes where the plan says, records it, and is otherwise the part that it wraps."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path

import pytest

from megatron_ppo.app.faults import NoFaults
from megatron_ppo.chaos.collection import FaultyEngine, FaultyScoringSettings, unchanged
from megatron_ppo.chaos.engines import EngineKillingGroups
from megatron_ppo.chaos.fault_log import FaultLog
from megatron_ppo.chaos.publication import FaultyFleet
from megatron_ppo.collector.scoring import ScoringSettings
from megatron_ppo.protocol.errors import GenerationError, RefitError, ScoringError
from megatron_ppo.protocol.faults import FaultKind, FaultPlan
from megatron_ppo.protocol.trajectory import Completion, PromptGroup, SamplingSettings
from megatron_ppo.testing.fakes import FakeEngine, FakePromptStream, make_group, prompt_ids

GROUP = make_group(ordinal=0, target_step=0)
SETTINGS = ScoringSettings(
    target="megatron_ppo.testing.fakes.FakeScorer", kwargs={}, isolated=True, concurrency=1, deadline_s=30.0
)


def plan(kind: FaultKind, rate: float = 0.5, **changes: float) -> FaultPlan:
    return FaultPlan(seed=1, rates={kind: rate}, **changes)


def log_in(folder: Path) -> FaultLog:
    return FaultLog(path=folder / "faults.jsonl")


def test_counts_are_those_of_all_processes_and_of_a_resumed_run(tmp_path: Path) -> None:
    log = log_in(tmp_path)
    assert log.counts() == {}
    log.append(FaultKind.KILL_ENGINE, 3)
    again: FaultLog = pickle.loads(pickle.dumps(log))
    again.append(FaultKind.KILL_ENGINE, 4)
    again.append(FaultKind.FAIL_REFIT, 1, 0)
    assert log.counts() == {FaultKind.KILL_ENGINE: 2, FaultKind.FAIL_REFIT: 1}


def test_responses_are_lost_where_the_plan_says_and_a_retry_succeeds(tmp_path: Path) -> None:
    made, log = plan(FaultKind.FAIL_GENERATION), log_in(tmp_path)
    inner = FakeEngine()
    engine = FaultyEngine(inner, plan=made, log=log)

    async def ask(seed: int) -> list[Completion]:
        return await engine.generate(
            prompt_ids(seed),
            seeds=[seed, 1000 + seed],
            sampling=SamplingSettings(max_new_tokens=4),
            deadline_s=9,
        )

    async def ask_until_answered(seed: int) -> int:
        for attempt in range(50):
            try:
                assert len(await ask(seed)) == 2
            except GenerationError as error:
                assert "chaos.fail_generation" in str(error)
            else:
                return attempt
        raise AssertionError("never answered")

    for seed in range(20):
        lost = [made.strikes(FaultKind.FAIL_GENERATION, seed, attempt) for attempt in range(50)]
        assert asyncio.run(ask_until_answered(seed)) == lost.index(False)
    assert log.counts()[FaultKind.FAIL_GENERATION] == len(inner.requests) - 20 > 5


def test_the_reward_function_hangs_and_raises_in_its_own_process(tmp_path: Path) -> None:
    """By the ordinary way: killed at the deadline, told as an error, and the next attempt has a new process."""
    rates = {FaultKind.HANG_REWARD: 0.3, FaultKind.RAISE_REWARD: 0.3}
    made, log = FaultPlan(seed=1, rates=rates), log_in(tmp_path)
    hangs = next(o for o in range(99) if made.strikes(FaultKind.HANG_REWARD, o, 0))
    raises = next(
        o
        for o in range(99)
        if made.strikes(FaultKind.RAISE_REWARD, o, 0) and not made.strikes(FaultKind.HANG_REWARD, o, 0)
    )
    completions = [trajectory.completion for trajectory in GROUP.trajectories]
    # A sound call takes a millisecond; on a loaded machine a second is still far from it.
    settings = FaultyScoringSettings(
        settings=ScoringSettings(
            target=SETTINGS.target, kwargs={}, isolated=True, concurrency=1, deadline_s=1.0
        ),
        plan=made,
        log=log,
    )
    scoring = pickle.loads(pickle.dumps(settings)).build()
    try:
        with pytest.raises(ScoringError, match=r"took more than 1\.0 s; its process was killed"):
            asyncio.run(scoring.score(FakePromptStream().prompt_at(hangs), completions))
        with pytest.raises(ScoringError, match=r"raised RuntimeError: chaos\.raise_reward"):
            asyncio.run(scoring.score(FakePromptStream().prompt_at(raises), completions))
        assert log.counts() == {FaultKind.HANG_REWARD: 1, FaultKind.RAISE_REWARD: 1}
        sound = next(o for o in range(99) if not any(made.strikes(kind, o, 0) for kind in rates))
        assert asyncio.run(scoring.score(FakePromptStream().prompt_at(sound), completions)) == [0.0, 0.0]
    finally:
        scoring.close()


class CountingFleet:
    """What `FaultyFleet` asks of an `EngineFleet` when it commits."""

    def __init__(self) -> None:
        self.committed: list[int] = []

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        assert (recompute_kv, timeout_s) == (True, 5.0)
        self.committed.append(version)


def test_a_publication_is_late_and_fails_before_any_engine_has_the_version(tmp_path: Path) -> None:
    rates = {FaultKind.DELAY_REFIT: 1.0, FaultKind.FAIL_REFIT: 0.5}
    made, log = FaultPlan(seed=1, rates=rates, max_refit_delay_s=8.0), log_in(tmp_path)
    inner, slept = CountingFleet(), list[float]()
    fleet = FaultyFleet(inner, plan=made, log=log, sleep=slept.append)  # type: ignore[arg-type]
    failed = []
    for version in range(20):
        for attempt in range(50):
            try:
                fleet.commit_refit(version=version, recompute_kv=True, timeout_s=5.0)
                break
            except RefitError:
                failed.append((version, attempt))
    assert inner.committed == list(range(20))
    assert failed == [event for event in failed if made.strikes(FaultKind.FAIL_REFIT, *event)] != []
    assert log.counts() == {FaultKind.DELAY_REFIT: 20 + len(failed), FaultKind.FAIL_REFIT: len(failed)}
    assert len(slept) == 20 + len(failed) and 0 < min(slept) < max(slept) < 8.0


class Herd:
    """`MortalEngines` and `GroupSource` in one."""

    def __init__(self, replicas: int) -> None:
        self.alive = list(range(replicas))
        self.killed: list[int] = []
        self.asked: list[object] = []

    def serving(self) -> list[int]:
        return self.alive

    def kill(self, replica: int) -> None:
        self.killed.append(replica)

    def take(self, *, target_step: int) -> list[PromptGroup]:
        self.asked.append(target_step)
        return [GROUP]

    def open(self, *, step: int, frontier: int) -> None:
        self.asked.append((step, frontier))


def test_an_engine_dies_before_the_learner_waits_and_every_replica_has_its_turn(tmp_path: Path) -> None:
    made, log, herd = plan(FaultKind.KILL_ENGINE), log_in(tmp_path), Herd(3)
    groups = EngineKillingGroups(herd, engines=herd, plan=made, log=log)
    for step in range(60):
        assert groups.take(target_step=step) == [GROUP]
    groups.open(step=60, frontier=61)
    struck = [step for step in range(60) if made.strikes(FaultKind.KILL_ENGINE, step)]
    assert len(herd.killed) == log.counts()[FaultKind.KILL_ENGINE] == len(struck)
    assert set(herd.killed) == {0, 1, 2}
    assert herd.asked == [*range(60), (60, 61)]


def test_nothing_is_killed_or_recorded_while_nobody_serves_or_on_other_ranks(tmp_path: Path) -> None:
    made, log, herd = plan(FaultKind.KILL_ENGINE, 1.0), log_in(tmp_path), Herd(0)
    EngineKillingGroups(herd, engines=herd, plan=made, log=log).take(target_step=0)
    EngineKillingGroups(herd, engines=None, plan=made, log=log).take(target_step=0)
    assert herd.killed == [] and not log.path.exists()


def test_without_faults_every_part_is_the_one_that_was_given() -> None:
    seams, herd, fleet = NoFaults(), Herd(1), CountingFleet()
    assert seams.around_engine() is unchanged
    assert seams.scoring(SETTINGS) is SETTINGS
    assert seams.fleet(fleet) is fleet  # type: ignore[arg-type,comparison-overlap]
    assert seams.groups(herd, engines=herd) is herd
    assert seams.statistics() == {}
