"""Megatron's distributed optimizer and its parameter scheduler, built from two small records.

The distributed optimizer is always used: at data-parallel size 1 it is the same code with one shard. Without
`overlap_param_gather` parameters are complete on every rank after each step; with it they are complete after the
next forward pass or `finish_param_gather`, whichever comes first.

Imports `megatron.core`, so `platform.install()` must have run.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer import TransformerConfig

from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.settings import OptimizerSettings, OverlapSettings, SchedulerSettings

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
    modules: Sequence[torch.nn.Module],
    config: TransformerConfig,
    parallel: ParallelContext,
    overlap: OverlapSettings,
) -> tuple[DistributedDataParallel, ...]:
    """Megatron's DDP around each chunk of the model; gradients are reduced in float32, once per optimizer step."""
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap.overlap_grad_reduce,
        overlap_param_gather=overlap.overlap_param_gather,
        # The interleaved schedule starts the gathers of all stages together, see `overlap_communication`.
        align_param_gather=overlap.overlap_param_gather and parallel.virtual_size > 1,
        bucket_size=overlap.ddp_bucket_size,
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
    overlap_param_gather: bool = False,
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
        overlap_param_gather=overlap_param_gather,
    )
    optimizer = get_megatron_optimizer(
        config, list(modules), use_gloo_process_groups=False, pg_collection=parallel.process_groups()
    )
    for chained in optimizer.chained_optimizers:
        initialise_adam_state(chained.optimizer)
    return optimizer


def overlap_communication(
    modules: Sequence[DistributedDataParallel], config: TransformerConfig, overlap: OverlapSettings
) -> None:
    """Tell Megatron's schedules, which read them from `config`, when to start reductions and gathers.

    no_sync_func: microbatches but the last only add to the gradients.
    grad_sync_func: with a pipeline, all stages start a chunk's reduction at about the same time.
    param_sync_func: the same for gathers of an interleaved pipeline. Forward-only passes do not call it; there, as
    without an interleaved pipeline, each module's forward hook gathers what it needs.
    """
    several = len(modules) > 1
    if overlap.overlap_grad_reduce:
        no_syncs = [module.no_sync for module in modules]
        config.no_sync_func = no_syncs if several else no_syncs[0]
        if config.pipeline_model_parallel_size > 1:
            starts = [module.start_grad_sync for module in modules]
            config.grad_sync_func = starts if several else starts[0]
    if overlap.overlap_param_gather and several:
        config.param_sync_func = [partial(_start_param_gather, module) for module in modules]


def _start_param_gather(module: DistributedDataParallel, _parameters: object = None) -> None:
    # Megatron's own start_param_sync gathers again what a forward-only pass has gathered since the step.
    for group in _bucket_groups(module):
        if not group.param_gather_dispatched:
            group.start_param_sync()


def finish_param_gather(modules: Sequence[DistributedDataParallel]) -> None:
    """Make the parameters complete on this rank after a step with `overlap_param_gather`.

    Collective over the data group; does nothing when they are. Without it, shards of other ranks are one step old
    until the next forward pass.
    """
    for module in modules:
        for group in _bucket_groups(module):
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                # Waits for a gather on its way, or else gathers now.
                group.start_param_sync(force_sync=True)


def is_communicating(modules: Sequence[DistributedDataParallel]) -> bool:
    """Whether a reduction or gather was started on this rank and not waited for."""
    return any(
        group.param_gather_handle is not None or group.grad_reduce_handle is not None
        for module in modules
        for group in _bucket_groups(module)
    )


def _bucket_groups(module: DistributedDataParallel) -> list[Any]:
    return [*module.bucket_groups, *module.expert_parallel_bucket_groups]


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
