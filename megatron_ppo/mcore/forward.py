"""Runs Megatron's schedule over microbatches: training passes and forward-only passes.

Scale factors, stated once. A loss function returns this microbatch's *share* of the minibatch loss: already
divided by counts of the whole minibatch, so that shares sum to the loss over microbatches and data-parallel
ranks. All context ranks of a share compute the same one; the gradient of a score goes back only to the rank
whose position it came from (`sequences.Microbatch.to_tokens`), so gradients *sum* to those of the share over
context ranks. Megatron assumes means over all of these instead. It multiplies a microbatch's loss by
    cp / num_microbatches  megatron.core.pipeline_parallel.schedules.forward_step_calc_loss (2-tuple)
and what it has summed over the dp · cp ranks of `dp_cp` by
    1 / (dp · cp)          megatron.core.distributed.DistributedDataParallel (gradient_scaling_factor)
so the share is multiplied by num_microbatches · dp first: gradients and their norm are those of the minibatch
loss, whatever the layout, the microbatches and the packing.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.data.microbatch_plan import BatchPolicy, MicrobatchPlan
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.schedule import microbatch_group_size
from megatron_ppo.mcore.sequences import Microbatch, microbatches

# (model output, microbatch) -> (share of the minibatch loss, what the caller wants to know)
TrainingLoss = Callable[[Tensor, Microbatch], tuple[Tensor, Any]]
# (model output, microbatch) -> float32 [B, T]
TokenFunction = Callable[[Tensor, Microbatch], Tensor]


def training_pass(
    modules: Sequence[torch.nn.Module],
    config: Any,
    parallel: ParallelContext,
    microbatches: Sequence[Microbatch],
    loss: TrainingLoss,
) -> list[Any]:
    """Forward and backward of all microbatches, then reduction of the gradients into `main_grad`.

    Returns: what `loss` returned as its second result, per microbatch; [] except on the last pipeline stage.
    """
    scale = len(microbatches) * parallel.dp_size

    def scaled_loss(microbatch: Microbatch, output: Tensor) -> tuple[Tensor, Any]:
        share, report = loss(output, microbatch)
        # A new tensor: the schedule divides what it gets in place.
        return share * scale, report

    return _run_schedule(modules, config, parallel, microbatches, scaled_loss, forward_only=False)


@torch.no_grad()
def token_pass(
    modules: Sequence[torch.nn.Module],
    config: Any,
    parallel: ParallelContext,
    batch: TrainBatch,
    function: TokenFunction,
    *,
    plan: MicrobatchPlan,
    policy: BatchPolicy,
    pad_token_id: int,
) -> Tensor:
    """float32 [B, T] on the CPU, the same on every rank; 0 outside the response mask. No gradient.

    Each data-parallel rank computes its rows of the plan; rows are gathered over the data group and sent from
    the last pipeline stage to the others.
    """
    mine = microbatches(
        batch, plan.shares[parallel.dp_rank], parallel, policy=policy, pad_token_id=pad_token_id
    )

    def collect(microbatch: Microbatch, output: Tensor, non_loss_data: bool = False) -> Tensor:
        return torch.where(microbatch.batch.response_mask_BT, function(output, microbatch), 0.0)

    parts = _run_schedule(modules, config, parallel, mine, collect, forward_only=True)
    shape = batch.token_ids_BT.shape
    if parallel.is_last_stage:
        result_BT = _gather_rows(shape[1], parts, plan, parallel)
    else:
        result_BT = torch.empty(shape, dtype=torch.float32, device=parallel.device)
    if parallel.pp_size > 1:
        dist.broadcast(result_BT, src=parallel.stage_ranks()[-1], group=parallel.pipeline)
    return result_BT.cpu()


def _gather_rows(
    width: int, parts: Sequence[Tensor], plan: MicrobatchPlan, parallel: ParallelContext
) -> Tensor:
    """[B, width]; every data-parallel rank's rows in the order of the batch. Ranks may have different numbers."""
    rows = [[row for group in share for row in group] for share in plan.shares]
    most = max(map(len, rows))
    share = torch.cat([_fit_width(part, width) for part in parts])
    share = torch.nn.functional.pad(share, (0, 0, 0, most - len(share))).contiguous()
    shares = [torch.empty_like(share) for _ in rows]
    dist.all_gather(shares, share, group=parallel.data)
    # Of a row that was repeated, the first result: the same choice on every rank.
    found: dict[int, int] = {}
    for rank, numbers in enumerate(rows):
        for at, row in enumerate(numbers, start=rank * most):
            found.setdefault(row, at)
    return torch.cat(shares)[[found[row] for row in range(len(found))]]


def _fit_width(part_BT: Tensor, width: int) -> Tensor:
    extra = width - part_BT.shape[1]
    return torch.nn.functional.pad(part_BT, (0, extra)) if extra >= 0 else part_BT[:, :width]


def _run_schedule(
    modules: Sequence[torch.nn.Module],
    config: Any,
    parallel: ParallelContext,
    microbatches: Sequence[Microbatch],
    loss: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    def forward_step(
        batches: Iterator[Microbatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(batches)
        output = model(
            input_ids=microbatch.input_ids_SL,
            position_ids=microbatch.position_ids_SL,
            attention_mask=None,
            packed_seq_params=microbatch.packed,
        )
        return output, partial(loss, microbatch)

    groups: dict[str, Any] = {"pg_collection": parallel.process_groups()}
    if parallel.pp_size > 1:
        groups["p2p_communicator"] = P2PCommunicator(pp_group=parallel.pipeline, config=config)
    if parallel.virtual_size > 1:
        config.microbatch_group_size_per_vp_stage = microbatch_group_size(
            len(microbatches), stages=parallel.pp_size
        )
    # Every chunk of an interleaved stage sees all microbatches.
    iterators = [iter(microbatches) for _ in modules]
    with _without_gradient_sync(config) if forward_only else contextlib.nullcontext():
        return platform.forward_backward_function(parallel.pp_size, parallel.virtual_size)(
            forward_step_func=forward_step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=list(modules),
            num_microbatches=len(microbatches),
            # Only read when lengths are fixed; ours travel with each microbatch.
            seq_length=microbatches[0].input_ids_SL.shape[1],
            micro_batch_size=microbatches[0].input_ids_SL.shape[0],
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            **groups,
        )


@contextlib.contextmanager
def _without_gradient_sync(config: Any) -> Iterator[None]:
    """A forward-only pass has nothing to reduce, and Megatron would leave the context of `no_sync_func` open."""
    no_sync_func, config.no_sync_func = config.no_sync_func, None
    try:
        yield
    finally:
        config.no_sync_func = no_sync_func
