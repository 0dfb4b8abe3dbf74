"""Megatron's distributed optimizer and its parameter scheduler, built from two small records.

The distributed optimizer is always used: at data-parallel size 1 it is the same code with one shard. Overlap
modes (gradient reduction, parameter gathering) stay off, so parameters are complete on every rank after each
step.

Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.settings import OptimizerSettings, SchedulerSettings

logger = logging.getLogger(__name__)


class ReleasableDDP(DistributedDataParallel):
    """Megatron's DDP, whose gradient hooks do not keep it alive.

    A stock hook holds the module that holds the parameter that holds the hook, by way of an autograd node that
    Python's collector does not see: the models of a job, and the threads of their process groups, would never end.
    """

    def _make_backward_post_hook(self, param: torch.nn.Parameter) -> Callable[..., None]:
        # The same method name in 0.16.x and 0.19.x; tests/functional/mcore counts the threads that a job leaves.
        owner, parameter = weakref.ref(self), weakref.ref(param)

        def hook(*unused: Any) -> None:
            DistributedDataParallel._make_backward_post_hook(owner(), parameter())(*unused)

        return hook


def wrap_data_parallel(
    modules: Sequence[torch.nn.Module], config: TransformerConfig, parallel: ParallelContext
) -> tuple[DistributedDataParallel, ...]:
    """Megatron's DDP around each chunk of the model; gradients are reduced in float32, once per optimizer step."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        overlap_param_gather=False,
        average_in_collective=False,
        check_for_nan_in_grad=False,
    )
    groups = parallel.process_groups()
    # Chunks after the first are reduced while others still compute, so one bucket each is enough.
    return tuple(
        ReleasableDDP(config, settings, module, disable_bucketing=index > 0, pg_collection=groups)
        for index, module in enumerate(modules)
    )


def build_optimizer(
    modules: Sequence[DistributedDataParallel],
    settings: OptimizerSettings,
    parallel: ParallelContext,
    *,
    dtype: torch.dtype,
) -> Any:
    """AdamW over float32 main parameters, sharded over the data group. No weight decay on vectors."""
    config = OptimizerConfig(
        optimizer="adam",
        lr=settings.lr,
        # Every parameter group copies it, and the scheduler fails on None.
        min_lr=settings.min_lr,
        adam_beta1=settings.adam_beta1,
        adam_beta2=settings.adam_beta2,
        adam_eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        clip_grad=settings.clip_grad,
        bf16=dtype == torch.bfloat16,
        params_dtype=dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(
        config, list(modules), use_gloo_process_groups=False, pg_collection=parallel.process_groups()
    )
    for chained in optimizer.chained_optimizers:
        initialise_adam_state(chained.optimizer)
    return optimizer


def build_scheduler(
    optimizer: Any, settings: SchedulerSettings, optimizer_settings: OptimizerSettings
) -> Any:
    """One tick per `update` call; weight decay is constant."""
    decay = optimizer_settings.weight_decay
    return OptimizerParamScheduler(
        optimizer,
        init_lr=settings.lr_warmup_init,
        max_lr=optimizer_settings.lr,
        min_lr=optimizer_settings.min_lr,
        lr_warmup_steps=settings.lr_warmup_steps,
        lr_decay_steps=settings.lr_decay_steps,
        lr_decay_style=settings.lr_decay_style,
        start_wd=decay,
        end_wd=decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # After a resume the settings hold, at the saved position.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )


def initialise_adam_state(optimizer: torch.optim.Optimizer) -> None:
    """Give torch's AdamW the state of step 0, exactly as its first step would.

    Megatron can neither save nor load an empty torch AdamW, and the dummy step that it offers instead
    applies weight decay. With the state present, a policy that was never stepped (critic warm-up) saves and
    loads like any other. Transformer Engine's optimizer, used where that package is installed, needs none of
    this.
    """
    if not isinstance(optimizer, torch.optim.AdamW):
        return
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in optimizer.state:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0, dtype=torch.float32),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
