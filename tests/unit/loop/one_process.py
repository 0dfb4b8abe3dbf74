"""A whole asynchronous run in one process: the real loop, collector and buffer, a fake engine and fake models.

The collector and the buffer live on an event loop in a thread of its own, as they live in actors in a real run;
the learner is the thread of the test.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.replay.status import BufferStatus
from megatron_ppo.testing.fakes import FakeEngine, FakePromptStream
from megatron_ppo.testing.loop_fakes import FakeRefit, StepOrder
from tests.unit.loop.collection import LIMIT_S, Collection
from tests.unit.loop.fake_run import WorkLog

T = TypeVar("T")


class LiveCollection(Collection):
    """A collection that works all the time, whatever the learner does."""

    def __init__(
        self,
        order: StepOrder,
        *,
        schedule: AsyncSchedule,
        work: WorkLog,
        engine: FakeEngine,
        scorer: Scorer | None = None,
        deterministic: bool = False,
        **collector: Any,
    ) -> None:
        super().__init__(
            order,
            schedule=schedule,
            engine=engine,
            prompts=FakePromptStream(),
            seed=42,
            reserve_timeout_s=0.02,
            scorer=scorer,
            scorer_threads=2,
            deterministic=deterministic,
            **collector,
        )
        self._work = work
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="collection", daemon=True)
        self._thread.start()
        self._running = asyncio.run_coroutine_threadsafe(self.collector.run(), self._loop)

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collection's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """See `GroupSource.take`."""
        groups = super().take(target_step=target_step)
        self._work.begin(target_step, groups)
        return groups

    def status(self) -> BufferStatus:
        """Of the buffer."""
        return self.call(self.replay.status())

    def close(self) -> None:
        """End collector, event loop and thread, whatever state they are in."""
        try:
            self.call(self.collector.stop(timeout_s=LIMIT_S))
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(LIMIT_S)
            self._loop.close()


class LiveRefit:
    """`FakeRefit` that also makes the fake engine serve the version, under running requests."""

    def __init__(self, order: StepOrder, collection: LiveCollection) -> None:
        self._fake = FakeRefit(order)
        self._collection = collection

    def push(self, *, version: int) -> Mapping[str, float]:
        """See `Refit.push`."""

        async def publish() -> None:
            if version > self._collection.engine.version:
                self._collection.engine.publish(version)

        self._collection.call(publish())
        return self._fake.push(version=version)


@contextmanager
def live_collection(
    order: StepOrder, *, schedule: AsyncSchedule, work: WorkLog, engine: FakeEngine, **options: Any
) -> Iterator[LiveCollection]:
    """A collection that ends with the block."""
    collection = LiveCollection(order, schedule=schedule, work=work, engine=engine, **options)
    try:
        yield collection
    finally:
        collection.close()
