"""The real collector and the real replay service over a fake engine, as the loop's groups and snapshots.

Whoever derives from it says on which event loop they live and when that runs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from megatron_ppo.collector.collector import Collector
from megatron_ppo.collector.scoring import ThreadScoring
from megatron_ppo.collector.whole_step import StepBatches
from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup, SamplingSettings
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine, FakeScorer
from megatron_ppo.testing.loop_fakes import StepOrder
from tests.unit.loop.fake_run import GENERATIONS, PROMPTS

T = TypeVar("T")
LIMIT_S = 60.0
"""Only a deadlock takes that long; a call takes milliseconds."""


class Collection(ABC):
    """`GroupSource` and `ReplaySnapshots`.

    Args:
        prompts: the collector's stream.   journal: of the replay service, and of its buffer.
        deterministic: as the parts of a run with `run.deterministic` are set.
        reserve_timeout_s: how long a pause may wait for a reservation.
        around_replay: what the collector sees of the replay service.   collector: its further arguments.
    """

    def __init__(
        self,
        order: StepOrder,
        *,
        schedule: AsyncSchedule,
        engine: FakeEngine,
        prompts: Any,
        seed: int,
        reserve_timeout_s: float,
        max_new_tokens: int = 6,
        scorer: Scorer | None = None,
        scorer_threads: int = 1,
        journal: LedgerFile | None = None,
        deterministic: bool = False,
        around_replay: Callable[[ReplayService], Any] = lambda replay: replay,
        **collector: Any,
    ) -> None:
        self._order = order
        self.engine = engine
        self.replay = ReplayService(
            PromptGroupBuffer(
                schedule=schedule,
                num_prompts_per_step=PROMPTS,
                num_generations_per_prompt=GENERATIONS,
                takes_in_ordinal_order=deterministic,
                journal=journal,
            ),
            journal=journal,
        )
        self.collector = Collector(
            replay=around_replay(self.replay),
            engine=StepBatches(engine) if deterministic else engine,
            scoring=ThreadScoring(scorer or FakeScorer(), threads=scorer_threads, deadline_s=LIMIT_S),
            prompts=prompts,
            num_generations=GENERATIONS,
            sampling=SamplingSettings(max_new_tokens=max_new_tokens),
            seed=seed,
            max_concurrent_groups=3,
            deadline_s=LIMIT_S,
            reserve_timeout_s=reserve_timeout_s,
            **collector,
        )

    @abstractmethod
    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the collection's event loop."""

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """See `GroupSource.take`."""
        self._order.took(target_step)
        return self.call(self.replay.take(target_step=target_step, timeout_s=LIMIT_S))

    def open(self, *, step: int, frontier: int) -> None:
        """See `GroupSource.open`."""
        self._order.opened(step, frontier)
        self.call(self.replay.open(step=step, frontier=frontier))

    def snapshot(self) -> str:
        """See `ReplaySnapshots.snapshot`."""
        self.call(self.collector.pause(timeout_s=LIMIT_S))
        try:
            return self.call(self.replay.snapshot())
        finally:
            self.call(self.collector.resume())

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """See `ReplaySnapshots.restore`."""
        self.call(self.replay.restore(snapshot, resume_step=resume_step))
