"""The collector against the real buffer and a fake engine: failures, deadlines, pause, stop, stragglers."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from megatron_ppo.collector.collector import Collector
from megatron_ppo.collector.scoring import ProcessScoring, Scoring, ThreadScoring
from megatron_ppo.protocol.errors import (
    EngineAsideError,
    GenerationError,
    NonFiniteError,
    PartDiedError,
    WaitTimeoutError,
)
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, Prompt, PromptGroup, SamplingSettings
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import EOS_ID, FakeEngine, FakePromptStream, FakeScorer, prompt_ids

LONG_S = 30.0  # far above what a test takes, also on a loaded machine; reaching it is a failure
PROMPTS, GENERATIONS = 3, 2


class Run:
    """One collector with its buffer, driven like the learner drives them."""

    def __init__(
        self,
        *,
        age: int = 1,
        steps: int = 50,
        engine: FakeEngine | None = None,
        scorer: Scorer | None = None,
        scoring: Scoring | None = None,
        max_concurrent_groups: int = 4,
        deadline_s: float = LONG_S,
        scoring_deadline_s: float = LONG_S,
        max_retries: int = 0,
        max_generation_failures: int = 0,
        engine_ready: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self.schedule = AsyncSchedule(max_num_steps=steps, max_trajectory_age_steps=age)
        self.buffer = PromptGroupBuffer(
            schedule=self.schedule,
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=GENERATIONS,
        )
        self.replay = ReplayService(self.buffer)
        self.engine = engine or FakeEngine()
        self.collector = Collector(
            replay=self.replay,
            engine=self.engine,
            scoring=scoring
            or ThreadScoring(scorer or FakeScorer(), threads=1, deadline_s=scoring_deadline_s),
            prompts=FakePromptStream(),
            num_generations=GENERATIONS,
            sampling=SamplingSettings(max_new_tokens=6),
            seed=42,
            max_concurrent_groups=max_concurrent_groups,
            deadline_s=deadline_s,
            max_retries=max_retries,
            retry_backoff_s=0.001,
            max_generation_failures=max_generation_failures,
            reserve_timeout_s=0.05,
            **({} if engine_ready is None else {"engine_ready": engine_ready}),
        )

    async def open(self, step: int) -> None:
        version = self.schedule.version_at(step)
        if version > self.engine.version:
            self.engine.publish(version)
        await self.replay.open(step=step, frontier=self.schedule.frontier(step))

    async def take(self, step: int) -> list[PromptGroup]:
        return await self.replay.take(target_step=step, timeout_s=LONG_S)

    async def train(self, steps: int) -> list[PromptGroup]:
        groups: list[PromptGroup] = []
        for step in range(steps):
            await self.open(step)
            groups += await self.take(step)
        return groups


@asynccontextmanager
async def collecting(run: Run) -> AsyncIterator[asyncio.Task[None]]:
    """The collector runs inside the block and is stopped after it."""
    task = asyncio.create_task(run.collector.run())
    try:
        yield task
    finally:
        await run.collector.stop(timeout_s=LONG_S)
        await asyncio.gather(task, return_exceptions=True)


async def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + LONG_S
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        await asyncio.sleep(0.001)


def test_every_step_is_filled_with_whole_scored_groups() -> None:
    """C7."""

    async def scenario() -> None:
        run = Run(age=1)
        async with collecting(run):
            groups = await run.train(6)
        assert sorted(group.ordinal for group in groups) == list(range(6 * PROMPTS))
        for group in groups:
            assert len(group.trajectories) == GENERATIONS
            assert group.trajectories[0].prompt_token_ids == prompt_ids(group.ordinal)
            assert group.started_at <= group.finished_at
            for trajectory in group.trajectories:
                assert trajectory.reward == float(trajectory.completion.token_ids[-1] == EOS_ID)
            assert 0 <= run.schedule.version_at(group.target_step) - group.min_version <= 1
        stats = run.collector.stats()
        assert stats.groups >= 6 * PROMPTS
        assert stats.trajectories == GENERATIONS * stats.groups
        assert 0 < stats.generation_busy_s <= stats.generation_group_s

    asyncio.run(scenario())


def test_the_collector_works_ahead_of_the_learner_but_not_beyond_the_window() -> None:
    async def scenario() -> None:
        run = Run(age=2)
        async with collecting(run):
            await run.open(0)
            await until(lambda: run.collector.stats().groups == 3 * PROMPTS, "window 0..2 is full")
            await asyncio.sleep(0.1)
            assert run.collector.stats().groups == 3 * PROMPTS
            assert (await run.replay.status()).ready == {0: PROMPTS, 1: PROMPTS, 2: PROMPTS}

    asyncio.run(scenario())


def test_nothing_is_generated_for_steps_after_the_last() -> None:
    """C18."""

    async def scenario() -> None:
        run = Run(age=4, steps=2)
        async with collecting(run):
            await run.train(2)
            await asyncio.sleep(0.1)
            assert len(run.engine.requests) == 2 * PROMPTS

    asyncio.run(scenario())


def test_a_straggler_holds_nobody_but_itself() -> None:
    """#3000: groups were held until the slowest prompt of their batch had finished."""

    async def scenario() -> None:
        run = Run(age=1)
        run.engine.hanging.add(tuple(prompt_ids(1)))
        async with collecting(run):
            await run.open(0)
            await until(
                lambda: run.collector.stats().groups == 2 * PROMPTS - 1, "all the others are committed"
            )
            status = await run.replay.status()
            assert status.reserved == {0: (1,)}
            with pytest.raises(WaitTimeoutError, match=r"in flight for it: ordinals \[1\]"):
                await run.replay.take(target_step=0, timeout_s=0.05)

    asyncio.run(scenario())


