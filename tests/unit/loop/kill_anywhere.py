"""Kills a whole run at a chosen point, again and again, and resumes it from what is on disk.

The real loop, collector, replay buffer, ledger and checkpoints in one thread; fake engine and fake models. A point is
the begin or the end of any call between the loop and a part, any file operation below the run's folder (found by
the interpreter's audit events, so none is forgotten), the middle of a written file, any request to the engine, the
first prompt of an epoch, and any move of the ledger that takes a prompt back or gives it up.
From its death on a process changes nothing on disk: no clean-up of a `finally` gets through. What the ledger had not
synced when it died is cut at a random byte, which is worse than kill -9 and as bad as a loss of power.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from array import array
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from megatron_ppo.data.prompts import ShuffledPrompts
from megatron_ppo.data.task import TaskExample
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.loop.async_ppo import Parts, train
from megatron_ppo.loop.checkpoint_folder import CheckpointFolder, Retention, read_complete
from megatron_ppo.loop.checkpoints import RunCheckpoints
from megatron_ppo.loop.identity import Trait
from megatron_ppo.loop.recorded import RecordedGroups
from megatron_ppo.protocol.moves import Move, Stage
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, Prompt, Reservation, SamplingSettings
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import FakeEngine, prompt_ids
from megatron_ppo.testing.loop_fakes import (
    FakeCritic,
    FakeModelStore,
    FakePolicy,
    FakeRefit,
    FakeTelemetry,
    FakeValidator,
    StepOrder,
)
from tests.unit.loop.collection import LIMIT_S, Collection
from tests.unit.loop.fake_run import OrderedCheckpoints, loop_settings, on_rank_zero
from tests.unit.loop.killed_save import OPERATIONS, Killed

T = TypeVar("T")
EPOCH = 5
"""Prompts per epoch: no multiple of a step's, so epochs end inside of steps and at their borders."""
STREAM = ShuffledPrompts(
    examples=[
        TaskExample(token_ids=prompt_ids(number), text=f"{number}=", answer=str(number))
        for number in range(EPOCH)
    ],
    seed=7,
)


@dataclass
class Death:
    """When a process dies: at its point number `at`, counted from 0; None lets it live.

    Attributes:
        kind: count points of this kind only; None counts all.
        folder: file operations below it are points.   seen: how often each kind of point was passed.
        where: kind of the point at which it died.   on_death: wakes whoever waits for the dead.
    """

    folder: Path
    at: int | None
    kind: str | None = None
    seen: Counter[str] = field(default_factory=Counter)
    where: str | None = None
    on_death: Callable[[], object] = lambda: None

    def point(self, kind: str) -> None:
        """Pass a point, or die there. Raises: Killed there, and at every later point."""
        if self.where is not None:
            raise Killed(self.where)
        counted = self.seen.total() if self.kind is None else self.seen[self.kind]
        if self.at is not None and self.kind in (None, kind) and counted >= self.at:
            self.where = kind
            self.on_death()
            raise Killed(kind)
        self.seen[kind] += 1


