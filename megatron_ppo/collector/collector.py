"""Collector: keeps every free slot of the window busy, group by group.

Owns the running rollouts and the failure rule. Driven by `run`, which its process awaits; the other methods
may be called at any time from the same event loop. A group is committed as soon as it is complete, so a slow
one holds nobody but itself.

Invariant: a reservation that was handed to the collector is committed, released or dropped, whatever happens.
"""

from __future__ import annotations

import asyncio
import enum
import logging
import time
from collections.abc import Awaitable, Callable

from megatron_ppo.collector.rollout import GroupRollout
from megatron_ppo.collector.scoring import Scoring
from megatron_ppo.collector.stats import CollectorStats, StatsRecorder
from megatron_ppo.collector.whole_step import StepBatches
from megatron_ppo.protocol.errors import GenerationError, PartDiedError, ScoringError, WaitTimeoutError
from megatron_ppo.protocol.ports import PromptStream, Replay, RolloutEngine
from megatron_ppo.protocol.trajectory import Reservation, SamplingSettings

logger = logging.getLogger(__name__)


class _Fate(enum.Enum):
    """What becomes of a prompt whose group was not committed."""

    AGAIN = "again"
    AFTER_A_FAILURE = "again, and the failure counts"
    AFTER_OTHERS = "the same, after a group of another prompt was committed"
    DROPPED = "never again"


async def _at_once() -> None:
    """An engine that is always there."""