def test_a_stuck_rollout_ends_as_a_failure_that_names_its_prompt() -> None:
    """C19."""

    async def scenario() -> None:
        run = Run(deadline_s=0.5)  # the other prompts' rollouts keep it on a busy machine, too
        run.engine.hanging.add(tuple(prompt_ids(2)))
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(PartDiedError, match=r"ordinal 2 for step 0 .*did not finish within 0.5 s"):
                await run.take(0)
            with pytest.raises(PartDiedError, match="collection failed: prompt ordinal 2"):
                await task

    asyncio.run(scenario())


def test_a_client_that_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine enforces its own deadline; a vanished one cannot."""
    monkeypatch.setattr("megatron_ppo.collector.rollout.DEADLINE_GRACE_S", 0.05)

    class Vanished(FakeEngine):
        async def generate(self, *args: object, **kwargs: object) -> list[Completion]:
            await asyncio.Event().wait()
            raise AssertionError("unreachable")

    async def scenario() -> None:
        run = Run(engine=Vanished(), deadline_s=0.05)
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(PartDiedError, match="did not answer for prompt ordinal"):
                await task

    asyncio.run(scenario())


def test_the_wait_for_an_engine_is_in_no_deadline_and_no_failed_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where an engine that serves turns the request away, and the others are being built."""
    monkeypatch.setattr("megatron_ppo.collector.rollout.DEADLINE_GRACE_S", 0.05)
    serves = asyncio.Event()

    class Aside(FakeEngine):
        async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
            if serves.is_set():
                return await super().generate(*args, **kwargs)  # type: ignore[arg-type]
            turned_away.append(tuple(args[0]))
            raise EngineAsideError("no engine serves at the moment")

    async def ready() -> None:
        if turned_away:  # the first time it looks as if one served
            await serves.wait()

    turned_away: list[tuple[int, ...]] = []

    async def scenario() -> None:
        run = Run(engine=Aside(), deadline_s=0.5, engine_ready=ready)
        async with collecting(run):
            await run.open(0)
            await asyncio.sleep(1.0)  # longer than the deadline with its grace
            serves.set()
            assert len(await run.take(0)) == PROMPTS
        assert turned_away and (run.collector.stats().failures, run.collector.stats().retries) == (0, 0)

    asyncio.run(scenario())


