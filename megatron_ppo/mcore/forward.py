"""Runs Megatron's schedule over microbatches: training passes and forward-only passes.

Scale factors, stated once. A loss function returns this microbatch's *share* of the minibatch loss: already
divided by counts of the whole minibatch, so that shares sum to the loss over microbatches and data-parallel
ranks. Megatron assumes means instead and multiplies gradients by
    cp / num_microbatches  megatron.core.pipeline_parallel.schedules.forward_step_calc_loss (2-tuple)
    1 / (dp · cp)          megatron.core.distributed.DistributedDataParallel (gradient_scaling_factor)
so the share is multiplied by num_microbatches · dp first (cp = 1 here): gradients and their norm are those
of the minibatch loss, whatever the layout and the microbatch size.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: B sequences, T token positions (right-padded), V vocabulary entries of this rank.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.schedule import fewest_microbatches, largest_microbatch, microbatch_group_size

# (model output, microbatch) -> (share of the minibatch loss, what the caller wants to know)
TrainingLoss = Callable[[Tensor, TrainBatch], tuple[Tensor, Any]]
# (model output, microbatch) -> float32 [B, T]
TokenFunction = Callable[[Tensor, TrainBatch], Tensor]


def data_parallel_share(batch: TrainBatch, parallel: ParallelContext) -> TrainBatch:
    """This rank's contiguous share of the batch, trimmed to its longest sequence.

    Raises: ValueError if the data-parallel size does not divide the batch.
    """
    if len(batch) % parallel.dp_size:
        raise ValueError(
            f"data-parallel size {parallel.dp_size} does not divide the batch of {len(batch)} sequences"
        )
    size = len(batch) // parallel.dp_size
    return batch.select(torch.arange(parallel.dp_rank * size, (parallel.dp_rank + 1) * size))


def split_microbatches(
    batch: TrainBatch, size: int, parallel: ParallelContext, *, pad_token_id: int
) -> list[TrainBatch]:
    """At most `size` sequences each, on the model's device, trimmed and padded to a length that the layout
    can cut; fewer where an interleaved pipeline needs more microbatches.

    Raises: ValueError for fewer sequences than an interleaved pipeline has stages.
    """
    size = largest_microbatch(len(batch), wanted=size, stages=parallel.pp_size, chunks=parallel.virtual_size)
    parts = torch.arange(len(batch)).split(size)
    multiple = parallel.tp_size if parallel.sequence_parallel else 1
    return [
        _to_device(_pad_length(batch.select(part), multiple, pad_token_id), parallel.device) for part in parts
    ]


def _pad_length(batch: TrainBatch, multiple: int, pad_token_id: int) -> TrainBatch:
    # Two positions at least, so that there is a next token.
    width = max(batch.token_ids_BT.shape[1], 2)
    extra = -(-width // multiple) * multiple - batch.token_ids_BT.shape[1]
    if extra == 0:
        return batch
    padded = {}
    for field in dataclasses.fields(batch):
        value = getattr(batch, field.name)
        if value is not None and value.dim() == 2:
            fill = pad_token_id if field.name == "token_ids_BT" else 0
            padded[field.name] = torch.nn.functional.pad(value, (0, extra), value=fill)
    return batch.replace(**padded)


def _to_device(batch: TrainBatch, device: torch.device) -> TrainBatch:
    if device.type == "cpu":
        return batch
    moved = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    return batch.replace(**{name: value.to(device) for name, value in moved.items() if value is not None})


def training_pass(
    modules: Sequence[torch.nn.Module],
    config: Any,
    parallel: ParallelContext,
    microbatches: Sequence[TrainBatch],
    loss: TrainingLoss,
) -> list[Any]:
    """Forward and backward of all microbatches, then reduction of the gradients into `main_grad`.

    Returns: what `loss` returned as its second result, per microbatch; [] except on the last pipeline stage.
    """
    scale = len(microbatches) * parallel.dp_size

    def scaled_loss(microbatch: TrainBatch, output: Tensor) -> tuple[Tensor, Any]:
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
    microbatch_size: int,
    pad_token_id: int,
) -> Tensor:
    """float32 [B, T] on the CPU, the same on every rank; 0 outside the response mask. No gradient.

    Each data-parallel rank computes its share; shares are gathered over the data group and sent from the
    last pipeline stage to the others.
    """
    share_size = max(
        -(-len(batch) // parallel.dp_size),
        fewest_microbatches(stages=parallel.pp_size, chunks=parallel.virtual_size),
    )
    # A batch that does not divide (a probe) is filled up with copies of its last sequence; their results are
    # cut off.
    rows = torch.arange(parallel.dp_rank * share_size, (parallel.dp_rank + 1) * share_size).clamp(
        max=len(batch) - 1
    )
    microbatches = split_microbatches(
        batch.select(rows), microbatch_size, parallel, pad_token_id=pad_token_id
    )

    def collect(microbatch: TrainBatch, output: Tensor, non_loss_data: bool = False) -> Tensor:
        return torch.where(microbatch.response_mask_BT, function(output, microbatch), 0.0)

    parts = _run_schedule(modules, config, parallel, microbatches, collect, forward_only=True)
    width = batch.token_ids_BT.shape[1]
    shape = (share_size * parallel.dp_size, width)
    result_BT = torch.empty(shape, dtype=torch.float32, device=parallel.device)
    if parallel.is_last_stage:
        share = torch.cat([_fit_width(part, width) for part in parts]).contiguous()
        shares = [torch.empty_like(share) for _ in range(parallel.dp_size)]
        dist.all_gather(shares, share, group=parallel.data)
        result_BT = torch.cat(shares)
    if parallel.pp_size > 1:
        dist.broadcast(result_BT, src=parallel.stage_ranks()[-1], group=parallel.pipeline)
    return result_BT[: len(batch)].cpu()


def _fit_width(part_BT: Tensor, width: int) -> Tensor:
    extra = width - part_BT.shape[1]
    return torch.nn.functional.pad(part_BT, (0, extra)) if extra >= 0 else part_BT[:, :width]


def _run_schedule(
    modules: Sequence[torch.nn.Module],
    config: Any,
    parallel: ParallelContext,
    microbatches: Sequence[TrainBatch],
    loss: Callable[..., Any],
    *,
    forward_only: bool,
) -> list[Any]:
    def forward_step(
        batches: Iterator[TrainBatch], model: torch.nn.Module
    ) -> tuple[Tensor, Callable[..., Any]]:
        microbatch = next(batches)
        width = microbatch.token_ids_BT.shape[1]
        position_ids = torch.arange(width, device=parallel.device).expand_as(microbatch.token_ids_BT)
        output = model(input_ids=microbatch.token_ids_BT, position_ids=position_ids, attention_mask=None)
        return output, partial(loss, microbatch)

    groups: dict[str, Any] = {"pg_collection": parallel.process_groups()}
    if parallel.pp_size > 1:
        groups["p2p_communicator"] = P2PCommunicator(pp_group=parallel.pipeline, config=config)
    if parallel.virtual_size > 1:
        config.microbatch_group_size_per_vp_stage = microbatch_group_size(
            len(microbatches), stages=parallel.pp_size
        )
    first = microbatches[0]
    # Every chunk of an interleaved stage sees all microbatches.
    iterators = [iter(microbatches) for _ in modules]
    return platform.forward_backward_function(parallel.pp_size, parallel.virtual_size)(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=list(modules),
        num_microbatches=len(microbatches),
        # Only read when lengths are fixed; ours travel with each microbatch.
        seq_length=first.token_ids_BT.shape[1],
        micro_batch_size=len(first),
        forward_only=forward_only,
        collect_non_loss_data=forward_only,
        **groups,
    )
