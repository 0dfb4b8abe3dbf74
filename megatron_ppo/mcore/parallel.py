"""Process groups of the trainer: one default group per job, and one `ParallelContext` per model on top of it.

`distributed_runtime` is entered once per job by the application; several jobs may follow one another in one
torchrun. Policy and critic get a context each, over the same ranks and possibly with different layouts.
Every group is passed to Megatron-Core explicitly; `megatron.core.parallel_state` is never initialised,
but for one scratch buffer (see `_allow_sequence_parallelism`).

Rank order, fastest first: tensor, context, data, pipeline (Megatron's "tp-cp-ep-dp-pp").
"""

from __future__ import annotations

import contextlib
import datetime
import gc
import itertools
import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from megatron_ppo.mcore import platform
from megatron_ppo.mcore.host_memory import let_rank_0_read
from megatron_ppo.mcore.rank_layout import RankLayout
from megatron_ppo.protocol.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedRuntime:
    """This process in the job: its rank, the number of ranks, and where tensors live."""

    rank: int
    world_size: int
    device: torch.device


@contextlib.contextmanager
def distributed_runtime(*, timeout_s: float = 600.0) -> Iterator[DistributedRuntime]:
    """Join the job's default process group (gloo on CPU, NCCL on CUDA); leave it at exit.

    Under torchrun (or any launcher that sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT) all ranks join;
    without it this process is a job of one rank. A job's keys live under their own prefix of the launcher's
    store: reusing the bare store for a second job hangs, since the keys of the first one still answer.

    Loads no Megatron, which takes seconds: whatever the job starts in other processes can start before.

    Args:
        timeout_s: limit of every collective.
    Raises: RuntimeError from torch when a rank does not arrive in time.
    """
    if platform.on_cuda():
        torch.cuda.set_device(platform.local_rank())
    rank, world_size, store = _store(timeout_s)
    # CPU tensors (metrics, objects) go over gloo also on a GPU machine.
    backend = "cpu:gloo,cuda:nccl" if platform.on_cuda() else "gloo"
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    try:
        let_rank_0_read()
        yield DistributedRuntime(rank=rank, world_size=world_size, device=platform.device())
    finally:
        _forget_models()
        dist.destroy_process_group()


def _store(timeout_s: float) -> tuple[int, int, dist.Store]:
    if "RANK" not in os.environ:
        return 0, 1, dist.HashStore()
    address = tuple(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    launcher = _launcher(address, timeout_s)
    # Jobs under this launcher only, so that every rank counts the same ones. Workers that the launcher has restarted
    # count from 0 again, and may meet the store of their predecessors.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = dist.PrefixStore(f"attempt_{attempt}/job_{next(launcher.jobs)}", launcher.store)
    return launcher.rank, launcher.world_size, store


@dataclass(frozen=True, slots=True, kw_only=True)
class _Launcher:
    """What one launcher told this process, and the jobs that ran under it so far."""

    store: dist.Store
    rank: int
    world_size: int
    jobs: Iterator[int]


# By address, in a process's life at most a few: where this process hosts the store itself, a second server on
# the same port cannot be opened.
_launchers: dict[tuple[str, ...], _Launcher] = {}


def _launcher(address: tuple[str, ...], timeout_s: float) -> _Launcher:
    if address not in _launchers:
        timeout = datetime.timedelta(seconds=timeout_s)
        store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))
        _launchers[address] = _Launcher(store=store, rank=rank, world_size=world_size, jobs=itertools.count())
    return _launchers[address]


def _allow_sequence_parallelism() -> None:
    # The only piece of Megatron's global state in use: its linear layers gather sequences into a shared buffer.
    from megatron.core import parallel_state

    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()