def test_a_failed_attempt_is_retried_and_costs_nothing() -> None:
    async def scenario() -> None:
        run = Run(max_retries=2)
        run.engine.fail_next(2)
        async with collecting(run):
            groups = await run.train(2)
        assert sorted(group.ordinal for group in groups) == list(range(2 * PROMPTS))
        stats = run.collector.stats()
        assert (stats.retries, stats.failures) == (2, 0)

    asyncio.run(scenario())


def test_a_prompt_generated_again_gets_the_same_seeds() -> None:
    async def scenario() -> None:
        tokens = []
        for failures in (0, 1):
            run = Run(max_retries=1)
            run.engine.fail_next(failures)
            async with collecting(run):
                groups = await run.train(1)
            tokens.append({g.ordinal: [t.completion.token_ids for t in g.trajectories] for g in groups})
        assert tokens[0] == tokens[1]
        first = tokens[0][0]
        assert first[0] != first[1]  # and the samples of one prompt differ

    asyncio.run(scenario())


def test_first_failure_is_fatal_at_limit_zero() -> None:
    """C11, and report 1: the learner hears of it at once and in words."""

    async def scenario() -> None:
        run = Run(max_generation_failures=0)
        run.engine.fail_next(1)
        async with collecting(run) as task:
            await run.open(0)
            start = time.monotonic()
            with pytest.raises(
                PartDiedError, match=r"ordinal \d for step 0 \(1 in a row.*max_generation_failures=0"
            ):
                await run.take(0)
            assert time.monotonic() - start < 10  # not at the end of a poll
            with pytest.raises(PartDiedError, match="GenerationError: this request was told to fail"):
                await task
            assert (await run.replay.status()).reserved == {}

    asyncio.run(scenario())


def test_a_success_ends_a_row_of_failures() -> None:
    """C11: limit 2; fail, success, fail, fail stays healthy; a row of three is fatal once another prompt fails."""

    async def scenario() -> None:
        run = Run(max_generation_failures=2, max_concurrent_groups=1)
        async with collecting(run) as task:
            run.engine.fail_next(1)
            await run.open(0)
            await run.take(0)
            assert run.collector.stats().consecutive_failures == 0
            run.engine.fail_next(2)
            await run.open(1)
            await run.take(1)
            assert run.collector.stats().failures == 3
            assert not task.done()
            run.engine.fail_next(4)
            await run.open(2)
            with pytest.raises(
                PartDiedError, match=r"4 in a row, of ordinals \[(\d+), (\d+)\]; 1 of this prompt"
            ):
                await task

    asyncio.run(scenario())


def test_a_tolerated_failure_is_regenerated_and_no_prompt_is_lost() -> None:
    """Reports 3 and 4: the hole is filled with the same prompt; a failed rollout never enters a batch."""

    async def scenario() -> None:
        run = Run(max_generation_failures=3)
        run.engine.fail_next(3)
        async with collecting(run):
            groups = await run.train(4)
        assert sorted(group.ordinal for group in groups) == list(range(4 * PROMPTS))
        assert run.collector.stats().failures == 3
        assert all(trajectory.completion.token_ids for g in groups for trajectory in g.trajectories)

    asyncio.run(scenario())


