"""Metrics of one step's rollouts, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_ppo.loop.rollout_metrics import rollout_metrics
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.testing.fakes import make_group


def ended_by_itself(group: PromptGroup) -> PromptGroup:
    return replace(
        group,
        trajectories=tuple(
            replace(t, completion=replace(t.completion, finish_reason="stop")) for t in group.trajectories
        ),
    )


def test_metrics_of_two_groups() -> None:
    """Prompts of 2 and 3 tokens (one per digit and a start token), 2 responses of 3 and of 5 tokens each."""
    short = make_group(ordinal=7, target_step=0, versions=(0,) * 3, duration_s=2.0, reward=1.0)
    long = make_group(ordinal=42, target_step=0, versions=(0,) * 5, duration_s=6.0, reward=-0.5)
    long = replace(long, started_at=990.0, finished_at=996.0)
    assert rollout_metrics([ended_by_itself(short), long]) == {
        "train/reward": 0.25,
        "train/max_total_reward": 1.0,
        "train/min_total_reward": -0.5,
        "train/mean_prompt_length": 2.5,
        "train/mean_gen_tokens_per_sample": 4.0,
        "train/max_gen_tokens_per_sample": 5.0,
        "train/min_gen_tokens_per_sample": 3.0,
        "train/total_num_tokens": 2 * (2 + 3) + 2 * (3 + 5),
        "train/truncation_rate": 0.5,
        "train/natural_termination_rate": 0.5,
        "train/trajectory_duration_s": 4.0,
        "train/trajectory_duration_s/max": 6.0,
        "train/trajectory_duration_s/p95": 6.0,
        "clock/generation_start_s": 990.0,
        "clock/generation_end_s": 1002.0,
    }


@pytest.mark.parametrize(
    ("count", "p95"), [(1, 1.0), (2, 2.0), (19, 19.0), (20, 19.0), (21, 20.0), (100, 95.0)]
)
def test_the_percentile_is_the_smallest_duration_that_95_percent_do_not_exceed(
    count: int, p95: float
) -> None:
    longest_first = [float(count - i) for i in range(count)]
    groups = [
        make_group(ordinal=i, target_step=0, duration_s=duration) for i, duration in enumerate(longest_first)
    ]
    metrics = rollout_metrics(groups)
    assert metrics["train/trajectory_duration_s/p95"] == p95
    assert metrics["train/trajectory_duration_s/max"] == float(count)
