"""Bad optimizer and scheduler settings are named by their key."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ppo.data.microbatch_plan import FixedSize
from megatron_ppo.mcore.settings import (
    OptimizerSettings,
    OverlapSettings,
    RecomputeSettings,
    SchedulerSettings,
    TrainingSettings,
)
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


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(ConfigError, match="precision must be one of fp32, bf16, got 'fp16'"):
        TrainingSettings(
            optimizer=OptimizerSettings(lr=1e-3),
            scheduler=SchedulerSettings(lr_decay_steps=10),
            train_batches=FixedSize(sequences=1),
            score_batches=FixedSize(sequences=1),
            precision="fp16",  # type: ignore[arg-type]
        )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"overlap_param_gather": True}, ("overlap_param_gather", "needs overlap_grad_reduce=true")),
        ({"overlap_grad_reduce": True, "ddp_bucket_size": 0}, ("ddp_bucket_size", ">= 1")),
        ({"ddp_bucket_size": 10}, ("ddp_bucket_size", "overlap_grad_reduce=false")),
    ],
)
def test_an_overlap_that_cannot_work_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        OverlapSettings(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"granularity": "some"}, ("recompute.granularity", "full, selective", "'some'")),
        ({"granularity": "full", "num_layers": 1}, ("recompute.method", "must be set")),
        ({"granularity": "full", "method": "block"}, ("recompute.num_layers", "must be set")),
        ({"granularity": "full", "method": "block", "num_layers": 0}, ("recompute.num_layers", ">= 1", "0")),
        ({"granularity": "selective"}, ("recompute.modules", "must be set")),
        ({"granularity": "selective", "modules": ("mlp", "mlp")}, ("recompute.modules", "twice")),
        ({"granularity": "selective", "modules": ("head",)}, ("recompute.modules", "core_attn", "'head'")),
        ({"method": "uniform"}, ("recompute.method", "must not be set", "granularity=null")),
    ],
)
def test_a_bad_recompute_setting_is_refused(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        RecomputeSettings(**changes)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_recomputed_layers_must_fit_a_pipeline_chunk() -> None:
    block = RecomputeSettings(granularity="full", method="block", num_layers=3)
    block.check_layers(4)
    with pytest.raises(ConfigError, match=r"got 3; must be <= 2"):
        block.check_layers(2)
    with pytest.raises(ConfigError, match=r"got 3; must divide 4"):
        RecomputeSettings(granularity="full", method="uniform", num_layers=3).check_layers(4)
    RecomputeSettings().check_layers(1)
