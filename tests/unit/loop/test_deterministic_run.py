"""A deterministic run repeats itself bit for bit, also through a kill and a resume, whatever comes early or late.

The real loop, collector, buffer and checkpoints. The engine is as sensitive as a real one: its log-probs depend on what
is computed beside a request. Engine, reward function and saves take random times.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from megatron_ppo.loop.async_ppo import train
from megatron_ppo.loop.checkpoint_folder import Retention
from megatron_ppo.loop.checkpoints import RunCheckpoints
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import (
    Completion,
    GroupRequest,
    Prompt,
    PromptGroup,
    SamplingSettings,
    logprob_array,
)
from megatron_ppo.telemetry.metrics import Row
from megatron_ppo.telemetry.repeatable import differences
from megatron_ppo.testing.fakes import FakeEngine
from megatron_ppo.testing.loop_fakes import FakeModelStore, StepOrder
from tests.unit.loop.fake_run import OrderedCheckpoints, WorkLog, fake_run, loop_settings, on_rank_zero
from tests.unit.loop.one_process import LiveCollection, LiveRefit, live_collection

STEPS = 5
SYNCHRONOUS = AsyncSchedule(max_num_steps=STEPS, max_trajectory_age_steps=0, policy_training_start_step=1)
JITTER_S = 0.002


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class SensitiveEngine(FakeEngine):
    """Log-probs depend in their last digits on the requests that are inside, on their order, and on what was before.

    Like vLLM with `isolated_batches`, a call of `generate_groups` meets an idle engine without a past.
    """

    def __init__(self, jitter: random.Random) -> None:
        super().__init__()
        self._jitter = jitter
        self._inside: list[object] = []
        self.calls: list[tuple[GroupRequest, ...]] = []

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        await asyncio.sleep(self._jitter.random() * JITTER_S)
        self._inside.append(seeds[0])
        completions = await super().generate(
            prompt_token_ids, seeds=seeds, sampling=sampling, deadline_s=deadline_s
        )
        return [_marked(completion, self._inside) for completion in completions]

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        self.calls.append(tuple(requests))
        await asyncio.sleep(self._jitter.random() * JITTER_S)
        plain = [
            await FakeEngine.generate(
                self,
                request.prompt_token_ids,
                seeds=request.seeds,
                sampling=sampling,
                deadline_s=deadline_s,
            )
            for request in requests
        ]
        return [[_marked(completion, list(requests)) for completion in group] for group in plain]


def _marked(completion: Completion, company: list[object]) -> Completion:
    digest = hashlib.blake2b(repr(company).encode(), digest_size=4).digest()
    shift = int.from_bytes(digest, "little") / 2**32 * 1e-3
    return replace(completion, logprobs=logprob_array([nats - shift for nats in completion.logprobs]))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenScorer:
    """A reward function that takes its time, a different one for every call."""

    jitter: random.Random

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        time.sleep(self.jitter.random() * JITTER_S)
        return (prompt.ordinal * 7 + sum(response_token_ids)) % 5 / 4


class Killed(BaseException):
    """The process is gone."""


class KilledAfter(OrderedCheckpoints):
    """Checkpoints of a process that dies when that of step `dies_after` is visible."""

    def __init__(self, order: StepOrder, checkpoints: RunCheckpoints, dies_after: int | None) -> None:
        super().__init__(order, checkpoints)
        self._dies_after = dies_after
        self._saved = 0

    def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        self._saved = step
        return super().save(step=step, metrics=metrics)

    def publish(self, *, wait: bool = False) -> None:
        super().publish(wait=True)
        if self._saved == self._dies_after:
            raise Killed


class EndedInside:
    """A group source of a run that ends, with a save, while the groups of step `at` are being generated."""

    def __init__(
        self, collection: LiveCollection, checkpoints: RunCheckpoints, at: int | None, jitter: random.Random
    ) -> None:
        self._collection = collection
        self._checkpoints = checkpoints
        self._at = at
        self._jitter = jitter

    def open(self, *, step: int, frontier: int) -> None:
        self._collection.open(step=step, frontier=frontier)

    def take(self, *, target_step: int) -> list[PromptGroup]:
        if target_step == self._at:
            time.sleep(self._jitter.random() * 8 * JITTER_S)  # none, some or all of them are ready
            self._checkpoints.save(step=target_step, metrics={})
            self._checkpoints.publish(wait=True)
            raise Killed
        return self._collection.take(target_step=target_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a whole run leaves: what it trained on, its metrics, its checkpoints, and what its engines were asked."""

    work: list[object]
    rows: list[Row]
    files: dict[str, bytes]
    calls: list[tuple[GroupRequest, ...]]