def test_one_prompt_that_always_fails_is_dropped_while_others_succeed() -> None:
    """Otherwise its target would be retried for ever, with every counter reset by its neighbours."""

    class FailsLate(FakeEngine):
        async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
            if tuple(args[0]) in self.failing:
                succeeded = len(self.requests)
                await until(lambda: len(self.requests) > succeeded + 3, "other prompts succeed meanwhile")
                raise GenerationError("never works")
            return await super().generate(*args, **kwargs)  # type: ignore[arg-type]

    async def scenario() -> None:
        run = Run(age=6, engine=FailsLate(), max_generation_failures=2, max_concurrent_groups=3)
        run.engine.failing.add(tuple(prompt_ids(1)))
        async with collecting(run):
            groups = await run.train(3)
        ordinals = sorted(group.ordinal for group in groups)
        assert len(ordinals) == 3 * PROMPTS and 1 not in ordinals
        assert run.collector.stats().failures == 3
        assert run.collector.stats().dropped == 1
        assert run.buffer.ledger.drop_reason(1) == "generation failed: never works"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("limit", "hopeless"),
    [(1, (PROMPTS - 1,)), (1, (0,)), (3, (PROMPTS - 1,)), (3, (PROMPTS - 2, PROMPTS - 1))],
)
def test_prompts_that_always_fail_and_are_the_last_of_their_window_are_dropped_and_the_run_goes_on(
    limit: int, hopeless: tuple[int, ...]
) -> None:
    """Nothing else is left to do there, so nothing succeeds between two of their failures."""

    async def scenario() -> None:
        run = Run(age=0, max_generation_failures=limit)
        run.engine.failing |= {tuple(prompt_ids(ordinal)) for ordinal in hopeless}
        async with collecting(run) as task:
            groups = await run.train(2 * limit + 4)
            assert not task.done()
        ordinals = sorted(group.ordinal for group in groups)
        assert ordinals == [q for q in range(len(groups) + len(hopeless)) if q not in hopeless]
        for ordinal in hopeless:
            assert "generation failed: " in (run.buffer.ledger.drop_reason(ordinal) or "")
        assert run.collector.stats().dropped == len(hopeless)

    asyncio.run(scenario())


@pytest.mark.parametrize("groups_at_once", [1, 4])
def test_processes_that_do_not_work_end_the_run_and_drop_no_prompt_however_often_it_is_restarted(
    groups_at_once: int,
) -> None:
    """A restart forgets the row. Each prompt's own count grows, but shows nothing while no other prompt succeeds."""

    async def scenario() -> None:
        snapshot: str | None = None
        for _ in range(6):
            run = Run(age=0, max_generation_failures=2, max_concurrent_groups=groups_at_once)
            run.engine.fail_next(10**6)
            await run.replay.restore(snapshot, resume_step=0)
            async with collecting(run) as task:
                await run.open(0)
                with pytest.raises(
                    PartDiedError, match=r"\d in a row, of ordinals \[0, 1.*max_generation_failures=2"
                ):
                    await task
            snapshot = await run.replay.snapshot()
        assert run.buffer.ledger.counts().dropped == 0
        healed = Run(age=0, max_generation_failures=2)
        await healed.replay.restore(snapshot, resume_step=0)
        async with collecting(healed):
            groups = await healed.train(3)
        assert sorted(group.ordinal for group in groups) == list(range(3 * PROMPTS))

    asyncio.run(scenario())


def test_failures_of_a_prompt_are_counted_over_a_resume() -> None:
    """A run that is restarted more often than the limit would otherwise try a hopeless prompt for ever."""

    class FailsLate(FakeEngine):
        async def generate(self, *args: Sequence[int], **kwargs: object) -> list[Completion]:
            if tuple(args[0]) in self.failing:
                succeeded = len(self.requests)
                # More than its neighbours of the same turn, which may have begun only.
                await until(lambda: len(self.requests) > succeeded + 3, "another prompt succeeds meanwhile")
                raise GenerationError("never works")
            return await super().generate(*args, **kwargs)  # type: ignore[arg-type]

    def life() -> Run:
        run = Run(age=6, engine=FailsLate(), max_generation_failures=2, max_concurrent_groups=3)
        run.engine.failing.add(tuple(prompt_ids(1)))
        return run

    async def scenario() -> None:
        first = life()
        async with collecting(first):
            await first.open(0)
            await until(lambda: first.collector.stats().failures == 1, "it failed once")
        snapshot = await first.replay.snapshot()
        second = life()
        await second.replay.restore(snapshot, resume_step=0)
        async with collecting(second):
            groups = await second.train(3)
        assert 1 not in {group.ordinal for group in groups}
        failures = first.collector.stats().failures + second.collector.stats().failures
        assert failures == 3 and second.collector.stats().dropped == 1

    asyncio.run(scenario())


