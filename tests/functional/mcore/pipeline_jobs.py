"""Jobs about model chunks, overlapped communication and bfloat16; what they return is compared by test_pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.mcore.checkpoint import load_models, save_models
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.settings import OptimizerSettings, SchedulerSettings
from megatron_ppo.mcore.weights import named_parameters
from tests.functional.mcore.jobs import Layout, build, context, full_parameters, random_batch

Choice = tuple[Layout, dict[str, Any]]


def parameters_around_a_flush(*, folder: str, **changes: Any) -> dict[str, Any]:
    """This rank's parameters right after an update, after `flush`, and after one more."""
    with context({}) as parallel:
        policy = build("policy", folder, parallel, **changes)
        policy.update([random_batch(seed=0)])
        behind = _parameters(policy)
        policy.trained.flush()
        flushed = _parameters(policy)
        policy.trained.flush()
        return {"behind": behind, "flushed": flushed, "again": _parameters(policy)}


def _parameters(model: MegatronPolicy | MegatronCritic) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in named_parameters(model.trained.chunks)}


def save_then_go_on(*, folder: str, checkpoint: str, policy: Choice, critic: Choice) -> dict[str, Any]:
    """Two updates of both, a save at once, and what going on gives."""
    with distributed_runtime(timeout_s=60.0):
        models = _both(folder, policy, critic)
        for step in range(2):
            for model in models.values():
                model.update([random_batch(seed=step)])
        save_models(Path(checkpoint), models)
        return _go_on(models)


def load_then_go_on(*, folder: str, checkpoint: str, policy: Choice, critic: Choice) -> dict[str, Any]:
    """Fresh models, disturbed by an update whose parameters are still on their way, then loaded."""
    with distributed_runtime(timeout_s=60.0):
        models = _both(folder, policy, critic)
        for model in models.values():
            model.update([random_batch(seed=99)])
        load_models(Path(checkpoint), models)
        return _go_on(models)


def _both(folder: str, policy: Choice, critic: Choice) -> dict[str, MegatronPolicy | MegatronCritic]:
    return {
        kind: build(kind, folder, ParallelContext.create(**layout, timeout_s=60.0), **changes)  # type: ignore[arg-type]
        for kind, (layout, changes) in {"policy": policy, "critic": critic}.items()
    }


def _go_on(models: dict[str, MegatronPolicy | MegatronCritic]) -> dict[str, Any]:
    # Not only at the end, where another layout's rounding allows differences.
    loaded = {f"{kind}_loaded": full_parameters(model) for kind, model in models.items()}
    metrics = [model.update([random_batch(seed=step)]) for step in (2, 3) for model in models.values()]
    return {**loaded, "metrics": metrics, **{kind: full_parameters(model) for kind, model in models.items()}}


def small_updates_in_bf16(*, folder: str, updates: int, lr: float) -> dict[str, Any]:
    """bfloat16 weights that were at least 1/16, before, after the first and after all updates; their main parameters.

    Returns: `before`, `once`, `all` and `main`, vectors of the same entries; `main_types`, of all main parameters.
    """
    with context({}) as parallel:
        policy = build(
            "policy",
            folder,
            parallel,
            precision="bf16",
            optimizer=OptimizerSettings(lr=lr),
            scheduler=SchedulerSettings(lr_decay_steps=updates, lr_decay_style="constant"),
        )
        batch = random_batch(seed=0)
        (chained,) = policy.trained.optimizer.chained_optimizers
        # One data-parallel rank, so each shard is a whole parameter.
        pairs = [
            (parameter, main)
            for low, high in zip(
                chained.model_float16_groups, chained.shard_fp32_from_float16_groups, strict=True
            )
            for parameter, main in zip(low, high, strict=True)
        ]
        before = torch.cat([parameter.detach().flatten() for parameter, _ in pairs]).clone()
        large = before.abs() >= 2.0**-4
        policy.update([batch])
        once = torch.cat([parameter.detach().flatten() for parameter, _ in pairs]).clone()
        for _ in range(updates - 1):
            policy.update([batch])
        return {
            "before": before[large],
            "once": once[large],
            "all": torch.cat([parameter.detach().flatten() for parameter, _ in pairs])[large],
            "main": torch.cat([main.detach().flatten() for _, main in pairs])[large],
            "main_types": {main.dtype for _, main in pairs},
            "low_types": {parameter.dtype for parameter, _ in pairs},
        }
