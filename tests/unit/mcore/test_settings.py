"""Bad optimizer and scheduler settings are named by their key."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ppo.mcore.settings import OptimizerSettings, SchedulerSettings
from megatron_ppo.protocol.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr": 0.0}, ("optimizer.lr", "0.0")),
        ({"lr": float("nan")}, ("optimizer.lr", "nan")),
        ({"min_lr": 1.0}, ("optimizer.min_lr", "lr=0.001")),
        ({"adam_beta2": 1.0}, ("optimizer.adam_beta2", "[0, 1)")),
        ({"adam_eps": 0.0}, ("optimizer.adam_eps",)),
        ({"weight_decay": -0.1}, ("optimizer.weight_decay", "-0.1")),
        ({"clip_grad": -1.0}, ("optimizer.clip_grad", "-1.0")),
    ],
)
def test_a_bad_optimizer_setting_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        OptimizerSettings(**{"lr": 1e-3, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"lr_decay_steps": 0}, ("scheduler.lr_decay_steps", ">= 1")),
        ({"lr_decay_style": "step"}, ("scheduler.lr_decay_style", "cosine", "'step'")),
        ({"lr_warmup_steps": 10}, ("scheduler.lr_warmup_steps", "lr_decay_steps=10")),
        ({"lr_warmup_init": -1.0}, ("scheduler.lr_warmup_init", "-1.0")),
    ],
)
def test_a_bad_scheduler_setting_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        SchedulerSettings(**{"lr_decay_steps": 10, **changes})
    assert all(word in str(error.value) for word in words), str(error.value)