def test_a_dead_engine_is_fatal_whatever_the_limit() -> None:
    """#3488."""

    async def scenario() -> None:
        run = Run(max_generation_failures=100)
        async with collecting(run) as task:
            await run.open(0)
            await run.take(0)
            run.engine.die("engine core was killed")
            await run.open(1)
            with pytest.raises(PartDiedError, match="EngineDeadError: engine core was killed"):
                for step in range(1, 4):
                    await run.take(step)
                    await run.open(step + 1)
            with pytest.raises(PartDiedError):
                await task

    asyncio.run(scenario())


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_ends_the_run_with_its_ordinal(reward: float) -> None:
    async def scenario() -> None:
        run = Run(scorer=FakeScorer(lambda prompt, _: reward if prompt.ordinal == 2 else 1.0))
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(
                PartDiedError, match="ordinal 2 for step 0: NonFiniteError: rewards"
            ) as caught:
                await task
            cause = caught.value.__cause__
            assert cause is not None and isinstance(cause.__cause__, NonFiniteError)
            assert cause.__cause__.ordinals == (2,)

    asyncio.run(scenario())


def test_a_scorer_that_raises_ends_the_run_and_never_becomes_a_zero() -> None:
    """#3635."""

    def reward(prompt: Prompt, response: Sequence[int]) -> float:
        raise KeyError("no answer in the metadata")

    async def scenario() -> None:
        run = Run(scorer=FakeScorer(reward), max_generation_failures=20)
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(
                PartDiedError, match=r"2\d in a row.* ScoringError: .*KeyError: 'no answer in the metadata'"
            ):
                await task
            assert (await run.replay.status()).size == 0

    asyncio.run(scenario())


def test_a_scorer_that_hangs_in_a_thread_ends_the_run() -> None:
    def reward(prompt: Prompt, response: Sequence[int]) -> float:
        time.sleep(1.0)
        return 0.0

    async def scenario() -> None:
        run = Run(scorer=FakeScorer(reward), scoring_deadline_s=0.05)
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(PartDiedError, match=r"scoring of prompt ordinal \d took more than 0.1 s"):
                await task

    asyncio.run(scenario())


def troublesome(*, deadline_s: float = 1.0, **trouble: int | str) -> ProcessScoring:
    """Scoring by `Troublesome` in one process."""
    return ProcessScoring(
        target="megatron_ppo.testing.troublesome_scorer.Troublesome",
        kwargs=trouble,
        processes=1,
        deadline_s=deadline_s,
    )


@pytest.mark.parametrize("trouble", ["hang", "crash", "raise"])
def test_a_run_survives_a_scorer_that_fails_now_and_then(trouble: str, tmp_path: Path) -> None:
    """It is killed, started again, and asked again; no group is generated again for it."""
    once = str(tmp_path / "happened")

    async def scenario() -> None:
        run = Run(scoring=troublesome(trouble=trouble, ordinal=2, once=once), max_retries=1)
        async with collecting(run):
            groups = await run.train(2)
        assert Path(once).exists()
        assert sorted(group.ordinal for group in groups) == list(range(2 * PROMPTS))
        assert run.collector.stats().retries == 1
        assert run.collector.stats().failures == 0
        assert all(t.reward == len(t.completion.token_ids) for g in groups for t in g.trajectories)

    asyncio.run(scenario())


def test_a_prompt_whose_scoring_always_hangs_is_dropped_with_the_reason() -> None:
    async def scenario() -> None:
        run = Run(
            age=6,
            scoring=troublesome(trouble="hang", ordinal=1, deadline_s=0.5),
            max_generation_failures=1,
            max_concurrent_groups=3,
        )
        async with collecting(run):
            groups = await run.train(2)
        assert 1 not in {group.ordinal for group in groups}
        assert len(groups) == 2 * PROMPTS
        assert run.collector.stats().dropped == 1
        reason = run.buffer.ledger.drop_reason(1)
        assert reason is not None and "scoring of prompt ordinal 1 took more than 0.5 s" in reason

    asyncio.run(scenario())


def test_stopping_kills_a_scorer_that_hangs() -> None:
    async def scenario() -> None:
        scoring = troublesome(trouble="hang", ordinal=0, deadline_s=LONG_S)
        (pid,) = scoring.pids
        run = Run(scoring=scoring, max_concurrent_groups=1)
        async with collecting(run):
            await run.open(0)
            await until(lambda: bool(run.engine.requests), "the first group is generated")
        assert scoring.pids == ()
        assert not Path(f"/proc/{pid}").exists()

    asyncio.run(scenario())


