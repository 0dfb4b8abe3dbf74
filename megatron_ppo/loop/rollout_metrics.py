"""What one step's rollouts looked like: rewards, lengths, endings, durations, and when they ran."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from megatron_ppo.protocol.trajectory import PromptGroup


def rollout_metrics(groups: Sequence[PromptGroup]) -> dict[str, float]:
    """Metrics over the trajectories of `groups`; names as the reference logs them.

    `clock/generation_{start,end}_s` are seconds since the epoch, on the same clock as the step's timers, so
    that one can see which step's update the generation ran beside.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    lengths = [len(t.completion.token_ids) for t in trajectories]
    rewards = [t.reward for t in trajectories]
    durations = sorted(group.finished_at - group.started_at for group in groups)
    truncated = fmean(t.completion.finish_reason == "length" for t in trajectories)
    return {
        "train/reward": fmean(rewards),
        "train/max_total_reward": max(rewards),
        "train/min_total_reward": min(rewards),
        "train/mean_prompt_length": fmean(len(t.prompt_token_ids) for t in trajectories),
        "train/mean_gen_tokens_per_sample": fmean(lengths),
        "train/max_gen_tokens_per_sample": float(max(lengths)),
        "train/min_gen_tokens_per_sample": float(min(lengths)),
        "train/total_num_tokens": float(sum(t.num_tokens for t in trajectories)),
        "train/truncation_rate": truncated,
        "train/natural_termination_rate": 1.0 - truncated,
        "train/trajectory_duration_s": fmean(durations),
        "train/trajectory_duration_s/max": durations[-1],
        # Nearest-rank percentile: the smallest duration that at least 95 % of the groups do not exceed.
        "train/trajectory_duration_s/p95": durations[-(-95 * len(durations) // 100) - 1],
        "clock/generation_start_s": min(group.started_at for group in groups),
        "clock/generation_end_s": max(group.finished_at for group in groups),
    }
