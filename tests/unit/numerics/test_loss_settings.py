"""Which loss settings are refused, and that the message names the key, the value and what is allowed."""

from __future__ import annotations

import re

import pytest

from megatron_ppo.numerics.losses import PolicyLossSettings, ValueLossSettings
from megatron_ppo.protocol.errors import ConfigError

TRUNCATION = "truncated_importance_sampling"


def test_defaults_are_plain_ppo_with_the_staleness_correction() -> None:
    settings = PolicyLossSettings()
    assert (settings.ratio_clip_min, settings.ratio_clip_max, settings.ratio_clip_c) == (0.2, 0.2, None)
    assert settings.use_importance_sampling_correction
    assert settings.token_level_loss
    assert settings.reference_policy_kl_penalty == 0.0
    assert ValueLossSettings() == ValueLossSettings(scale=1.0, cliprange=None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ratio_clip_min": 1.5}, "loss.ratio_clip_min must be in [0, 1], got 1.5"),
        ({"ratio_clip_max": -0.1}, "loss.ratio_clip_max must be >= 0, got -0.1"),
        ({"ratio_clip_max": float("nan")}, "loss.ratio_clip_max must be finite, got nan"),
        ({"ratio_clip_c": 1.0}, "loss.ratio_clip_c must be > 1 or null, got 1.0"),
        ({"ratio_clip_c": 0.5}, "loss.ratio_clip_c must be > 1 or null, got 0.5"),
        (
            {"disable_ppo_ratio": True, "force_on_policy_ratio": True},
            "loss.disable_ppo_ratio and loss.force_on_policy_ratio are both true",
        ),
        (
            {"disable_ppo_ratio": True, "ratio_clip_c": 3.0},
            "loss.ratio_clip_c is 3.0 but loss.disable_ppo_ratio",
        ),
        (
            {"disable_ppo_ratio": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            "loss.sequence_level_importance_ratios needs loss.disable_ppo_ratio false",
        ),
        (
            {"sequence_level_importance_ratios": True},
            "loss.sequence_level_importance_ratios is true and needs loss.token_level_loss false",
        ),
        ({"use_cispo": True, "disable_ppo_ratio": True}, "loss.disable_ppo_ratio must be false"),
        ({"use_cispo": True, "force_on_policy_ratio": True}, "loss.force_on_policy_ratio must be false"),
        (
            {"use_cispo": True, "ratio_clip_c": 3.0},
            "loss.ratio_clip_c must be null with loss.use_cispo true, got 3.0",
        ),
        (
            {"use_cispo": True, "sequence_level_importance_ratios": True, "token_level_loss": False},
            "loss.sequence_level_importance_ratios must be false with loss.use_cispo true",
        ),
        ({"use_cispo": True, "token_level_loss": False}, "loss.token_level_loss must be true"),
        (
            {f"{TRUNCATION}_type": "tis"},
            f"loss.{TRUNCATION}_ratio must be > 0 with loss.{TRUNCATION}_type tis, got null",
        ),
        (
            {f"{TRUNCATION}_type": "tis", f"{TRUNCATION}_ratio": 0.0},
            f"loss.{TRUNCATION}_ratio must be > 0, got 0.0",
        ),
        (
            {f"{TRUNCATION}_type": "cap", f"{TRUNCATION}_ratio": 2.0},
            "must be null or one of tis, icepop, seq-mask-tis",
        ),
        ({f"{TRUNCATION}_ratio": 2.0}, f"loss.{TRUNCATION}_ratio is 2.0 but loss.{TRUNCATION}_type is null"),
        ({f"{TRUNCATION}_ratio_min": 0.5}, f"loss.{TRUNCATION}_ratio_min is 0.5 but"),
        (
            {
                f"{TRUNCATION}_type": "tis",
                f"{TRUNCATION}_ratio": 2.0,
                "use_importance_sampling_correction": False,
            },
            "needs loss.use_importance_sampling_correction true, got false",
        ),
        (
            {
                f"{TRUNCATION}_type": "seq-mask-tis",
                f"{TRUNCATION}_ratio": 2.0,
                f"{TRUNCATION}_ratio_min": 0.5,
                "sequence_level_importance_ratios": True,
                "token_level_loss": False,
            },
            "seq-mask-tis needs loss.sequence_level_importance_ratios false",
        ),
        ({"reference_policy_kl_penalty": -0.1}, "loss.reference_policy_kl_penalty must be >= 0, got -0.1"),
        (
            {"reference_policy_kl_type": "k4"},
            "loss.reference_policy_kl_type must be one of k1, k2, k3, got 'k4'",
        ),
        ({"kl_input_clamp_value": 0.0}, "loss.kl_input_clamp_value must be > 0 or null, got 0.0"),
        ({"kl_output_clamp_value": -1.0}, "loss.kl_output_clamp_value must be > 0 or null, got -1.0"),
        (
            {"use_kl_in_reward": True},
            "loss.use_kl_in_reward is true and needs loss.reference_policy_kl_penalty > 0",
        ),
        ({"positive_example_nll_weight": -1.0}, "loss.positive_example_nll_weight must be >= 0, got -1.0"),
    ],
)
def test_settings_that_would_change_the_objective_silently_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        PolicyLossSettings(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["tis", "icepop", "seq-mask-tis"])
def test_minimum_above_the_bound_is_refused_for_every_type(kind: str) -> None:
    with pytest.raises(
        ConfigError, match=re.escape(f"loss.{TRUNCATION}_ratio_min must be in [0, 2.0], got 3.0")
    ):
        PolicyLossSettings(
            truncated_importance_sampling_type=kind,  # type: ignore[arg-type]
            truncated_importance_sampling_ratio=2.0,
            truncated_importance_sampling_ratio_min=3.0,
        )


@pytest.mark.parametrize("kind", ["icepop", "seq-mask-tis"])
def test_types_that_drop_need_a_minimum(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"loss.{TRUNCATION}_ratio_min must be set"):
        PolicyLossSettings(
            truncated_importance_sampling_type=kind,  # type: ignore[arg-type]
            truncated_importance_sampling_ratio=2.0,
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.0}, "value_loss.scale must be > 0, got 0.0"),
        ({"scale": float("inf")}, "value_loss.scale must be finite, got inf"),
        ({"cliprange": 0.0}, "value_loss.cliprange must be > 0 or null, got 0.0"),
    ],
)
def test_value_loss_settings_out_of_range_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        ValueLossSettings(**changes)