def test_scoring_does_not_block_the_event_loop() -> None:
    """prime-rl#1713: CPU work belongs off the loop; the lag gauge would show it."""

    def reward(prompt: Prompt, response: Sequence[int]) -> float:
        time.sleep(0.3)
        return 0.0

    async def scenario() -> None:
        run = Run(scorer=FakeScorer(reward))
        async with collecting(run):
            await run.open(0)
            await until(lambda: run.collector.stats().groups >= 1, "one group is scored")
            # Two responses take 0.6 s; on the loop that would be the lag. A loaded machine stays below.
            assert run.collector.stats().max_loop_lag_s < 0.5

    asyncio.run(scenario())


def test_a_blocked_event_loop_shows_in_the_gauge() -> None:
    async def scenario() -> None:
        run = Run()
        async with collecting(run):
            await asyncio.sleep(0.05)
            time.sleep(0.6)
            await until(lambda: run.collector.stats().max_loop_lag_s > 0.3, "the lag is measured")

    asyncio.run(scenario())


@pytest.mark.parametrize("returned", [1, 3])
def test_a_wrong_number_of_responses_ends_the_run_and_releases_the_slot(returned: int) -> None:
    """C10."""

    class Miscounting(FakeEngine):
        async def generate(self, *args: object, **kwargs: object) -> list[Completion]:
            completions = await super().generate(*args, **kwargs)  # type: ignore[arg-type]
            return (completions * 2)[:returned]

    async def scenario() -> None:
        run = Run(engine=Miscounting())
        async with collecting(run) as task:
            await run.open(0)
            with pytest.raises(PartDiedError, match=f"returned {returned} responses .* asked for 2"):
                await task
            assert (await run.replay.status()).reserved == {}

    asyncio.run(scenario())


def test_stop_cancels_running_rollouts_and_releases_their_slots() -> None:
    """C12: what is cancelled by a stop is no failure."""

    async def scenario() -> None:
        run = Run(age=1, max_concurrent_groups=10)
        for ordinal in range(2 * PROMPTS):
            run.engine.hanging.add(tuple(prompt_ids(ordinal)))
        task = asyncio.create_task(run.collector.run())
        await run.open(0)
        await until(lambda: run.engine.num_running == 2 * PROMPTS * GENERATIONS, "all slots are in flight")
        start = time.monotonic()
        await run.collector.stop(timeout_s=LONG_S)
        assert time.monotonic() - start < 5
        await task  # ends without an error
        status = await run.replay.status()
        assert status.reserved == {}
        assert set(status.pending.values()) == {"the collector stopped"}
        assert run.engine.num_running == 0
        assert run.collector.stats().failures == 0

    asyncio.run(scenario())


def test_failures_during_a_stop_are_not_counted() -> None:
    """C12."""

    class FailsOnCancel(FakeEngine):
        async def generate(self, *args: object, **kwargs: object) -> list[Completion]:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError as error:
                raise RuntimeError("connection closed") from error
            raise AssertionError("unreachable")

    async def scenario() -> None:
        run = Run(engine=FailsOnCancel())
        task = asyncio.create_task(run.collector.run())
        await run.open(0)
        await until(lambda: run.collector.stats().in_flight > 0, "rollouts are in flight")
        await run.collector.stop(timeout_s=LONG_S)
        await task
        assert (await run.replay.status()).reserved == {}

    asyncio.run(scenario())


def test_stop_before_run_and_stop_twice_are_harmless() -> None:
    async def scenario() -> None:
        idle = Run()
        await idle.collector.stop(timeout_s=LONG_S)
        run = Run()
        async with collecting(run):
            await run.train(1)
            await run.collector.stop(timeout_s=LONG_S)

    asyncio.run(scenario())


