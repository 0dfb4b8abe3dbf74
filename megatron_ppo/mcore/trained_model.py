"""One trained model on this rank: module, optimizer, scheduler, and the update that policy and critic share.

Imports `megatron.core`, so `platform.install()` must have run. Driven by `MegatronPolicy` and
`MegatronCritic`, which differ in their head, their loss and their metric names only.

Invariant: an update that raises NonFiniteError has applied no optimizer step for the minibatch it was raised
on, and it is raised on every rank together.

Shape legend: B sequences, T token positions (right-padded), V vocabulary entries of this rank.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.data.microbatch_plan import BatchPolicy, MicrobatchPlan, plan
from megatron_ppo.loop.residency import EVERYTHING, WEIGHTS, ResidencyError
from megatron_ppo.mcore import forward, model, optimizer, platform
from megatron_ppo.mcore.hf_config import HFModelConfig, read_hf_config
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.residence import Residence, trained_tensors
from megatron_ppo.mcore.schedule import fewest_microbatches
from megatron_ppo.mcore.sequences import Microbatch, microbatches
from megatron_ppo.mcore.settings import Precision, TrainingSettings
from megatron_ppo.mcore.weights import WeightMap, load_hf_weights, named_parameters
from megatron_ppo.numerics.loss_output import LossCounts, LossOutput
from megatron_ppo.numerics.reduce import MetricPart, combine, finalise, over_minibatches
from megatron_ppo.protocol.errors import ConfigError, NonFiniteError

logger = logging.getLogger(__name__)

_DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}

# (model output, microbatch, counts of the whole minibatch) -> loss share and metrics
MinibatchLoss = Callable[[Tensor, Microbatch, LossCounts], LossOutput]


class TrainedModel:
    """A Megatron GPT model with DDP, the distributed optimizer and its scheduler.

    Args:
        folder: in the Hugging Face layout, with the initial weights.
        value_head: ends in a scalar head (the critic).
    Attributes:
        chunks: the bare model, in `parallel.virtual_size` chunks; parameters are views of DDP's buffers.
        modules: the same, wrapped as the schedule calls them.
        optimizer, scheduler: Megatron's; saved and loaded by `mcore.checkpoint`.
        kernels: which layers and fused kernels it runs on.
        residence: moves the model off its device and back; whatever needs a part that is off raises ResidencyError.
    """

    def __init__(
        self,
        folder: Path,
        parallel: ParallelContext,
        settings: TrainingSettings,
        *,
        pad_token_id: int,
        seed: int,
        value_head: bool,
    ) -> None:
        self.settings = settings
        self.parallel = parallel
        self.value_head = value_head
        self._folder = folder
        self._pad_token_id = pad_token_id
        self._train_batches = _fitted(settings.train_batches, self.parallel)
        self._score_batches = _fitted(settings.score_batches, self.parallel)
        self._last_scoring: MicrobatchPlan | None = None
        self.model: HFModelConfig = read_hf_config(folder)
        if self.model.has_value_head and not value_head:
            raise ConfigError(
                f"model folder {folder} holds a reward or value model; only the critic can start from it"
            )
        self.model.check_parallelism(
            tensor_model_parallel_size=self.parallel.tp_size,
            pipeline_model_parallel_size=self.parallel.pp_size,
            virtual_pipeline_model_parallel_size=self.parallel.virtual_size,
            expert_model_parallel_size=self.parallel.ep_size,
            sequence_parallel=self.parallel.sequence_parallel,
        )
        settings.recompute.check_layers(
            self.model.num_layers // (self.parallel.pp_size * self.parallel.virtual_size)
        )
        self.dtype = _DTYPES[settings.precision]
        self.kernels = platform.kernels(settings.transformer_impl, settings.precision)
        # Dropout is 0, so these generators never draw; Megatron asks for their existence.
        model_parallel_cuda_manual_seed(
            seed, tp_rank=self.parallel.tp_rank, ep_rank=0, etp_rank=0, force_reset_rng=True
        )
        self.config = model.transformer_config(
            self.model,
            self.parallel,
            self.kernels,
            dtype=self.dtype,
            recompute=settings.recompute,
            moe_aux_loss_coeff=settings.moe_aux_loss_coeff,
        )
        self.chunks = self._build()
        self.modules = optimizer.wrap_data_parallel(
            [_with_precision(chunk, self) for chunk in self.chunks],
            self.config,
            self.parallel,
            settings.overlap,
        )
        self.optimizer = optimizer.build_optimizer(
            self.modules,
            settings.optimizer,
            self.parallel,
            dtype=self.dtype,
            overlap_param_gather=settings.overlap.overlap_param_gather,
        )
        self.scheduler = optimizer.build_scheduler(self.optimizer, settings.scheduler, settings.optimizer)
        # Without these two neither the gradient reductions nor a loss scale would happen.
        self.config.finalize_model_grads_func = finalize_model_grads
        self.config.grad_scale_func = self.optimizer.scale_loss
        optimizer.overlap_communication(self.modules, self.config, settings.overlap)
        self.residence = Residence(
            "critic" if value_head else "policy",
            trained_tensors(self.modules, self.optimizer),
            before=self._before_move,
        )

    def _before_move(self, after_failure: bool) -> None:
        if not after_failure:
            self.flush()
        elif optimizer.is_communicating(self.modules):
            raise ResidencyError(
                "a gradient reduction or parameter gather that other ranks may never join is on its way"
            )
        # `.grad` of the optimizer's shards are views of the gradient buffer that outlive an update.
        self.optimizer.zero_grad()

    def flush(self) -> None:
        """Complete the parameters on every rank; needed before they are read other than by a training pass.

        Collective over the model's ranks. Does nothing without `overlap_param_gather`. Not between the backward pass
        and the optimizer step, which would then not be gathered.
        """
        if self.settings.overlap.overlap_param_gather:
            optimizer.finish_param_gather(self.modules)

    def _build(self) -> tuple[Any, ...]:
        chunks = model.build_model(
            self.model, self.config, self.parallel, self.kernels, value_head=self.value_head
        )
        load_hf_weights(chunks, self.weight_map, self._folder)
        return chunks

    def frozen_copy(self) -> tuple[torch.nn.Module, ...]:
        """A second model with the folder's weights and no gradients (the reference policy), as `modules`."""
        chunks = self._build()
        for chunk in chunks:
            chunk.requires_grad_(False)
        return tuple(_with_precision(chunk, self) for chunk in chunks)

    @property
    def weight_map(self) -> WeightMap:
        """How this rank's parameters correspond to Hugging Face tensors."""
        return WeightMap(model=self.model, parallel=self.parallel, value_head=self.value_head)

    def tokens(
        self,
        batch: TrainBatch,
        function: forward.TokenFunction,
        modules: Sequence[torch.nn.Module] | None = None,
    ) -> Tensor:
        """float32 [B, T] on the CPU, the same on every rank; see `forward.token_pass`.

        Args:
            modules: another model of the same layout, which the caller knows to be on the device.
        """
        if modules is None:
            self.residence.require(WEIGHTS, "a forward pass")
            self.flush()
        self._last_scoring = self._plan(batch, self._score_batches, may_repeat=True)
        return forward.token_pass(
            self.modules if modules is None else modules,
            self.config,
            self.parallel,
            batch,
            function,
            plan=self._last_scoring,
            policy=self._score_batches,
            pad_token_id=self._pad_token_id,
        )

    def scoring_metrics(self, prefix: str) -> dict[str, float]:
        """How the last pass of `tokens` was cut into microbatches, under `prefix`; empty before the first."""
        return {} if self._last_scoring is None else self._last_scoring.metrics(prefix)

    def _plan(self, batch: TrainBatch, policy: BatchPolicy, *, may_repeat: bool) -> MicrobatchPlan:
        """Which rows go into which microbatch of which data-parallel rank; the same on every rank."""
        parallel = self.parallel
        return plan(
            batch.length_B.tolist(),
            data_parallel_size=parallel.dp_size,
            policy=policy,
            fewest_microbatches=fewest_microbatches(stages=parallel.pp_size, chunks=parallel.virtual_size),
            may_repeat=may_repeat,
        )

    def update(self, minibatches: Sequence[TrainBatch], loss: MinibatchLoss, prefix: str) -> dict[str, float]:
        """One optimizer step per minibatch, then one scheduler tick.

        Returns: metrics under `prefix`, the same on every rank.
        Raises: NonFiniteError; ValueError for no minibatches or one that the data-parallel size does not
        divide.
        """
        if not minibatches:
            raise ValueError("update needs at least one minibatch")
        self.residence.require(EVERYTHING, "an update")
        steps = [self._step(minibatch, loss, prefix) for minibatch in minibatches]
        group = self.optimizer.param_groups[0]
        metrics = finalise(over_minibatches(steps))
        metrics[f"{prefix}/lr"] = float(group["lr"])
        metrics[f"{prefix}/wd"] = self.settings.optimizer.weight_decay
        self.scheduler.step(1)
        return metrics

    def _step(self, minibatch: TrainBatch, loss: MinibatchLoss, prefix: str) -> dict[str, MetricPart]:
        counts = LossCounts.of(minibatch)
        batches = self._plan(minibatch, self._train_batches, may_repeat=False)
        mine = microbatches(
            minibatch,
            batches.shares[self.parallel.dp_rank],
            self.parallel,
            policy=self._train_batches,
            pad_token_id=self._pad_token_id,
        )
        self._zero_gradients()

        def share(output: Tensor, microbatch: Microbatch) -> tuple[Tensor, _Report]:
            result = loss(output, microbatch, counts)
            bad_B = ~torch.isfinite(result.sequence_loss_B)
            ordinals = tuple(microbatch.batch.ordinal_B[bad_B].tolist())
            # A finite sum of shares is not promised to have a finite gradient; the norm is checked as well.
            return result.loss, _Report(metrics=result.metrics, bad_ordinals=ordinals)

        reports = forward.training_pass(self.modules, self.config, self.parallel, mine, share)
        self._raise_if_loss_is_bad(reports)
        norm = self._apply(minibatch)
        metrics = self._reduce([report.metrics for report in reports])
        metrics[f"{prefix}/grad_norm"] = _part(norm)
        metrics |= {name: _part(value) for name, value in batches.metrics(f"{prefix}/").items()}
        metrics[f"{prefix}/global_valid_toks"] = _part(counts.valid_tokens)
        metrics[f"{prefix}/global_valid_seqs"] = _part(counts.valid_sequences)
        return metrics

    def _zero_gradients(self) -> None:
        # Both: the first clears the reduction buffer, the second drops `.grad` aliases that would be added
        # again.
        for module in self.modules:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _raise_if_loss_is_bad(self, reports: Sequence[_Report]) -> None:
        mine = tuple(ordinal for report in reports for ordinal in report.bad_ordinals)
        flag = torch.tensor([len(mine)], dtype=torch.int64, device=self.parallel.device)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self.parallel.everyone)
        if int(flag) == 0:
            return
        gathered: list[tuple[int, ...]] = [()] * self.parallel.everyone.size()
        dist.all_gather_object(gathered, mine, group=self.parallel.everyone)
        ordinals = tuple(sorted({ordinal for part in gathered for ordinal in part}))
        self._zero_gradients()
        raise NonFiniteError(
            f"the loss is NaN or infinite for the prompts with ordinals {list(ordinals)}; "
            "no optimizer step was applied",
            ordinals,
        )

    def _apply(self, minibatch: TrainBatch) -> float:
        """Check the gradient's norm on every rank, clip it and step. Returns the norm before clipping."""
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            ordinals = tuple(sorted(set(minibatch.ordinal_B.tolist())))
            self._zero_gradients()
            raise NonFiniteError(
                f"the gradient norm is {norm} while every sequence's loss is finite; the minibatch has "
                f"the prompts with ordinals {list(ordinals)}; no optimizer step was applied",
                ordinals,
            )
        stepped, _, _ = self.optimizer.step()
        if not stepped:
            raise AssertionError("the optimizer skipped a step with a finite gradient")
        return norm

    def _reduce(self, parts: Sequence[Mapping[str, MetricPart]]) -> dict[str, MetricPart]:
        """Join over microbatches and data-parallel ranks, then tell the stages that saw no loss."""
        parallel = self.parallel
        joined: dict[str, MetricPart] = {}
        if parallel.is_last_stage:
            mine = combine(parts)
            if parallel.dp_size > 1:
                # float64 CPU scalars by now: one small object per rank and step.
                gathered: list[Any] = [None] * parallel.dp_size
                dist.all_gather_object(gathered, _to_cpu(mine), group=parallel.data)
                mine = combine(gathered)
            joined = _to_cpu(mine)
        if parallel.pp_size > 1:
            box: list[Any] = [joined]
            dist.broadcast_object_list(box, src=parallel.stage_ranks()[-1], group=parallel.pipeline)
            joined = box[0]
        return joined

    def parameters_hash(self) -> str:
        """Digest of all parameters' bits, the same on every rank; equal exactly if no parameter changed,
        barring luck.

        Cheap: one sum of bit patterns per parameter, no copy to the host.
        """
        self.residence.require(WEIGHTS, "a digest of the parameters")
        self.flush()
        sums = [
            (name, int(_bits(parameter.detach()).sum(dtype=torch.int64)))
            for name, parameter in named_parameters(self.chunks)
        ]
        # With expert parallelism one copy of the model spans several data-parallel ranks.
        copy = self.parallel.model_expert
        gathered: list[Any] = [None] * copy.size()
        dist.all_gather_object(gathered, sums, group=copy)
        return hashlib.sha256(repr(gathered).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    metrics: Mapping[str, MetricPart]
    bad_ordinals: tuple[int, ...]


def _fitted(policy: BatchPolicy, parallel: ParallelContext) -> BatchPolicy:
    """The same with lengths that the layout can cut."""
    return dataclasses.replace(policy, multiple=math.lcm(policy.multiple, parallel.length_multiple))


def _with_precision(gpt: Any, trained: TrainedModel) -> torch.nn.Module:
    if trained.dtype == torch.float32:
        module: torch.nn.Module = gpt
        return module
    wrapped: torch.nn.Module = Float16Module(trained.config, gpt)
    # 0.16.x and 0.19.x read the pipeline group from here; without it they ask the global state.
    wrapped.pg_collection = trained.parallel.process_groups()  # type: ignore[assignment]
    return wrapped


def _bits(tensor: Tensor) -> Tensor:
    return tensor.view({4: torch.int32, 2: torch.int16}[tensor.element_size()])


def _part(value: float) -> MetricPart:
    return MetricPart(value=torch.tensor(float(value), dtype=torch.float64), kind="sum")


def _to_cpu(parts: Mapping[str, MetricPart]) -> dict[str, MetricPart]:
    return {name: MetricPart(value=part.value.cpu(), kind=part.kind) for name, part in parts.items()}
