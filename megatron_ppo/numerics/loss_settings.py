"""Settings of the two losses, checked at construction. The config sections mirror the field names.

PolicyLossSettings (`loss.<key>`):
    ratio_clip_min, ratio_clip_max, ratio_clip_c, disable_ppo_ratio, force_on_policy_ratio,
    sequence_level_importance_ratios, use_cispo, token_level_loss, use_importance_sampling_correction,
    truncated_importance_sampling_type, truncated_importance_sampling_ratio,
    truncated_importance_sampling_ratio_min, reference_policy_kl_penalty, reference_policy_kl_type,
    kl_input_clamp_value, kl_output_clamp_value, use_kl_in_reward, use_on_policy_kl_approximation,
    positive_example_nll_weight
ValueLossSettings (`value_loss.<key>`):
    scale, cliprange

Owns the rules on which settings may be combined; every combination that would silently change or ignore a
part of the objective is a ConfigError naming `loss.<key>`. Rules that need the schedule (age, epochs) live in
the config.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

from megatron_ppo.protocol.errors import ConfigError

KLType = Literal["k1", "k2", "k3"]
TruncationType = Literal["tis", "icepop", "seq-mask-tis"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_finite(prefix: str, settings: PolicyLossSettings | ValueLossSettings) -> None:
    for field in fields(settings):
        value = getattr(settings, field.name)
        if isinstance(value, float | int) and not math.isfinite(value):
            raise ConfigError(f"{prefix}.{field.name} must be finite, got {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLossSettings:
    """The clipped policy-gradient loss and its variants.

    Attributes:
        ratio_clip_min: the ratio is clipped below at 1 - ratio_clip_min; in [0, 1].
        ratio_clip_max: the ratio is clipped above at 1 + ratio_clip_max; >= 0.
        ratio_clip_c: dual clip, > 1: where the advantage is negative a token loses at most -c * advantage.
            None = off.
        disable_ppo_ratio: REINFORCE, -advantage * log-prob; the clip values are ignored.
        force_on_policy_ratio: the ratio is 1 with gradient; stored old log-probs are ignored.
        sequence_level_importance_ratios: GSPO, one ratio per sequence; needs token_level_loss False.
        use_cispo: -advantage * stop_grad(clipped ratio) * log-prob.
        token_level_loss: True = mean over tokens of the minibatch; False = mean over sequences of their token
            means.
        use_importance_sampling_correction: weight each token by exp(old - generation), detached. Corrects
            staleness.
        truncated_importance_sampling_type: None = untruncated; tis = clamp the weight; icepop = drop tokens
            outside the bounds; seq-mask-tis = drop sequences whose geometric mean weight is outside.
        truncated_importance_sampling_ratio: the upper bound of the weight, > 0.
        truncated_importance_sampling_ratio_min: the lower bound, >= 0; needed by icepop and seq-mask-tis.
        reference_policy_kl_penalty: weight of the KL term against the reference policy, >= 0; 0 = no term.
        reference_policy_kl_type: estimator of the KL term and of the KL metrics.
        kl_input_clamp_value: bound of |ref - current| in nats before the estimator. None = off.
        kl_output_clamp_value: bound of the estimator's absolute value in nats. None = off.
        use_kl_in_reward: subtract the penalty from the token rewards instead of adding a loss term.
        use_on_policy_kl_approximation: weight the KL term by exp(current - generation).
        positive_example_nll_weight: weight of the negative log-likelihood of sequences with reward > 0, >= 0;
            0 = off.
    """

    ratio_clip_min: float = 0.2
    ratio_clip_max: float = 0.2
    ratio_clip_c: float | None = None
    disable_ppo_ratio: bool = False
    force_on_policy_ratio: bool = False
    sequence_level_importance_ratios: bool = False
    use_cispo: bool = False
    token_level_loss: bool = True
    use_importance_sampling_correction: bool = True
    truncated_importance_sampling_type: TruncationType | None = None
    truncated_importance_sampling_ratio: float | None = None
    truncated_importance_sampling_ratio_min: float | None = None
    reference_policy_kl_penalty: float = 0.0
    reference_policy_kl_type: KLType = "k3"
    kl_input_clamp_value: float | None = 20.0
    kl_output_clamp_value: float | None = 10.0
    use_kl_in_reward: bool = False
    use_on_policy_kl_approximation: bool = False
    positive_example_nll_weight: float = 0.0

    def __post_init__(self) -> None:
        _require_finite("loss", self)
        self._check_ratio()
        self._check_cispo()
        self._check_truncation()
        self._check_terms()

    def _check_ratio(self) -> None:
        low, high, dual = self.ratio_clip_min, self.ratio_clip_max, self.ratio_clip_c
        _require(0.0 <= low <= 1.0, f"loss.ratio_clip_min must be in [0, 1], got {low}")
        _require(high >= 0.0, f"loss.ratio_clip_max must be >= 0, got {high}")
        _require(dual is None or dual > 1.0, f"loss.ratio_clip_c must be > 1 or null, got {dual}")
        _require(
            not (self.disable_ppo_ratio and self.force_on_policy_ratio),
            "loss.disable_ppo_ratio and loss.force_on_policy_ratio are both true; at most one may be",
        )
        _require(
            not (self.disable_ppo_ratio and dual is not None),
            f"loss.ratio_clip_c is {dual} but loss.disable_ppo_ratio is true, which would ignore it",
        )
        _require(
            not (self.disable_ppo_ratio and self.sequence_level_importance_ratios),
            "loss.sequence_level_importance_ratios needs loss.disable_ppo_ratio false",
        )
        _require(
            not (self.sequence_level_importance_ratios and self.token_level_loss),
            "loss.sequence_level_importance_ratios is true and needs loss.token_level_loss false, got true",
        )

    def _check_cispo(self) -> None:
        if not self.use_cispo:
            return
        conflicts = {
            "disable_ppo_ratio must be false": self.disable_ppo_ratio,
            "force_on_policy_ratio must be false": self.force_on_policy_ratio,
            "ratio_clip_c must be null": self.ratio_clip_c is not None,
            "sequence_level_importance_ratios must be false": self.sequence_level_importance_ratios,
            "token_level_loss must be true": not self.token_level_loss,
        }
        for rule, broken in conflicts.items():
            _require(
                not broken, f"loss.{rule} with loss.use_cispo true, got {getattr(self, rule.split()[0])}"
            )

    def _check_truncation(self) -> None:
        kind, high = self.truncated_importance_sampling_type, self.truncated_importance_sampling_ratio
        low = self.truncated_importance_sampling_ratio_min
        name = "loss.truncated_importance_sampling"
        if kind is None:
            _require(high is None, f"{name}_ratio is {high} but {name}_type is null, which would ignore it")
            _require(low is None, f"{name}_ratio_min is {low} but {name}_type is null, which would ignore it")
            return
        allowed = get_args(TruncationType)
        _require(kind in allowed, f"{name}_type must be null or one of {', '.join(allowed)}, got {kind!r}")
        _require(
            self.use_importance_sampling_correction,
            f"{name}_type is {kind} and needs loss.use_importance_sampling_correction true, got false",
        )
        if high is None:
            raise ConfigError(f"{name}_ratio must be > 0 with {name}_type {kind}, got null")
        _require(high > 0.0, f"{name}_ratio must be > 0, got {high}")
        _require(low is None or 0.0 <= low <= high, f"{name}_ratio_min must be in [0, {high}], got {low}")
        _require(
            kind == "tis" or low is not None,
            f"{name}_ratio_min must be set with {name}_type {kind}, got null",
        )
        _require(
            not (kind == "seq-mask-tis" and self.sequence_level_importance_ratios),
            f"{name}_type seq-mask-tis needs loss.sequence_level_importance_ratios false, got true",
        )

    def _check_terms(self) -> None:
        beta, weight = self.reference_policy_kl_penalty, self.positive_example_nll_weight
        _require(beta >= 0.0, f"loss.reference_policy_kl_penalty must be >= 0, got {beta}")
        kinds = get_args(KLType)
        _require(
            self.reference_policy_kl_type in kinds,
            f"loss.reference_policy_kl_type must be one of {', '.join(kinds)}, "
            f"got {self.reference_policy_kl_type!r}",
        )
        for key in ("kl_input_clamp_value", "kl_output_clamp_value"):
            bound = getattr(self, key)
            _require(bound is None or bound > 0.0, f"loss.{key} must be > 0 or null, got {bound}")
        _require(
            not self.use_kl_in_reward or beta > 0.0,
            f"loss.use_kl_in_reward is true and needs loss.reference_policy_kl_penalty > 0, got {beta}",
        )
        _require(weight >= 0.0, f"loss.positive_example_nll_weight must be >= 0, got {weight}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueLossSettings:
    """The clipped squared error of the critic.

    Attributes:
        scale: factor of the loss, > 0.
        cliprange: the value may move this far from the value before the update, in reward units, > 0;
            None = off.
    """

    scale: float = 1.0
    cliprange: float | None = None

    def __post_init__(self) -> None:
        _require_finite("value_loss", self)
        _require(self.scale > 0.0, f"value_loss.scale must be > 0, got {self.scale}")
        _require(
            self.cliprange is None or self.cliprange > 0.0,
            f"value_loss.cliprange must be > 0 or null, got {self.cliprange}",
        )
