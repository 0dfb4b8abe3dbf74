"""Sections that define what is computed: schedule, algorithm, advantage and the two losses.

Field names of `loss` and `value_loss` equal those of the records in `megatron_ppo.numerics.loss_settings`,
which also own the rules about their combinations.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import model_validator

from megatron_ppo.config.base import BuiltSection, Section, setting, target_field
from megatron_ppo.protocol.schedule import AsyncSchedule


class ScheduleSection(Section):
    """How far generation may run ahead of training."""

    max_trajectory_age_steps: int = setting(
        1,
        "A: largest age of a trained token in weight versions. 0 is synchronous PPO.",
        unit="weight versions",
    )
    policy_training_start_step: int = setting(
        0,
        "W: critic warm-up. Steps before it train the critic only; the policy stays as it is.",
        unit="steps",
    )
    warmup_generation_lead_steps: int | None = setting(
        None,
        "L: how many steps ahead rollouts may be banked during warm-up. null is the age. An explicit value "
        "must be at least max(age, 1) and needs policy_training_start_step > 0.",
        unit="steps",
    )
    warmup_max_trajectory_age_steps: int | None = setting(
        None,
        "Other name of warmup_generation_lead_steps; both with different values is an error.",
        unit="steps",
    )
    in_flight_weight_updates: bool = setting(
        False, "Install new weights while requests are running, instead of waiting until they have finished."
    )
    recompute_kv_cache_after_weight_updates: bool = setting(
        False,
        "Recompute the KV cache of running requests under the new weights. New requests never see old KV.",
    )
    max_generation_failures: int = setting(
        0,
        "Prompt groups in a row that may fail, after their retries. A failed prompt is tried again; after more "
        "failures in a row other prompts are tried first, and the run stops if the first of them fails, too. A prompt "
        "that failed more often than this while others succeed is dropped, with the reason on record.",
        unit="groups",
        ge=0,
    )

    @model_validator(mode="before")
    @classmethod
    def _merge_warmup_names(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        lead, alias = (
            values.get("warmup_generation_lead_steps"),
            values.get("warmup_max_trajectory_age_steps"),
        )
        if lead is not None and alias is not None and lead != alias:
            raise ValueError(
                f"warmup_generation_lead_steps={lead} and warmup_max_trajectory_age_steps={alias} are two "
                "names of one setting; set only one of them, or both to the same value"
            )
        merged = {**values, "warmup_generation_lead_steps": alias if lead is None else lead}
        merged.pop("warmup_max_trajectory_age_steps", None)
        return merged

    def schedule(self, max_num_steps: int) -> AsyncSchedule:
        """The staleness rule of a run of `max_num_steps` steps. Raises: ConfigError."""
        return AsyncSchedule(
            max_num_steps=max_num_steps,
            max_trajectory_age_steps=self.max_trajectory_age_steps,
            policy_training_start_step=self.policy_training_start_step,
            warmup_generation_lead_steps=self.warmup_generation_lead_steps,
        )


class AlgorithmSection(Section):
    """Batch sizes and masks of a PPO step."""

    num_prompts_per_step: int = setting(32, "N: prompt groups per training step.", unit="groups", ge=1)
    num_generations_per_prompt: int = setting(16, "G: trajectories per prompt.", unit="trajectories", ge=1)
    ppo_epochs: int = setting(4, "E: passes over the batch of a step.", unit="epochs", ge=1)
    train_global_batch_size: int = setting(
        128, "Sequences per optimizer step, over all ranks. Must divide N * G.", unit="sequences", ge=1
    )
    shuffle_minibatches: bool = setting(
        True, "Shuffle the batch in every epoch, seeded by (run.seed, step, epoch)."
    )
    overlong_filtering: bool = setting(False, "Exclude responses that hit the token limit from every loss.")
    seq_logprob_error_threshold: float | None = setting(
        None,
        "Exclude sequences whose mean exp(|generation - old log-prob|) is above this. null excludes none.",
        ge=1.0,
    )
    skip_reference_policy_logprobs_calculation: bool | None = setting(
        None, "Do not compute reference log-probs. null skips them exactly when no KL penalty needs them."
    )


class AdvantageSection(BuiltSection):
    """Generalised advantage estimation; arXiv:1506.02438, with the separate lambdas of arXiv:2504.05118."""

    target: Literal["megatron_ppo.loop.advantage.GAE"] = target_field("megatron_ppo.loop.advantage.GAE")
    name: Literal["gae"] = setting("gae", "Estimator.")
    gae_lambda: float = setting(
        0.95, "Lambda of both passes unless one of the next keys is set.", ge=0.0, le=1.0
    )
    gae_gamma: float = setting(1.0, "Discount per token.", gt=0.0, le=1.0)
    gae_lambda_value: float | None = setting(None, "Lambda of the critic's returns.", ge=0.0, le=1.0)
    gae_lambda_policy: float | None = setting(None, "Lambda of the policy's advantages.", ge=0.0, le=1.0)
    length_adaptive_alpha: float = setting(
        0.0, "Above 0: the policy's lambda is 1 - 1 / (alpha * response length), in [0, 1].", ge=0.0
    )
    normalize_advantages: bool = setting(True, "Whiten advantages over all response tokens of the step.")

    def kwargs(self) -> dict[str, Any]:
        """Without `name`, which only says which estimator this is."""
        return self.model_dump(exclude={"target", "name"})


class LossSection(BuiltSection):
    """The clipped policy-gradient loss and its variants."""

    target: Literal["megatron_ppo.numerics.loss_settings.PolicyLossSettings"] = target_field(
        "megatron_ppo.numerics.loss_settings.PolicyLossSettings"
    )
    ratio_clip_min: float = setting(0.2, "The ratio is clipped below at 1 - this, in [0, 1].")
    ratio_clip_max: float = setting(0.2, "The ratio is clipped above at 1 + this.")
    ratio_clip_c: float | None = setting(
        None, "Dual clip, > 1: bound of the loss where the advantage is negative."
    )
    disable_ppo_ratio: bool = setting(False, "REINFORCE: no ratio and no clipping.")
    force_on_policy_ratio: bool = setting(
        False, "The ratio is 1 with gradient. Only for age 0 and one update a step."
    )
    sequence_level_importance_ratios: bool = setting(
        False, "GSPO, one ratio per sequence (arXiv:2507.18071); needs token_level_loss false."
    )
    use_cispo: bool = setting(
        False, "CISPO: -advantage * stop_grad(clipped ratio) * log-prob (arXiv:2506.13585)."
    )
    token_level_loss: bool = setting(
        True, "Mean over tokens; false: mean over sequences of their token means."
    )
    use_importance_sampling_correction: bool = setting(
        True, "Weight tokens by exp(old - generation log-prob), detached. Must be true for age > 0."
    )
    truncated_importance_sampling_type: Literal["tis", "icepop", "seq-mask-tis"] | None = setting(
        None, "tis clamps that weight, icepop drops tokens outside the bounds, seq-mask-tis drops sequences."
    )
    truncated_importance_sampling_ratio: float | None = setting(None, "Upper bound of the weight, > 0.")
    truncated_importance_sampling_ratio_min: float | None = setting(
        None, "Lower bound of the weight; icepop and seq-mask-tis need it."
    )
    reference_policy_kl_penalty: float = setting(
        0.0, "Weight of the KL term against the initial policy. 0 is off."
    )
    reference_policy_kl_type: Literal["k1", "k2", "k3"] = setting(
        "k3", "Estimator of the KL term and KL metrics."
    )
    kl_input_clamp_value: float | None = setting(
        20.0, "Bound of |ref - current| before the estimator.", unit="nats"
    )
    kl_output_clamp_value: float | None = setting(
        10.0, "Bound of the estimator's absolute value.", unit="nats"
    )
    use_kl_in_reward: bool = setting(
        False, "Subtract the penalty from token rewards instead of adding a loss term."
    )
    use_on_policy_kl_approximation: bool = setting(False, "Weight the KL term by exp(current - generation).")
    positive_example_nll_weight: float = setting(
        0.0, "Weight of the NLL of sequences with reward > 0. 0 is off."
    )


class ValueLossSection(BuiltSection):
    """The critic's squared error."""

    target: Literal["megatron_ppo.numerics.loss_settings.ValueLossSettings"] = target_field(
        "megatron_ppo.numerics.loss_settings.ValueLossSettings"
    )
    scale: float = setting(1.0, "Factor of 0.5 * (value - return)^2.")
    cliprange: float | None = setting(
        None,
        "How far a value may move from the one before the update. null is no clipping.",
        unit="reward units",
    )
