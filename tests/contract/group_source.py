"""What every `GroupSource` must do. Unit tests hold the fakes to it, functional tests the one over Ray."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from megatron_ppo.loop.ports import GroupSource
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.fakes import CallerError

SCHEDULE = AsyncSchedule(
    max_num_steps=6, max_trajectory_age_steps=1, policy_training_start_step=2, warmup_generation_lead_steps=2
)
PROMPTS, GENERATIONS = 2, 2
REFUSED = (MegatronPPOError, CallerError)
"""A real part names the broken rule, a fake blames its caller."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A source of a run that follows `SCHEDULE`, and the rest of the run.

    Attributes:
        fill: generate, with the given version, for every slot that is free; a no-op for sources that do it
            themselves.
        learn: what happens between taking a step's groups and opening the next window.
    """

    source: GroupSource
    fill: Callable[[int], None]
    learn: Callable[[int], None]

    def finish(self, step: int) -> None:
        """Take and train `step`, and open the window of the next."""
        self.source.take(target_step=step)
        self.learn(step)
        self.open(step + 1)

    def open(self, step: int) -> None:
        """Open the window of `step` and have it filled."""
        self.source.open(step=step, frontier=SCHEDULE.frontier(step))
        self.fill(SCHEDULE.version_at(step))


def every_step_gets_its_groups_once_and_fresh_enough(subject: Subject) -> None:
    """N groups of G trajectories, reserved for that step, no prompt twice, none too old, in every step."""
    ordinals: list[int] = []
    subject.open(0)
    for step in range(SCHEDULE.max_num_steps):
        groups = subject.source.take(target_step=step)
        assert [group.target_step for group in groups] == [step] * PROMPTS
        for group in groups:
            assert len(group.trajectories) == GENERATIONS
            assert SCHEDULE.oldest_version_for(step) <= group.min_version
            assert group.max_version <= SCHEDULE.version_at(step)
            assert group.opened_at_step <= step <= SCHEDULE.frontier(group.opened_at_step)
        ordinals += [group.ordinal for group in groups]
        subject.learn(step)
        if step + 1 < SCHEDULE.max_num_steps:
            subject.open(step + 1)
    assert sorted(ordinals) == list(range(PROMPTS * SCHEDULE.max_num_steps))


def a_step_cannot_be_taken_twice(subject: Subject) -> None:
    """It would be trained twice."""
    subject.open(0)
    subject.source.take(target_step=0)
    with pytest.raises(REFUSED):
        subject.source.take(target_step=0)


def a_step_cannot_be_skipped(subject: Subject) -> None:
    """Its prompts would be lost."""
    subject.open(0)
    with pytest.raises(REFUSED):
        subject.source.take(target_step=1)


def a_window_wider_than_the_schedule_is_refused(subject: Subject) -> None:
    """Its groups would be too old when they are trained on."""
    with pytest.raises(REFUSED):
        subject.source.open(step=0, frontier=SCHEDULE.frontier(0) + 1)


def a_window_never_moves_back(subject: Subject) -> None:
    """What was promised to the collector stays valid."""
    subject.open(0)
    subject.finish(0)
    with pytest.raises(REFUSED):
        subject.source.open(step=0, frontier=SCHEDULE.frontier(0))


CHECKS = (
    every_step_gets_its_groups_once_and_fresh_enough,
    a_step_cannot_be_taken_twice,
    a_step_cannot_be_skipped,
    a_window_wider_than_the_schedule_is_refused,
    a_window_never_moves_back,
)
