"""The only staleness arithmetic of the package: weight versions, frontier and age.

Steps count from 0. Weight versions count trained policy weights: version 0 is the initial policy and frozen
(critic warm-up) steps do not advance it. `docs/async.md` has the proof of the age bound.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ppo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class AsyncSchedule:
    """Which target steps may be generated when, and how old they are when they are trained on.

    Args:
        max_num_steps: training steps of the run; no target at or beyond it is ever generated.
        max_trajectory_age_steps: A, the largest age in weight versions; 0 is synchronous PPO.
        policy_training_start_step: W, steps that train the critic only.
        warmup_generation_lead_steps: L, how many steps ahead may be banked during warm-up; None means A.

    Invariant: any target in [step, frontier(step)] has 0 <= age <= A, and the frontier never moves back.

    Raises: ConfigError for a negative age or start step, or an explicit lead below max(A, 1) or without warm-up.
    """

    max_num_steps: int
    max_trajectory_age_steps: int = 1
    policy_training_start_step: int = 0
    warmup_generation_lead_steps: int | None = None

    def __post_init__(self) -> None:
        age, start, lead = (
            self.max_trajectory_age_steps,
            self.policy_training_start_step,
            self.warmup_generation_lead_steps,
        )
        if self.max_num_steps < 1:
            raise ConfigError(f"run.max_num_steps must be >= 1, got {self.max_num_steps}")
        if age < 0:
            raise ConfigError(f"schedule.max_trajectory_age_steps must be >= 0, got {age}")
        if start < 0:
            raise ConfigError(f"schedule.policy_training_start_step must be >= 0, got {start}")
        if lead is not None and start == 0:
            raise ConfigError(
                f"schedule.warmup_generation_lead_steps={lead} needs schedule.policy_training_start_step > 0, got 0"
            )
        if lead is not None and lead < max(age, 1):
            raise ConfigError(
                f"schedule.warmup_generation_lead_steps must be >= {max(age, 1)} "
                f"(max_trajectory_age_steps, and at least 1), got {lead}"
            )

    @property
    def lead(self) -> int:
        """Effective warm-up lead: the explicit one, else the age bound."""
        if self.warmup_generation_lead_steps is None:
            return self.max_trajectory_age_steps
        return self.warmup_generation_lead_steps

    def version_at(self, step: int) -> int:
        """Weight version that the policy holds when `step` starts (frozen steps do not count)."""
        return max(0, step - self.policy_training_start_step)

    def frontier(self, step: int) -> int:
        """Highest target step that may be reserved while the learner is at `step`."""
        fresh_until = self.policy_training_start_step + self.version_at(step) + self.max_trajectory_age_steps
        ahead = step + max(self.max_trajectory_age_steps, self.lead)
        return min(ahead, fresh_until, self.max_num_steps - 1)

    def trains_policy(self, step: int) -> bool:
        """Whether `step` updates the policy (critic warm-up is over)."""
        return step >= self.policy_training_start_step

    def age(self, *, generation_version: int, target_step: int) -> int:
        """Age in versions of tokens sampled by `generation_version` when `target_step` trains on them."""
        return self.version_at(target_step) - generation_version

    def oldest_version_for(self, target_step: int) -> int:
        """Lowest generation version that `target_step` may train on."""
        return max(0, self.version_at(target_step) - self.max_trajectory_age_steps)

    def capacity(self, num_prompts_per_step: int) -> int:
        """Groups that the replay buffer must be able to hold: 2·N·max(A, L, 1)."""
        return 2 * num_prompts_per_step * max(self.max_trajectory_age_steps, self.lead, 1)