class Collector:
    """The loop reserve → roll out → score → commit.

    consumes: free slots from `replay`, prompts by ordinal.   produces: committed prompt groups.
    waits for: a free slot in the window; fewer than `max_concurrent_groups` rollouts; `resume` while paused.
    unblocked by: the learner opening the window, a rollout ending, `resume`, `stop`.

    Args:
        engine: `StepBatches` makes this the collector of a deterministic run: it starts nothing while anything runs,
            and then everything that is free in one go, in ordinal order, with sampling seeds that depend on the step.
        max_concurrent_groups: rollouts at the same time; enough to keep every engine slot busy.
        max_generation_failures: a group that used up its retries of generation or scoring is released, generated
            again and counted. When more than this many have failed in a row, which a restart begins to count anew,
            other prompts go first: the run ends if the first of them fails, too, and otherwise it was not the fault
            of the processes. A prompt that fails more often than this while others succeed is dropped. The buffer
            counts that, so that neither a restart of this process nor a resume begins anew.
        reserve_timeout_s: how long one request for slots may wait; `stop` and `pause` take effect within it.
        For the others see `GroupRollout`.
    """

    def __init__(
        self,
        *,
        replay: Replay,
        engine: RolloutEngine,
        scoring: Scoring,
        prompts: PromptStream,
        num_generations: int,
        sampling: SamplingSettings,
        seed: int,
        max_concurrent_groups: int,
        deadline_s: float,
        max_retries: int = 1,
        retry_backoff_s: float = 0.5,
        max_generation_failures: int = 0,
        reserve_timeout_s: float = 0.5,
        engine_ready: Callable[[], Awaitable[None]] = _at_once,
    ) -> None:
        if max_concurrent_groups < 1:
            raise ValueError(f"max_concurrent_groups must be >= 1, got {max_concurrent_groups}")
        self._recorder = StatsRecorder()
        self._step_batches = engine if isinstance(engine, StepBatches) else None
        self._rollout = GroupRollout(
            engine=engine,
            scoring=scoring,
            prompts=prompts,
            num_generations=num_generations,
            sampling=sampling,
            seed=seed,
            seed_by_step=self._step_batches is not None,
            deadline_s=deadline_s,
            max_retries=max_retries,
            retry_backoff_s=retry_backoff_s,
            recorder=self._recorder,
            note=replay.note,
            engine_ready=engine_ready,
        )
        self._replay = replay
        self._max_concurrent_groups = max_concurrent_groups
        self._max_generation_failures = max_generation_failures
        self._reserve_timeout_s = reserve_timeout_s
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Condition()
        self._paused = False
        self._stopping = False
        self._dispatching = False
        self._finished = False
        self._started = False
        self._failure: PartDiedError | None = None
        self._row: set[int] = set()  # ordinals that have failed since the last success
        self._has_succeeded = False

    async def run(self) -> None:
        """Collect until `stop`. Awaited once.

        Raises: PartDiedError with the cause (ordinal, target step, error) when collection cannot go on; the
            replay buffer has been told before.
        """
        if self._started:
            raise RuntimeError("run() may be awaited only once per collector")
        self._started = True
        lag_probe = asyncio.create_task(self._recorder.watch_loop_lag(), name="loop-lag")
        try:
            await self._dispatch_until_stopped()
        except Exception as error:  # the border of the process: kept, reported and raised below
            self._keep_failure(PartDiedError(f"{type(error).__name__}: {error}"), error)
        finally:
            lag_probe.cancel()
            await self._cancel_rollouts()
            self._rollout.close()
            self._finished = True
            await self._notify()
        if self._failure is not None:
            await self._report(self._failure)
            raise PartDiedError(f"collection failed: {self._failure}") from self._failure

    async def pause(self, *, timeout_s: float) -> None:
        """Dispatch nothing until `resume`; returns when nothing can be dispatched. Running rollouts go on."""
        self._paused = True
        await self._wait_for(lambda: not self._dispatching, timeout_s, "the collector to pause")

    async def resume(self) -> None:
        """Dispatch again."""
        self._paused = False
        await self._notify()

    async def drain(self, *, timeout_s: float) -> None:
        """Pause, then wait until every running rollout has been committed or released."""
        await self.pause(timeout_s=timeout_s)
        await self._wait_for(lambda: not self._tasks, timeout_s, "running rollouts to end")

    async def stop(self, *, timeout_s: float) -> None:
        """Cancel running rollouts, release their reservations, and return when `run` has ended."""
        self._stopping = True
        await self._notify()
        if self._started:
            await self._wait_for(lambda: self._finished, timeout_s, "the collector to stop")

    def stats(self) -> CollectorStats:
        """Totals since the start."""
        return self._recorder.snapshot(in_flight=len(self._tasks))

    async def _dispatch_until_stopped(self) -> None:
        while not self._must_end():
            async with self._changed:
                await self._changed.wait_for(lambda: self._may_dispatch() or self._must_end())
            if not self._must_end():
                await self._dispatch()

    async def _dispatch(self) -> None:
        """Reserve what is free and start it; `_dispatching` covers both, so `pause` sees no gap between."""
        self._dispatching = True
        try:
            start = time.monotonic()
            reservations = await self._replay.reserve(
                limit=self._max_concurrent_groups - len(self._tasks), timeout_s=self._reserve_timeout_s
            )
            if not reservations:
                self._recorder.add(window_wait_s=time.monotonic() - start)
            if self._step_batches is not None and reservations and not self._must_end():
                self._step_batches.expect(len(reservations))
            for reservation in reservations:
                if self._must_end():
                    await self._replay.release(reservation, reason="the collector stopped")
                else:
                    self._start(reservation)
        finally:
            self._dispatching = False
            await self._notify()

    def _start(self, reservation: Reservation) -> None:
        name = f"ordinal {reservation.ordinal} for step {reservation.target_step}"
        task = asyncio.create_task(self._collect(reservation), name=name)
        self._tasks.add(task)

    async def _collect(self, reservation: Reservation) -> None:
        """One rollout; never raises. What ends the run is kept in `_failure`."""
        fate: _Fate | None = _Fate.AGAIN
        reason = "the collector stopped"
        try:
            group = await self._rollout.roll_out(reservation)
            await self._replay.commit(group)
            fate = None
            self._has_succeeded = True
            self._row.clear()
            tokens = sum(len(trajectory.completion.token_ids) for trajectory in group.trajectories)
            self._recorder.succeeded(trajectories=len(group.trajectories), response_tokens=tokens)
        except asyncio.CancelledError:
            logger.info("ordinal %d: rollout cancelled", reservation.ordinal)
        except (GenerationError, ScoringError) as error:
            what = "generation" if isinstance(error, GenerationError) else "scoring"
            reason = f"{what} failed: {error}"
            fate = self._judge_failure(reservation, error)
        except Exception as error:  # the border of the process: what ends the run is raised by `run`
            reason = f"{type(error).__name__}: {error}"
            self._record_fatal(reservation, error)
        finally:
            if fate is not None:
                await self._give_back(reservation, reason, fate)
            self._tasks.discard(asyncio.current_task())
            await self._notify()

    async def _give_back(self, reservation: Reservation, reason: str, fate: _Fate) -> None:
        try:
            if fate is _Fate.DROPPED:
                await self._replay.drop(reservation, reason=reason)
                self._recorder.add(dropped=1)
            else:
                await self._replay.release(
                    reservation,
                    reason=reason,
                    failed=fate is not _Fate.AGAIN,
                    others_first=fate is _Fate.AFTER_OTHERS,
                )
        except Exception as error:  # the buffer is gone; the rollout must still end, and `run` raises
            self._record_fatal(reservation, error)

    def _judge_failure(self, reservation: Reservation, error: Exception) -> _Fate:
        """Count a group that used up its retries; what becomes of its prompt.

        A prompt that alone is left to do, and fails, looks like processes that do not work. Only another prompt tells
        the two apart: none is dropped, and the run does not end, before another one was tried.
        """
        if self._stopping:
            return _Fate.AGAIN
        limit, ordinal = self._max_generation_failures, reservation.ordinal
        in_a_row, of_this_prompt = self._recorder.failed(), reservation.failures + 1
        logger.warning("ordinal %d failed for step %d: %s", ordinal, reservation.target_step, error)
        is_repeated = ordinal in self._row
        self._row.add(ordinal)
        if in_a_row > limit and not is_repeated:
            row = f"{in_a_row} in a row, of ordinals {sorted(self._row)}; {of_this_prompt} of this prompt"
            self._record_fatal(reservation, error, row)
            return _Fate.AFTER_A_FAILURE
        if of_this_prompt > limit and self._has_succeeded and not is_repeated:
            return _Fate.DROPPED
        if in_a_row > limit or of_this_prompt > limit:
            return _Fate.AFTER_OTHERS
        return _Fate.AFTER_A_FAILURE

    def _record_fatal(self, reservation: Reservation, error: Exception, count: str | None = None) -> None:
        limit = f" ({count}; max_generation_failures={self._max_generation_failures})" if count else ""
        failure = PartDiedError(
            f"prompt ordinal {reservation.ordinal} for step {reservation.target_step}{limit}: "
            f"{type(error).__name__}: {error}"
        )
        self._keep_failure(failure, error)

    def _keep_failure(self, failure: PartDiedError, cause: Exception) -> None:
        if self._stopping or self._failure is not None:
            return
        failure.__cause__ = cause
        self._failure = failure
        logger.error("collection ends: %s", failure, exc_info=cause)

    async def _report(self, failure: PartDiedError) -> None:
        try:
            await self._replay.fail(str(failure))
        except Exception as error:  # the buffer is gone too; what `run` raises must stay the first cause
            logger.error("the replay buffer could not be told: %s", error)

    async def _cancel_rollouts(self) -> None:
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _must_end(self) -> bool:
        return self._stopping or self._failure is not None

    def _may_dispatch(self) -> bool:
        # Of a step that is reserved in parts, the parts would run in different company every time.
        most = self._max_concurrent_groups if self._step_batches is None else 1
        return not self._paused and len(self._tasks) < most

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    async def _wait_for(self, predicate: Callable[[], bool], timeout_s: float, what: str) -> None:
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                await self._changed.wait_for(predicate)
        except TimeoutError as error:
            raise WaitTimeoutError(f"waited {timeout_s:.1f} s for {what}; {self.stats()}") from error
