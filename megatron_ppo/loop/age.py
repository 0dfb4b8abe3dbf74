"""How old the taken groups are, in weight versions and in steps, and the assertion that they are not too old."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_ppo.protocol.errors import GroupMismatchError, StaleGroupError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup


def age_metrics(groups: Sequence[PromptGroup], *, schedule: AsyncSchedule, step: int) -> dict[str, float]:
    """Ages of the groups that `step` (counted from 0) trains on.

    Returns:
        age/max_versions, age/mean_versions: of the oldest token of each trajectory, in weight versions.
        age/mixed_versions_rate: share of trajectories sampled by more than one version (in-flight updates).
        train/avg_trajectory_age: mean over groups of step minus the step announced when they were reserved.

    Raises:
        StaleGroupError when a token is older than the schedule allows: the buffer's gate is broken.
        GroupMismatchError when a group was reserved for another step, or a token is newer than the learner.
    """
    ages: list[int] = []
    for group in groups:
        if group.target_step != step:
            raise GroupMismatchError(
                f"group of ordinal {group.ordinal} was reserved for step {group.target_step}, taken at step {step}"
            )
        for trajectory in group.trajectories:
            age = schedule.age(generation_version=trajectory.min_version, target_step=step)
            newest = trajectory.max_version
            if age > schedule.max_trajectory_age_steps:
                raise StaleGroupError(
                    f"group of ordinal {group.ordinal} has age {age} versions at step {step}; "
                    f"schedule.max_trajectory_age_steps allows {schedule.max_trajectory_age_steps}"
                )
            if schedule.age(generation_version=newest, target_step=step) < 0:
                raise GroupMismatchError(
                    f"group of ordinal {group.ordinal} was sampled by version {newest}, "
                    f"but the learner at step {step} holds version {schedule.version_at(step)}"
                )
            ages.append(age)
    trajectories = [t for group in groups for t in group.trajectories]
    return {
        "age/max_versions": float(max(ages)),
        "age/mean_versions": fmean(ages),
        "age/mixed_versions_rate": fmean(t.min_version != t.max_version for t in trajectories),
        "train/avg_trajectory_age": fmean(step - group.opened_at_step for group in groups),
    }
