"""Process groups of the trainer: one default group per job, and one `ParallelContext` per model on top of it.

`distributed_runtime` is entered once per job by the application; several jobs may follow one another in one
torchrun. Policy and critic get a context each, over the same ranks and possibly with different layouts.
Every group is passed to Megatron-Core explicitly; `megatron.core.parallel_state` is never initialised,
but for one scratch buffer (see `_allow_sequence_parallelism`).

Rank order, fastest first: tensor, data, pipeline (Megatron's "tp-cp-ep-dp-pp" with cp = ep = 1).
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

    Args:
        timeout_s: limit of every collective.
    Raises: RuntimeError from torch when a rank does not arrive in time.
    """
    platform.install()
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
        yield DistributedRuntime(rank=rank, world_size=world_size, device=platform.device())
    finally:
        _forget_models()
        dist.destroy_process_group()


def _store(timeout_s: float) -> tuple[int, int, dist.Store]:
    if "RANK" not in os.environ:
        return 0, 1, dist.HashStore()
    address = tuple(os.environ[name] for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"))
    launcher = _launcher(address, timeout_s)
    # Jobs under this launcher only, so that every rank counts the same ones.
    store = dist.PrefixStore(f"job_{next(launcher.jobs)}", launcher.store)
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
        tensor, pipeline, data: the groups that this rank is a member of; sizes and ranks follow from them.
        model: all ranks that hold one copy of the model (tensor x pipeline).
        everyone: all ranks that hold any part of the model.
        embedding: first and last pipeline stage, which share tied embeddings; None on the stages between.
        expert: ranks that hold different experts of the same layers and tensor rank; part of the data group.
        expert_data: ranks that hold the same experts.   tensor_expert: tensor x expert.
        tensor_data: tensor x data: the ranks of one pipeline stage.
        model_expert: tensor x expert x pipeline: all ranks with a part of one copy of the experts.
        alone: a group of only this rank, for the kinds of parallelism that are not in use.
        sequence_parallel: activations outside attention and MLP are cut along the sequence over the tensor
        group.
        virtual_size: model chunks per pipeline stage; 1 = each stage holds consecutive layers.
    """

    tensor: dist.ProcessGroup
    pipeline: dist.ProcessGroup
    data: dist.ProcessGroup
    model: dist.ProcessGroup
    everyone: dist.ProcessGroup
    embedding: dist.ProcessGroup | None
    expert: dist.ProcessGroup
    expert_data: dist.ProcessGroup
    tensor_expert: dist.ProcessGroup
    model_expert: dist.ProcessGroup
    tensor_data: dist.ProcessGroup
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

        Raises: ConfigError for a layout that does not fit the world or is not supported.
        """
        tp, pp, world = tensor_model_parallel_size, pipeline_model_parallel_size, dist.get_world_size()
        virtual = virtual_pipeline_model_parallel_size or 1
        _refuse_unsupported(
            context_parallel_size=context_parallel_size,
        )
        if tp < 1 or pp < 1 or world % (tp * pp):
            raise ConfigError(
                f"parallelism: tensor_model_parallel_size={tp} x pipeline_model_parallel_size={pp} "
                f"does not divide the world of {world} ranks"
            )
        ep, data = expert_model_parallel_size, world // (tp * pp)
        if ep < 1 or data % ep:
            raise ConfigError(
                f"parallelism.expert_model_parallel_size={ep} does not divide the {data} data-parallel ranks"
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
        _allow_sequence_parallelism()
        layout = RankLayout(tensor=tp, data=data, pipeline=pp, expert=ep)
        new_group = _group_maker(timeout_s)
        required = {
            name: _required(new_group(partition), name)
            for name, partition in (
                ("tensor", layout.tensor_groups()),
                ("pipeline", layout.pipeline_groups()),
                ("data", layout.data_groups()),
                ("model", layout.model_groups()),
                ("everyone", [list(range(world))]),
                ("tensor_data", layout.tensor_data_groups()),
                *layout.all_expert_groups(),
                ("alone", [[rank] for rank in range(world)]),
            )
        }
        if ep == 1:
            # The same ranks as other groups; every group of its own would cost threads.
            for name, same in (
                ("expert", "alone"),
                ("expert_data", "data"),
                ("tensor_expert", "tensor"),
                ("model_expert", "model"),
            ):
                required[name] = required[same]
        embedding = new_group(layout.embedding_groups())
        return cls(
            **required,
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
    def pp_size(self) -> int:
        """Pipeline stages."""
        return self.pipeline.size()

    @property
    def pp_rank(self) -> int:
        """This rank's pipeline stage."""
        return self.pipeline.rank()

    @property
    def dp_size(self) -> int:
        """Copies of the model; each trains on its share of every minibatch."""
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
            dp_cp=self.data,
            intra_dp_cp=self.data,
            intra_dist_opt=self.everyone,
            tp_dp_cp=self.tensor_data,
            # No context parallelism: groups of one.
            cp=self.alone,
            tp_cp=self.tensor,
            # Experts are cut over the same tensor group as everything else.
            expt_tp=self.tensor,
            ep=self.expert,
            tp_ep=self.tensor_expert,
            tp_ep_pp=self.model_expert,
            expt_dp=self.expert_data,
            intra_expt_dp=self.expert_data,
        )


def _refuse_unsupported(**sizes: int) -> None:
    for name, size in sizes.items():
        if size != 1:
            raise ConfigError(
                f"parallelism.{name}={size} is not supported yet; supported: 1 "
                "(tensor, sequence, pipeline and data parallelism are)"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RankLayout:
    """Pure arithmetic: which global ranks form which group. The groups of a kind share no rank.

    `expert` neighbours on the data axis share out the experts; it divides `data`.
    """

    tensor: int
    data: int
    pipeline: int
    expert: int = 1

    def rank(self, *, tensor: int, data: int, pipeline: int) -> int:
        """Global rank of a coordinate."""
        return (pipeline * self.data + data) * self.tensor + tensor

    def tensor_groups(self) -> list[list[int]]:
        """Ranks that share every layer."""
        return [
            [self.rank(tensor=t, data=d, pipeline=p) for t in range(self.tensor)]
            for p in range(self.pipeline)
            for d in range(self.data)
        ]

    def data_groups(self) -> list[list[int]]:
        """Ranks that hold the same parameters."""
        return [
            [self.rank(tensor=t, data=d, pipeline=p) for d in range(self.data)]
            for p in range(self.pipeline)
            for t in range(self.tensor)
        ]

    def pipeline_groups(self) -> list[list[int]]:
        """Stages of one copy, first stage first."""
        return [
            [self.rank(tensor=t, data=d, pipeline=p) for p in range(self.pipeline)]
            for d in range(self.data)
            for t in range(self.tensor)
        ]

    def model_groups(self) -> list[list[int]]:
        """All ranks of one copy."""
        return [
            [
                self.rank(tensor=t, data=d, pipeline=p)
                for p in range(self.pipeline)
                for t in range(self.tensor)
            ]
            for d in range(self.data)
        ]

    def embedding_groups(self) -> list[list[int]]:
        """First and last stage of each pipeline; the stages between are in none."""
        return [sorted({ranks[0], ranks[-1]}) for ranks in self.pipeline_groups()]

    def all_expert_groups(self) -> list[tuple[str, list[list[int]]]]:
        """Names and groups of expert parallelism; nothing if it is not in use."""
        if self.expert == 1:
            return []
        return [
            ("expert", self.expert_groups()),
            ("expert_data", self.expert_data_groups()),
            ("tensor_expert", self.tensor_expert_groups()),
            ("model_expert", self.model_expert_groups()),
        ]

    def expert_groups(self) -> list[list[int]]:
        """Ranks that hold different experts of the same layers."""
        return [
            ranks[start : start + self.expert]
            for ranks in self.data_groups()
            for start in range(0, self.data, self.expert)
        ]

    def expert_data_groups(self) -> list[list[int]]:
        """Ranks that hold the same experts."""
        return [ranks[start :: self.expert] for ranks in self.data_groups() for start in range(self.expert)]

    def tensor_expert_groups(self) -> list[list[int]]:
        """Tensor x expert, tensor fastest: the ranks that a token may be sent to."""
        return [
            [
                self.rank(tensor=t, data=first + e, pipeline=p)
                for e in range(self.expert)
                for t in range(self.tensor)
            ]
            for p in range(self.pipeline)
            for first in range(0, self.data, self.expert)
        ]

    def model_expert_groups(self) -> list[list[int]]:
        """Tensor x expert x pipeline: one copy of the experts."""
        return [
            [
                self.rank(tensor=t, data=first + e, pipeline=p)
                for p in range(self.pipeline)
                for e in range(self.expert)
                for t in range(self.tensor)
            ]
            for first in range(0, self.data, self.expert)
        ]

    def tensor_data_groups(self) -> list[list[int]]:
        """Tensor x data: all ranks of a pipeline stage."""
        return [
            [self.rank(tensor=t, data=d, pipeline=p) for d in range(self.data) for t in range(self.tensor)]
            for p in range(self.pipeline)
        ]