def test_pause_stops_new_dispatches_and_lets_running_ones_finish() -> None:
    async def scenario() -> None:
        run = Run(age=1, engine=FakeEngine(token_latency_s=0.01), max_concurrent_groups=2)
        async with collecting(run):
            await run.open(0)
            await until(lambda: run.engine.num_running > 0, "something runs")
            await run.collector.pause(timeout_s=LONG_S)
            in_flight = run.collector.stats().in_flight
            done = run.collector.stats().groups
            await until(lambda: run.collector.stats().in_flight == 0, "running rollouts finish")
            await asyncio.sleep(0.15)  # three reserve periods
            assert len(run.engine.requests) == done + in_flight < 2 * PROMPTS
            await run.collector.resume()
            await run.take(0)

    asyncio.run(scenario())


def test_pausing_an_idle_collector_is_acknowledged_by_its_next_look() -> None:
    async def scenario() -> None:
        run = Run()
        async with collecting(run):
            await asyncio.sleep(0.02)  # it waits for the window, which stays closed
            start = time.monotonic()
            await run.collector.pause(timeout_s=LONG_S)
            assert time.monotonic() - start < 5  # one reserve period of 0.05 s, on a loaded machine

    asyncio.run(scenario())


def test_drain_returns_when_nothing_is_in_flight() -> None:
    async def scenario() -> None:
        run = Run(engine=FakeEngine(token_latency_s=0.005))
        async with collecting(run):
            await run.open(0)
            await until(lambda: run.engine.num_running > 0, "something runs")
            await run.collector.drain(timeout_s=LONG_S)
            assert run.engine.num_running == 0
            assert (await run.replay.status()).reserved == {}

    asyncio.run(scenario())


def test_a_drain_that_cannot_end_says_so() -> None:
    async def scenario() -> None:
        run = Run()
        run.engine.hanging.add(tuple(prompt_ids(0)))
        async with collecting(run):
            await run.open(0)
            await until(lambda: run.engine.num_running > 0, "something runs")
            with pytest.raises(WaitTimeoutError, match="running rollouts to end"):
                await run.collector.drain(timeout_s=0.3)

    asyncio.run(scenario())


def test_no_more_groups_run_at_once_than_allowed() -> None:
    async def scenario() -> None:
        run = Run(age=3, max_concurrent_groups=2)
        async with collecting(run):
            await run.train(4)
        assert run.engine.max_running == 2 * GENERATIONS

    asyncio.run(scenario())


def test_weights_published_under_running_requests_are_stamped_per_token() -> None:
    """In-flight updates: nothing is lost, and spans show which version sampled which token."""

    async def scenario() -> None:
        engine = FakeEngine(token_latency_s=0.002, length_of=lambda seed, limit: 1 + seed % limit)
        run = Run(age=2, engine=engine, max_concurrent_groups=3)
        async with collecting(run):
            groups = await run.train(8)
        assert len(groups) == 8 * PROMPTS
        mixed = [group for group in groups if group.min_version != group.max_version]
        assert mixed
        for group in groups:
            assert 0 <= run.schedule.version_at(group.target_step) - group.min_version <= 2
            assert group.max_version <= run.schedule.version_at(group.target_step)

    asyncio.run(scenario())


def test_a_buffer_that_died_ends_the_collector_with_that_cause() -> None:
    async def scenario() -> None:
        run = Run()

        async def gone(**_: object) -> list[object]:
            raise PartDiedError("the replay buffer's process died")

        run.replay.reserve = gone  # type: ignore[method-assign, assignment]
        with pytest.raises(PartDiedError, match="replay buffer's process died"):
            await run.collector.run()

    asyncio.run(scenario())


def test_run_is_awaited_once() -> None:
    async def scenario() -> None:
        run = Run()
        async with collecting(run):
            await run.train(1)
            with pytest.raises(RuntimeError, match="only once"):
                await run.collector.run()

    asyncio.run(scenario())


def test_long_and_short_responses_are_trained_alike() -> None:
    """Ours trains on exactly the prompts that were sampled, so skewed lengths are not thinned out."""

    async def scenario() -> None:
        engine = FakeEngine(token_latency_s=0.0005)
        run = Run(age=2, engine=engine, max_concurrent_groups=6)
        async with collecting(run):
            groups = await run.train(20)
        assert sorted(group.ordinal for group in groups) == list(range(20 * PROMPTS))

    asyncio.run(scenario())