class _FilePoints:
    """Makes points of the file operations of the process that is alive; an audit hook can never be removed."""

    def __init__(self) -> None:
        self.death: Death | None = None
        self._write_text = Path.write_text
        sys.addaudithook(self._audit)

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if self.death is None or event not in OPERATIONS:
            return
        path = str(arguments[0])
        if path.startswith(str(self.death.folder)):
            self.death.point(f"{event} {_kind_of(path)}")

    def write_text(self, path: Path, text: str, **options: Any) -> int:
        """`Path.write_text` with a point in its middle."""
        death = self.death
        if death is None or not str(path).startswith(str(death.folder)):
            return self._write_text(path, text, **options)
        written = self._write_text(path, text[: len(text) // 2], **options)
        death.point(f"half of {_kind_of(str(path))}")
        with path.open("a") as file:
            return written + file.write(text[len(text) // 2 :])


FILE_POINTS = _FilePoints()


def _kind_of(path: str) -> str:
    return "".join("#" if c.isdigit() else c for c in Path(path).name)


class Mortal:
    """A part whose every call begins and ends with a point; in between, `pump` lets the collection work."""

    def __init__(self, part: Any, name: str, death: Death, pump: Callable[[], None]) -> None:
        self._part, self._name, self._death, self._pump = part, name, death, pump

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if not callable(value):
            return value

        def call(*arguments: Any, **options: Any) -> Any:
            self._death.point(f"before {self._name}.{name}")
            self._pump()
            result = value(*arguments, **options)
            self._pump()
            self._death.point(f"after {self._name}.{name}")
            return result

        return call


class MortalEngine(FakeEngine):
    """A fake engine whose requests are points."""

    def __init__(self, death: Death, **options: Any) -> None:
        super().__init__(**options)
        self._death_of_run = death

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        self._death_of_run.point("engine begins")
        completions = await super().generate(
            prompt_token_ids, seeds=seeds, sampling=sampling, deadline_s=deadline_s
        )
        self._death_of_run.point("engine ends")
        return completions


class MortalPrompts:
    """The prompt stream; where an epoch begins is a point."""

    def __init__(self, death: Death) -> None:
        self._death = death

    def prompt_at(self, ordinal: int) -> Prompt:
        if ordinal and ordinal % EPOCH == 0:
            self._death.point("an epoch begins")
        return STREAM.prompt_at(ordinal)


class GivingUp:
    """A replay buffer that drops the prompt whose group fails for the second time.

    The collector's own rule asks for others that succeed in between, which come and go with the moment.
    """

    def __init__(self, replay: ReplayService) -> None:
        self._replay = replay

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replay, name)

    async def release(
        self, reservation: Reservation, *, reason: str, failed: bool = False, others_first: bool = False
    ) -> None:
        assert not others_first, "the limit is out of reach"
        if failed and reservation.failures:
            await self._replay.drop(reservation, reason=reason)
        else:
            await self._replay.release(reservation, reason=reason, failed=failed)


class MortalLedger(LedgerFile):
    """A ledger file that stops with its process and knows how much of it is on the disk."""

    def __init__(self, path: Path, death: Death) -> None:
        self._death = death
        self._file = path
        super().__init__(path)
        self.synced = path.stat().st_size

    def record(self, move: Move) -> None:
        if self._death.where is not None:  # what the dead still do to their buffer never comes to the ledger
            raise Killed(self._death.where)
        rare = move.stage in (Stage.RELEASED, Stage.DROPPED, Stage.ROLLED_BACK)
        if rare:
            self._death.point(f"before a prompt is {move.stage}")
        super().record(move)
        if rare:
            self._death.point(f"after a prompt is {move.stage}")

    def flush(self) -> None:
        if self._death.where is None:
            super().flush()

    def sync(self) -> None:
        self._death.point("before the ledger's sync")
        super().sync()
        self.synced = self._file.stat().st_size
        self._death.point("after the ledger's sync")

    def end(self, rng: random.Random) -> None:
        """Close; if the process was killed, without what was not written, and torn."""
        if self._death.where is None:
            self.close()
            return
        os.close(self._descriptor)
        size = self._file.stat().st_size
        os.truncate(self._file, rng.randint(self.synced, size))


class SteppedCollection(Collection):
    """A collection that works while the learner calls or waits, and dies with the process."""

    def __init__(
        self,
        order: StepOrder,
        plan: Plan,
        engine: FakeEngine,
        ledger: MortalLedger,
        death: Death,
        seed: int,
    ) -> None:
        self._death = death
        self._loop = asyncio.new_event_loop()
        # The death of a rollout is met by `call`.
        self._loop.set_exception_handler(lambda loop, context: None)
        self._died = asyncio.Event()
        death.on_death = self._died.set
        super().__init__(
            order,
            schedule=plan.schedule,
            engine=engine,
            prompts=MortalPrompts(death),
            seed=seed,
            around_replay=GivingUp,
            max_retries=0,
            max_generation_failures=1_000_000,
            reserve_timeout_s=0.001,  # a pause waits for it
            max_new_tokens=plan.max_new_tokens,
            journal=ledger,
        )
        self._running = self._loop.create_task(self.collector.run())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises: Killed if the process dies meanwhile, in whichever of its tasks."""

        async def first() -> T:
            task, died = asyncio.ensure_future(work), asyncio.ensure_future(self._died.wait())
            await asyncio.wait({task, died}, return_when=asyncio.FIRST_COMPLETED, timeout=LIMIT_S)
            died.cancel()
            if self._death.where is not None:
                task.cancel()
                raise Killed(self._death.where)
            assert task.done(), f"{work} took more than {LIMIT_S} s"
            return await task

        return self._loop.run_until_complete(first())

    def pump(self, turns: int) -> None:
        """Let the collection work for some turns of its event loop."""

        async def turn() -> None:
            for _ in range(turns):
                await asyncio.sleep(0)

        self._loop.run_until_complete(turn())

    def close(self) -> None:
        """End everything at once."""
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(_end_of_other_tasks())
        self._loop.close()


async def _end_of_other_tasks() -> None:
    """Of the running loop; there may be none, when the collector has died itself."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)


class PublishingRefit:
    """A refit that makes the fake engine serve the version, under running requests."""

    def __init__(self, order: StepOrder, engine: FakeEngine, death: Death) -> None:
        self._fake, self._engine, self._death = FakeRefit(order), engine, death

    def push(self, *, version: int) -> Mapping[str, float]:
        if version > self._engine.version:
            self._engine.publish(version)
        self._death.point("in the middle of the refit")
        return self._fake.push(version=version)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run that is to be killed.

    Attributes:
        checkpoint_period: in steps.   asynchronous, load_replay_buffer: of its checkpoints.
        seed: of the run; None draws other responses in every life, as an engine does that does not keep to seeds.
        max_new_tokens: every token takes the engine one turn of the event loop.
        failing: number of a prompt for which every request fails; it is dropped in every epoch.
    """

    schedule: AsyncSchedule
    checkpoint_period: int
    asynchronous: bool
    load_replay_buffer: bool
    seed: int | None = None
    max_new_tokens: int = 6
    failing: int | None = None

    def lost(self, ordinal: int) -> bool:
        """Whether no group of `ordinal` ever succeeds."""
        return self.failing is not None and prompt_of(ordinal) == prompt_ids(self.failing)


def live_once(plan: Plan, folder: Path, death: Death, rng: random.Random) -> bool:
    """One process's life, from start or resume to the end or to `death`; whether it came to the end."""
    checkpoints = folder / "checkpoints"
    newest = CheckpointFolder(checkpoints).choose({}).newest
    first_step = 0 if newest is None else int(newest.removeprefix("step_"))
    order = StepOrder(schedule=plan.schedule, ppo_epochs=1, first_step=first_step)
    engine = MortalEngine(death)
    if plan.failing is not None:
        engine.failing.add(tuple(prompt_ids(plan.failing)))
    FILE_POINTS.death = death
    ledger: MortalLedger | None = None
    collection: SteppedCollection | None = None
    try:
        ledger = MortalLedger(folder / "ledger.jsonl", death)
        seed = rng.randrange(1 << 30) if plan.seed is None else plan.seed
        collection = SteppedCollection(order, plan, engine, ledger, death, seed)
        parts = _parts(plan, folder, order, engine, collection, death, rng)
        settings = loop_settings(
            plan.schedule,
            checkpoint_period=plan.checkpoint_period,
            validation_period=3,
            validate_at_start=True,
        )
        steps = train(settings, plan.schedule, parts)
        assert steps == plan.schedule.max_num_steps
        return True
    except Killed:
        return False
    finally:
        if collection is not None:
            collection.close()
        if ledger is not None:
            ledger.end(rng)
        FILE_POINTS.death = None


def _parts(
    plan: Plan,
    folder: Path,
    order: StepOrder,
    engine: FakeEngine,
    collection: SteppedCollection,
    death: Death,
    rng: random.Random,
) -> Parts:
    def mortal(part: Any, name: str) -> Any:
        return Mortal(part, name, death, lambda: collection.pump(rng.randrange(4)))

    policy, critic = FakePolicy(order), FakeCritic(order)
    checkpoints = RunCheckpoints(
        folder=folder / "checkpoints",
        resume=True,
        retention=Retention(keep=2, keep_best=1, metric=None, higher_is_better=True),
        identity={"run.seed": Trait(value="42", because="of the seeds")},
        load_replay_buffer=plan.load_replay_buffer,
        models=mortal(FakeModelStore(policy=policy, critic=critic, boundaries=1), "models"),
        asynchronous=plan.asynchronous,
        replay=mortal(collection, "replay"),
        version_at=plan.schedule.version_at,
        on_rank_zero=on_rank_zero,
    )
    recorded = RecordedGroups(
        source=collection, path=folder / "trained_groups.jsonl", on_rank_zero=on_rank_zero
    )
    return Parts(
        policy=mortal(policy, "policy"),
        critic=mortal(critic, "critic"),
        advantage=mortal(GAE(gae_lambda=0.95, gae_gamma=1.0), "advantage"),
        groups=mortal(recorded, "groups"),
        refit=mortal(PublishingRefit(order, engine, death), "refit"),
        validator=mortal(FakeValidator(order), "validator"),
        checkpoints=mortal(OrderedCheckpoints(order, checkpoints), "checkpoints"),
        telemetry=FakeTelemetry(),
    )


def complete_steps(folder: Path) -> list[int]:
    """Steps of the visible checkpoints. Raises: OSError or ValueError if one of them is not whole."""
    found = CheckpointFolder(folder / "checkpoints").saved()
    return [int(str(read_complete(step)["step"])) for step in found]


def prompt_of(ordinal: int) -> array[int]:
    """Token ids of the stream at `ordinal`."""
    return STREAM.prompt_at(ordinal).token_ids
