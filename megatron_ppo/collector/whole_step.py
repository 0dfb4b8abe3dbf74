"""StepBatches: gathers the requests of one training step and hands them to the engine in one call.

Owns the requests that wait for their step to be complete. Driven by the collector of a deterministic run: it says how
many groups it is about to start, and starts them in ordinal order.

Invariant: the engine is asked for whole steps only, with the groups in the order in which they were asked for. Which
requests run together, and so every bit of their answers, depends on no timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from megatron_ppo.protocol.errors import GenerationError
from megatron_ppo.protocol.ports import WholeStepEngine
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings

_Waiting = tuple[GroupRequest, asyncio.Future[list[Completion]]]


class StepBatches:
    """A `RolloutEngine` over a `WholeStepEngine`; all calls from one event loop.

    A step is answered or fails as a whole: every call then raises the same error, and when all are made again they
    are one batch again, equal to the first.
    """

    def __init__(self, engine: WholeStepEngine) -> None:
        self._engine = engine
        self._num_groups = 0
        self._waiting: list[_Waiting] = []
        self._running: asyncio.Task[None] | None = None

    def expect(self, num_groups: int) -> None:
        """The next `num_groups` calls of `generate` are one step. Raises: RuntimeError inside of another one."""
        if self._waiting or (self._running is not None and not self._running.done()):
            raise RuntimeError(
                f"{num_groups} groups are announced while a step of {self._num_groups} is not finished"
            )
        self._num_groups = num_groups

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`; waits until the step is complete. A cancelled call ends its whole step."""
        request = GroupRequest(prompt_token_ids=tuple(prompt_token_ids), seeds=tuple(seeds))
        answer: asyncio.Future[list[Completion]] = asyncio.get_running_loop().create_future()
        self._waiting.append((request, answer))
        if len(self._waiting) == self._num_groups:
            step, self._waiting = self._waiting, []
            self._running = asyncio.create_task(self._run(step, sampling, deadline_s), name="step batch")
        try:
            return await answer
        except asyncio.CancelledError:
            self._waiting = [entry for entry in self._waiting if entry[1] is not answer]
            if self._running is not None:
                self._running.cancel()
            raise

    async def _run(self, step: Sequence[_Waiting], sampling: SamplingSettings, deadline_s: float) -> None:
        """Answer every call of `step`; never raises anything but its cancellation."""
        failure: Exception = GenerationError("the batch of the step was cancelled with one of its groups")
        answers: list[list[Completion]] = []
        try:
            answers = await self._engine.generate_groups(
                [request for request, _ in step], sampling=sampling, deadline_s=deadline_s
            )
            failure = GenerationError(f"the engine answered {len(answers)} of {len(step)} groups")
        except Exception as error:  # handed to the callers, which know what a failure means
            failure = error
        finally:
            complete = len(answers) == len(step)
            for index, (_, answer) in enumerate(step):
                if answer.done():
                    continue
                if complete:
                    answer.set_result(answers[index])
                else:
                    answer.set_exception(failure)