def whole_run(
    folder: Path,
    *,
    seed: int,
    killed_after: int | None = None,
    inside: bool = False,
    deterministic: bool = True,
) -> Outcome:
    """A run of STEPS steps.

    Args:
        seed: of the delays alone.   killed_after: completed steps.
        inside: it ends while the next step is being generated, and is saved then only.
    """
    jitter = random.Random(seed)
    work = WorkLog()
    rows: list[Row] = []
    calls: list[tuple[GroupRequest, ...]] = []
    for first_step, dies_after in ((0, killed_after), (killed_after, None)) if killed_after else ((0, None),):
        order = StepOrder(schedule=SYNCHRONOUS, ppo_epochs=1, first_step=first_step)
        run = fake_run(SYNCHRONOUS, work=work, make_order=lambda order=order, **_: order)
        run.collection.close()
        engine = SensitiveEngine(jitter)
        with live_collection(
            order,
            schedule=SYNCHRONOUS,
            work=work,
            engine=engine,
            scorer=UnevenScorer(jitter=jitter),
            deterministic=deterministic,
        ) as collection:
            checkpoints = RunCheckpoints(
                folder=folder,
                resume=True,
                retention=Retention(keep=STEPS, keep_best=1, metric=None, higher_is_better=True),
                identity={},
                load_replay_buffer=not deterministic,  # as the parts of a run with `run.deterministic` are set
                models=FakeModelStore(policy=run.policy, critic=run.critic),
                replay=collection,
                version_at=SYNCHRONOUS.version_at,
                on_rank_zero=on_rank_zero,
            )
            parts = replace(
                run.parts,
                groups=EndedInside(collection, checkpoints, dies_after if inside else None, jitter),
                refit=LiveRefit(order, collection),
                checkpoints=KilledAfter(order, checkpoints, None if inside else dies_after),
                observe=lambda collection=collection: {
                    "train/buffer_size": float(collection.status().size),
                    "buffer/reserved_groups": float(len(collection.status().reserved)),
                },
            )
            settings = loop_settings(
                SYNCHRONOUS,
                checkpoint_period=0 if inside and dies_after else 1,
                validation_period=2,
                generates_alone=deterministic,
            )
            try:
                train(settings, SYNCHRONOUS, parts)
            except Killed:
                assert dies_after is not None
        rows += [{"step": first_step + index + 1, **row} for index, row in enumerate(run.telemetry.rows)]
        calls += engine.calls
    return Outcome(work=list(_without_clocks(work)), rows=rows, files=_contents(folder), calls=calls)


def _without_clocks(work: WorkLog) -> Iterator[object]:
    for step in sorted(work.steps):
        groups, *updates = work.steps[step]
        yield [replace(group, started_at=0.0, finished_at=0.0) for group in groups], updates  # type: ignore[attr-defined]


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    torch.set_num_threads(1)
    return whole_run(tmp_path_factory.mktemp("uninterrupted"), seed=0)


@pytest.mark.parametrize("seed", range(1, 4))
def test_two_runs_are_equal_bit_for_bit(tmp_path: Path, uninterrupted: Outcome, seed: int) -> None:
    other = whole_run(tmp_path, seed=seed)
    assert differences(uninterrupted.rows, other.rows) == []
    assert other.work == uninterrupted.work
    assert other.files == uninterrupted.files
    assert other.calls == uninterrupted.calls


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_that_was_killed_after_any_step_equals_one_that_was_not(
    tmp_path: Path, uninterrupted: Outcome, step: int
) -> None:
    for seed in (10, 11):
        resumed = whole_run(tmp_path / str(seed), seed=seed, killed_after=step)
        assert differences(uninterrupted.rows, resumed.rows) == []
        assert resumed.work == uninterrupted.work
        assert resumed.files == uninterrupted.files
        assert resumed.calls == uninterrupted.calls


@pytest.mark.parametrize("step", range(1, STEPS))
def test_a_run_that_was_saved_while_a_step_was_generated_repeats_the_whole_step(
    tmp_path: Path, uninterrupted: Outcome, step: int
) -> None:
    """A part of it in another batch would have other bits."""
    for seed in (20, 21, 22):
        resumed = whole_run(tmp_path / str(seed), seed=seed, killed_after=step, inside=True)
        assert differences(uninterrupted.rows, resumed.rows) == []
        assert resumed.work == uninterrupted.work
        assert list(dict.fromkeys(resumed.calls)) == uninterrupted.calls


def test_the_engine_is_asked_for_whole_steps_in_the_order_of_the_prompts(uninterrupted: Outcome) -> None:
    assert len(uninterrupted.calls) == STEPS
    ordinals = [group.ordinal for groups, _ in uninterrupted.work for group in groups]  # type: ignore[misc]
    assert ordinals == list(range(len(ordinals)))
    seeds = [seed for call in uninterrupted.calls for request in call for seed in request.seeds]
    assert len(set(seeds)) == len(seeds)


def test_nothing_is_generated_beside_validation_and_saves(uninterrupted: Outcome) -> None:
    for row in uninterrupted.rows:
        assert (row["train/buffer_size"], row["buffer/reserved_groups"]) == (0.0, 0.0)


def test_without_the_switch_the_same_delays_change_the_run(tmp_path: Path) -> None:
    """What the tests above compare does depend on time: they can fail."""
    first, second = (whole_run(tmp_path / str(seed), seed=seed, deterministic=False) for seed in (1, 2))
    assert first.work != second.work
    assert differences(first.rows, second.rows)