def _forget_models() -> None:
    """Let the job's models, and with them the threads of their process groups, end with the job."""
    if "megatron.core" not in sys.modules:
        return
    # An lru_cache on the method keeps every model of the job alive otherwise.
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.parallel_state import destroy_global_memory_buffer

    destroy_global_memory_buffer()
    clear: Callable[[], None] | None = getattr(RotaryEmbedding.forward, "cache_clear", None)
    if clear is not None:
        clear()
    # Models are full of cycles.
    gc.collect()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelContext:
    """The groups of one model on this rank.

    Attributes:
        tensor, context, data, pipeline: the groups that this rank is a member of; sizes and ranks follow from
            them. The ranks of a context group share every sequence, those of a data group the batch.
        data_context: data x context, the ranks that hold the same parameters: gradients are summed over it.
        tensor_context: tensor x context.   stage: tensor x context x data, all ranks of a pipeline stage.
        model: all ranks that hold one copy of the model (tensor x pipeline).
        everyone: all ranks that hold any part of the model.
        embedding: first and last pipeline stage, which share tied embeddings; None on the stages between.
        expert: ranks that hold different experts of the same layers and tensor rank; part of
            `data_context`.
        expert_data: ranks that hold the same experts.   tensor_expert: tensor x expert.
        model_expert: tensor x expert x pipeline: all ranks with a part of one copy of the experts.
        alone: a group of only this rank, for the kinds of parallelism that are not in use.
        sequence_parallel: activations outside attention and MLP are cut along the sequence over the tensor
        group.
        virtual_size: model chunks per pipeline stage; 1 = each stage holds consecutive layers.
    """

    tensor: dist.ProcessGroup
    context: dist.ProcessGroup
    data: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data_context: dist.ProcessGroup
    tensor_context: dist.ProcessGroup
    stage: dist.ProcessGroup
    model: dist.ProcessGroup
    everyone: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    expert: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    tensor_expert: dist.ProcessGroup
    model_expert: dist.ProcessGroup
    alone: dist.ProcessGroup
    sequence_parallel: bool
    device: torch.device
    virtual_size: int = 1

    @classmethod
    def create(
        cls,
        *,
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        virtual_pipeline_model_parallel_size: int | None = None,
        context_parallel_size: int = 1,
        expert_model_parallel_size: int = 1,
        sequence_parallel: bool = False,
        timeout_s: float = 600.0,
    ) -> ParallelContext:
        """Make the groups. Collective over the job; the data-parallel size is what is left of the ranks.

        Raises: ConfigError for a layout that does not fit the world.
        """
        tp, pp, cp = tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size
        virtual = virtual_pipeline_model_parallel_size or 1
        world = dist.get_world_size()
        if min(tp, pp, cp) < 1 or world % (tp * pp * cp):
            raise ConfigError(
                f"parallelism: tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} x "
                f"context_parallel_size={cp} does not divide the world of {world} ranks"
            )
        ep, copies = expert_model_parallel_size, world // (tp * pp)
        if ep < 1 or copies % ep:
            raise ConfigError(
                f"parallelism.expert_model_parallel_size={ep} does not divide the {copies} data-parallel ranks "
                "(context-parallel ones included)"
            )
        if sequence_parallel and tp == 1:
            raise ConfigError(
                "parallelism.sequence_parallel=true needs tensor_model_parallel_size > 1, got 1"
            )
        if virtual > 1 and pp == 1:
            raise ConfigError(
                f"parallelism.virtual_pipeline_model_parallel_size={virtual} needs "
                "pipeline_model_parallel_size > 1, got 1: chunks of one stage would follow one another anyway"
            )
        platform.install()
        _allow_sequence_parallelism()
        layout = RankLayout(tensor=tp, context=cp, data=copies // cp, pipeline=pp, expert=ep)
        new_group = _group_maker(timeout_s)
        groups = {
            name: _required(new_group(partition), name)
            for name, partition in (
                ("tensor", layout.tensor_groups()),
                ("pipeline", layout.pipeline_groups()),
                ("data", layout.data_groups()),
                ("model", layout.model_groups()),
                ("everyone", [list(range(world))]),
                ("alone", [[rank] for rank in range(world)]),
            )
        }
        # What is not in use has the ranks of another group; one of its own would cost threads.
        for name, partition, used, same in (
            ("context", layout.groups("context"), cp > 1, "alone"),
            ("data_context", layout.groups("context", "data"), cp > 1, "data"),
            ("tensor_context", layout.groups("tensor", "context"), cp > 1, "tensor"),
            ("stage", layout.groups("tensor", "context", "data"), pp > 1, "everyone"),
            ("expert", layout.expert_groups(), ep > 1, "alone"),
            ("expert_data", layout.expert_data_groups(), ep > 1, "data_context"),
            ("tensor_expert", layout.tensor_expert_groups(), ep > 1, "tensor"),
            ("model_expert", layout.model_expert_groups(), ep > 1, "model"),
        ):
            groups[name] = _required(new_group(partition), name) if used else groups[same]
        embedding = new_group(layout.embedding_groups())
        return cls(
            **groups,
            embedding=embedding,
            sequence_parallel=sequence_parallel,
            device=platform.device(),
            virtual_size=virtual,
        )

    @property
    def tp_size(self) -> int:
        """Ranks that share every layer."""
        return self.tensor.size()

    @property
    def tp_rank(self) -> int:
        """Position in the tensor group."""
        return self.tensor.rank()

    @property
    def cp_size(self) -> int:
        """Ranks that each hold a part of every sequence."""
        return self.context.size()

    @property
    def cp_rank(self) -> int:
        """Position in the context group."""
        return self.context.rank()

    @property
    def length_multiple(self) -> int:
        """What the padded length of a sequence must be a multiple of: 2 chunks per context rank, so that causal
        attention costs each the same, and the part of a context rank cut over the tensor group if
        `sequence_parallel`.
        """
        return (2 * self.cp_size if self.cp_size > 1 else 1) * (self.tp_size if self.sequence_parallel else 1)

    @property
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.pipeline.size()

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.pipeline.rank()

    @property
    def dp_size(self) -> int:
        """Shares that every minibatch is cut into; the context ranks of a share work on it together."""
        return self.data.size()

    @property
    def dp_rank(self) -> int:
        """Which share of a minibatch is this rank's."""
        return self.data.rank()

    @property
    def ep_size(self) -> int:
        """Ranks that the experts of a layer are shared out over."""
        return self.expert.size()

    @property
    def ep_rank(self) -> int:
        """Position in the expert group."""
        return self.expert.rank()

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank sees logits or values."""
        return self.pp_rank == self.pp_size - 1

    def stage_of_layer(self, layer: int, num_layers: int) -> int:
        """The pipeline stage that holds `layer` of a model of `num_layers`.

        Chunks take turns: with 8 layers, 2 stages and 2 chunks each, stage 0 holds 0, 1, 4, 5 and stage 1 the rest.
        """
        return layer // (num_layers // (self.pp_size * self.virtual_size)) % self.pp_size

    def stage_ranks(self) -> list[int]:
        """Global ranks of this rank's pipeline, first stage first."""
        return dist.get_process_group_ranks(self.pipeline)

    def process_groups(self) -> Any:
        """The same as Megatron-Core's ProcessGroupCollection."""
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection(
            tp=self.tensor,
            pp=self.pipeline,
            mp=self.model,
            embd=self.embedding,
            pos_embd=None,
            dp=self.data,
            dp_cp=self.data_context,
            intra_dp_cp=self.data_context,
            intra_dist_opt=self.everyone,
            tp_dp_cp=self.stage,
            cp=self.context,
            tp_cp=self.tensor_context,
            # Experts are cut over the same tensor group as everything else.
            expt_tp=self.tensor,
            ep=self.expert,
            tp_ep=self.tensor_expert,
            tp_ep_pp=self.model_expert,
            expt_dp=self.expert_data,
            intra_expt_dp=self.expert_data,
        )


def _required(group: dist.ProcessGroup | None, name: str) -> dist.ProcessGroup:
    if group is None:
        raise AssertionError(f"rank {dist.get_rank()} is in no {name} group")
    return group


def _group_maker(timeout_s: float) -> Callable[[Sequence[Sequence[int]]], dist.ProcessGroup | None]:
    def new_group(partition: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
        """Every rank makes every group, in the same order; the one that this rank is in is returned."""
        mine: dist.ProcessGroup | None = None
        for ranks in partition:
            group = dist.new_group(list(ranks), timeout=datetime.timedelta(seconds=timeout_s))
            if dist.get_rank() in ranks:
                mine = group
        return mine

    return new_group
