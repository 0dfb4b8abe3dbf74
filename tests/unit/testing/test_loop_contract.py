"""The real `train` against fakes that check the order of its calls.

With the real collector and buffer it runs in tests/unit/loop/test_one_process_run.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.batch import pack_groups
from megatron_ppo.loop.advantage import GAE
from megatron_ppo.loop.async_ppo import LoopSettings, Parts, train
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.fakes import (
    CallerError,
    make_group,
)
from megatron_ppo.testing.loop_fakes import (
    FakeCheckpoints,
    FakeCritic,
    FakeGroupSource,
    FakePolicy,
    FakeRefit,
    FakeTelemetry,
    FakeValidator,
    StepOrder,
)
from megatron_ppo.testing.strategies import schedules

T = TypeVar("T")
PROMPTS, GENERATIONS = 2, 2
LONG_S = 60.0


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def loop_settings(schedule: AsyncSchedule, *, epochs: int = 1, **changes: Any) -> LoopSettings:
    plain = LoopSettings(
        max_num_steps=schedule.max_num_steps,
        seed=42,
        num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=GENERATIONS,
        ppo_epochs=epochs,
        train_global_batch_size=2,
        shuffle_minibatches=True,
        pad_token_id=0,
        seq_logprob_error_threshold=None,
        overlong_filtering=False,
        use_reference=False,
        validation_period=0,
        validate_at_start=False,
        validate_at_end=False,
        checkpoint_period=0,
    )
    return replace(plain, **changes)


def fake_parts(schedule: AsyncSchedule, *, epochs: int = 1, first_step: int = 0) -> tuple[Parts, StepOrder]:
    order = StepOrder(schedule=schedule, ppo_epochs=epochs, first_step=first_step)
    parts = Parts(
        policy=FakePolicy(order),
        critic=FakeCritic(order),
        advantage=GAE(gae_lambda=0.95, gae_gamma=1.0),
        groups=FakeGroupSource(
            order,
            schedule=schedule,
            num_prompts_per_step=PROMPTS,
            num_generations_per_prompt=GENERATIONS,
        ),
        refit=FakeRefit(order),
        validator=FakeValidator(order),
        checkpoints=FakeCheckpoints(order, first_step=first_step),
        telemetry=FakeTelemetry(),
    )
    return parts, order


def rows_of(parts: Parts) -> list[dict[str, float]]:
    assert isinstance(parts.telemetry, FakeTelemetry)
    return parts.telemetry.rows


@settings(max_examples=25, deadline=None)
@given(
    schedule=schedules(max_steps=8, max_start=3, max_lead=5),
    epochs=st.integers(1, 3),
    use_reference=st.booleans(),
    data=st.data(),
)
def test_the_loop_calls_its_parts_in_order_from_any_step(
    schedule: AsyncSchedule, epochs: int, use_reference: bool, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, schedule.max_num_steps - 1))
    parts, order = fake_parts(schedule, epochs=epochs, first_step=first)
    run = loop_settings(
        schedule, epochs=epochs, use_reference=use_reference, validation_period=2, checkpoint_period=3
    )
    assert train(run, schedule, parts) == schedule.max_num_steps

    steps = range(first, schedule.max_num_steps)
    counts = {name: sum(event == name for event, _ in order.events) for name in dict(order.events)}
    trained = sum(schedule.trains_policy(step) for step in steps)
    assert counts["push"] == 1 + trained
    assert counts["critic_update"] == epochs * len(steps)
    assert counts.get("policy_update", 0) == epochs * trained
    assert counts.get("reference", 0) == (len(steps) if use_reference else 0)
    assert [step for event, step in order.events if event == "take"] == list(steps)
    assert all(row["age/max_versions"] <= schedule.max_trajectory_age_steps for row in rows_of(parts))


def test_two_steps_with_one_frozen_train_the_policy_once_and_the_critic_twice() -> None:
    """W5 and W6."""
    schedule = AsyncSchedule(max_num_steps=2, policy_training_start_step=1)
    parts, order = fake_parts(schedule)
    train(loop_settings(schedule), schedule, parts)
    names = [event for event, _ in order.events]
    assert (names.count("policy_update"), names.count("critic_update"), names.count("push")) == (1, 2, 2)
    rows = rows_of(parts)
    assert ["train/loss" in row for row in rows] == [False, True]
    assert all("train/critic/loss" in row for row in rows)


def test_the_order_of_one_step_is_the_documented_one() -> None:
    schedule = AsyncSchedule(max_num_steps=1)
    parts, order = fake_parts(schedule, epochs=2)
    run = loop_settings(schedule, epochs=2, use_reference=True, validate_at_end=True, checkpoint_period=1)
    train(run, schedule, parts)
    assert [event for event, _ in order.events] == [
        "push",
        "open",
        "take",
        "values",
        "logprobs",
        "reference",
        "critic_update",
        "policy_update",
        "critic_update",
        "policy_update",
        "push",
        "open",
        "validate",
        "save",
    ]


def test_a_finished_run_does_nothing() -> None:
    """R10."""
    schedule = AsyncSchedule(max_num_steps=3)
    parts, order = fake_parts(schedule, first_step=3)
    assert train(loop_settings(schedule), schedule, parts) == 3
    assert order.events == []


Step = Callable[[StepOrder], None]


def begin(order: StepOrder) -> None:
    order.pushed(0)
    order.opened(0, 1)


def score(order: StepOrder) -> None:
    begin(order)
    order.took(0)
    order.valued()
    order.scored()


def update(order: StepOrder) -> None:
    score(order)
    order.critic_updated()
    order.policy_updated()


@pytest.mark.parametrize(
    ("before", "mistake", "message"),
    [
        (lambda o: None, lambda o: o.opened(0, 1), "opens at version None"),
        (lambda o: None, lambda o: o.pushed(1), "version 1 is published, expected 0"),
        (lambda o: o.pushed(0), lambda o: o.opened(0, 2), "frontier 2 at step 0, the schedule says 1"),
        (lambda o: o.pushed(0), lambda o: o.took(0), "step 0 taken"),
        (begin, lambda o: o.took(1), "step 1 taken while step 0 is open"),
        (begin, lambda o: o.valued(), "after the take"),
        (score, lambda o: o.took(0), "taken twice"),
        (score, lambda o: o.valued(), "once per step"),
        (score, lambda o: o.policy_updated(), "policy is updated before the critic"),
        (score, lambda o: o.pushed(1), "publish of 1 without new weights"),
        (score, lambda o: o.opened(1, 2), "opens before step 0 is done"),
        (update, lambda o: o.critic_updated(), "more than 1 critic epochs"),
        (update, lambda o: o.opened(1, 2), "opens at version 0, not 1"),
        (update, lambda o: o.pushed(2), "version 2 is published, expected 1"),
        (update, lambda o: o.at_boundary("save", 0), "save of step 0 inside step 0"),
    ],
)
def test_a_call_out_of_order_is_noticed(before: Step, mistake: Step, message: str) -> None:
    order = StepOrder(schedule=AsyncSchedule(max_num_steps=5), ppo_epochs=1)
    before(order)
    with pytest.raises(CallerError, match=message):
        mistake(order)


def test_old_logprobs_after_an_update_are_noticed() -> None:
    order = StepOrder(schedule=AsyncSchedule(max_num_steps=5), ppo_epochs=1)
    begin(order)
    order.took(0)
    with pytest.raises(CallerError, match="after the values"):
        order.scored()
    order.valued()
    with pytest.raises(CallerError, match="before the batch is scored"):
        order.critic_updated()


def test_a_policy_update_on_a_frozen_step_is_noticed() -> None:
    order = StepOrder(schedule=AsyncSchedule(max_num_steps=5, policy_training_start_step=1), ppo_epochs=1)
    score(order)
    order.critic_updated()
    with pytest.raises(CallerError, match="step 0 is frozen"):
        order.policy_updated()
    with pytest.raises(CallerError, match="without new weights"):
        order.pushed(1)


def test_minibatches_that_a_model_cannot_train_on_are_noticed() -> None:
    order = StepOrder(schedule=AsyncSchedule(max_num_steps=5), ppo_epochs=1)
    score(order)
    batch = pack_groups([make_group(ordinal=0, target_step=0)], pad_token_id=0)
    critic = FakeCritic(order)
    with pytest.raises(CallerError, match="values_BT is missing"):
        critic.update([batch])
    bad = batch.replace(
        old_logprobs_BT=torch.zeros(batch.token_ids_BT.shape),
        advantages_BT=torch.full(batch.token_ids_BT.shape, torch.nan),
    )
    with pytest.raises(CallerError, match="advantages_BT is not finite"):
        FakePolicy(order).update([bad])
