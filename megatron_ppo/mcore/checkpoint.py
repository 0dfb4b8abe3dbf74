"""Saves and loads policy and critic with optimizers, schedulers and generators, in Megatron's torch_dist
format.

One save holds all models, each under its name, so that the format's fixed cost is paid once. The format
reshards: another layout of the same models may load it. Atomicity (a temporary folder, renamed) is the caller's.

Invariants: training continued from a checkpoint takes the same steps as training that was never interrupted; a
checkpoint of other models, or one that lacks a part, is refused on every rank with the file or tensor that is wrong.

The current configuration wins over the saved one in everything that is not state: learning rates, betas,
weight decay and the schedule's shape come from the settings, only its position is restored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from megatron_ppo.loop.residency import EVERYTHING, STATE, Model, Residency
from megatron_ppo.mcore import platform
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.protocol.errors import CheckpointError

if TYPE_CHECKING:
    from megatron_ppo.mcore.checkpoint_writer import StagedSave, ThreadedSave
    from megatron_ppo.mcore.trained_model import TrainedModel

logger = logging.getLogger(__name__)

Models = Mapping[str, MegatronPolicy | MegatronCritic]

SUBFOLDER = "models"
_ATTENTION = re.compile(r"self_attention\.linear_(qkv|proj)\.(weight|bias)$")


class ModelCheckpoints:
    """The models of a run as one store (loop port ModelStore): a subfolder of each checkpoint folder."""

    def __init__(self, models: Models, residency: Residency | None = None) -> None:
        self._models = models
        self._residency = residency or Residency()

    def save(self, folder: Path) -> None:
        """Write into the existing `folder`. Collective over all ranks. Raises: CheckpointError."""
        save_models(folder / SUBFOLDER, self._models, residency=self._residency)

    def begin_save(self, folder: Path) -> ThreadedSave:
        """Copy everything; a thread of each rank writes it. Collective over all ranks. Raises: CheckpointError."""
        from megatron_ppo.mcore.checkpoint_writer import ThreadedSave

        return ThreadedSave(stage_models(folder / SUBFOLDER, self._models, residency=self._residency))

    def load(self, folder: Path) -> None:
        """Restore in place. Collective over all ranks. Raises: CheckpointError."""
        load_models(folder / SUBFOLDER, self._models, residency=self._residency)


def save_models(path: Path, models: Models, *, residency: Residency | None = None) -> None:
    """Write all state of `models` into the new folder `path`. Collective over all ranks.

    Args:
        residency: who may be on the device; each model is there only until its state was copied to the host.
    Raises: CheckpointError on every rank if the folder is not empty or a rank cannot write.
    """
    staged = stage_models(path, models, residency=residency)
    staged.write()
    staged.commit()


def stage_models(path: Path, models: Models, *, residency: Residency | None = None) -> StagedSave:
    """As `save_models`, up to the point where everything is copied and nothing is written."""
    platform.install()
    from megatron_ppo.mcore import checkpoint_writer

    checkpoint_writer.on_rank_zero(lambda: _make_empty(path))
    residency = residency or Residency()
    state: dict[str, Any] = {}
    for name, model in models.items():
        with residency.saving(Model(name)):
            state[name] = _template(name, model.trained, loading=False)
            if residency.moves:
                state[name] = _on_host(state[name])
        state[name]["scheduler"] = model.trained.scheduler.state_dict()
    state["rng"] = _generator_shard(_generator_states())
    state["about"] = {"models": _descriptions(models), "world_size": dist.get_world_size()}
    return checkpoint_writer.stage(
        state, path, live=[t for m in models.values() for t in _tensors(m.trained)]
    )


def load_models(path: Path, models: Models, *, residency: Residency | None = None) -> None:
    """Restore `models` in place. Collective over all ranks.

    Raises: CheckpointError on every rank if `path` is no complete checkpoint, or one of other models.
    """
    platform.install()
    from megatron_ppo.mcore import checkpoint_reader

    about = checkpoint_reader.read_about(path, _descriptions(models))
    same_world = about["world_size"] == dist.get_world_size()
    template: dict[str, Any] = {"rng": _generator_shard(None)} if same_world else {}
    if not same_world:
        logger.warning(
            "checkpoint %s is of %d ranks, this job has %d: generators start from the seed",
            path,
            about["world_size"],
            dist.get_world_size(),
        )
    residency = residency or Residency()
    for name, model in models.items():
        with residency.restoring(Model(name)):
            template[name] = _template(name, model.trained, loading=True)
            loaded = checkpoint_reader.load(template, path)
            _restore(loaded[name], model.trained)
        if "rng" in template:  # read once
            _set_generator_states(loaded["rng"])
        template.clear()


def load_weights(path: Path, name: str, model: MegatronPolicy | MegatronCritic) -> None:
    """The weights of the model that was saved as `name`, from any layout; neither its optimizer nor its schedule.

    Collective over all ranks. Raises: as `load_models`.
    """
    platform.install()
    from megatron_ppo.mcore import checkpoint_reader

    model.trained.residence.require(EVERYTHING, "loading weights")
    checkpoint_reader.read_about(path, {name: _description(model)})
    # Without the optimizer's part: making its template touches its state.
    loaded = checkpoint_reader.load({name: _module_template(name, model.trained)}, path)
    _load_modules(loaded[name]["module"], model.trained)
    # In bf16 the optimizer holds float32 copies, made of the weights that were here before.
    model.trained.optimizer.reload_model_params()


def _tensors(trained: TrainedModel) -> list[torch.Tensor]:
    """Everything that training changes in place."""
    tensors = [t for chunk in trained.chunks for t in (*chunk.parameters(), *chunk.buffers())]
    for chained in trained.optimizer.chained_optimizers:
        for group in chained.optimizer.param_groups:
            tensors += group["params"]
        for state in chained.optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return tensors


def _template(name: str, trained: TrainedModel, *, loading: bool) -> dict[str, Any]:
    """Sharded state of one model: what is saved, or where loaded tensors go. Keys carry the model's name."""
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    trained.residence.require(STATE, "a checkpoint")
    metadata = _metadata(trained)
    module = _modules(trained, metadata)
    with _keeping_bucket_padding(trained.optimizer):
        optimizer = trained.optimizer.sharded_state_dict(module, is_loading=loading, metadata=metadata)
    state = {"module": module, "optimizer": optimizer}
    add_prefix_for_sharding(state, f"{name}.")
    return state


def _module_template(name: str, trained: TrainedModel) -> dict[str, Any]:
    from megatron.core.dist_checkpointing.utils import add_prefix_for_sharding

    state = {"module": _modules(trained, _metadata(trained))}
    add_prefix_for_sharding(state, f"{name}.")
    return state


def _modules(trained: TrainedModel, metadata: dict[str, Any]) -> dict[str, Any]:
    # Also before loading: a gather on its way would overwrite what is loaded.
    trained.flush()
    # Layers are saved under their numbers in the whole model, so chunks share one name space.
    modules = {
        f"chunk{index}": chunk.sharded_state_dict(metadata=metadata)
        for index, chunk in enumerate(trained.chunks)
    }
    for module in modules.values():
        for name, shard in module.items():
            if _ATTENTION.search(name):
                # Heads of zeros fill up the tensor ranks (ADR 0014), behind the real ones: how many is the layout's
                # affair. What the file does not have is zero after loading; the optimizer's state takes this over.
                shard.allow_shape_mismatch = True
    return modules


def _load_modules(loaded: Mapping[str, Any], trained: TrainedModel) -> None:
    for index, chunk in enumerate(trained.chunks):
        chunk.load_state_dict(loaded[f"chunk{index}"])


def _metadata(trained: TrainedModel) -> dict[str, Any]:
    return {
        # Optimizer state in the shapes of the parameters, so that any layout can load it.
        "distrib_optim_sharding_type": "fully_reshardable",
        "distrib_optim_fully_reshardable_mem_efficient": False,
        "chained_optim_avoid_prefix": True,
        # Context ranks hold the same parameters as data-parallel ones.
        "dp_cp_group": trained.parallel.data_context,
    }


def _on_host(state: dict[str, Any]) -> dict[str, Any]:
    """The same sharded state with copies of its tensors in host memory, so that the model may leave the device."""
    from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    def copied(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            return dataclasses.replace(value, data=copied(value.data))
        return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value

    # Factories cut a parameter into the tensors that are stored; a cut is a view, so it comes before the copy.
    apply_factories(state)
    copies: dict[str, Any] = dict_list_map_outplace(copied, state)
    return copies


def _restore(loaded: Mapping[str, Any], trained: TrainedModel) -> None:
    _load_modules(loaded["module"], trained)
    with contextlib.ExitStack() as stack:
        for chained in trained.optimizer.chained_optimizers:
            stack.enter_context(_keeping_adam_step(chained))
        trained.optimizer.load_state_dict(loaded["optimizer"])
    settings = trained.settings.optimizer
    for chained in trained.optimizer.chained_optimizers:
        _separate_adam_steps(chained.optimizer)
        for group in chained.optimizer.param_groups:
            group["max_lr"], group["min_lr"] = settings.lr, settings.min_lr
            group["betas"], group["eps"] = (settings.adam_beta1, settings.adam_beta2), settings.adam_eps
    # load_state_dict adds the saved ticks to the present ones.
    trained.scheduler.num_steps = 0
    trained.scheduler.load_state_dict(loaded["scheduler"])


@contextlib.contextmanager
def _keeping_bucket_padding(optimizer: Any) -> Iterator[None]:
    """Let Megatron join the buckets of the optimizer state where it looks for parameters: at padded positions.

    0.16.x and 0.19.x cut off the padding at the end of each bucket before joining, but not from the ranges of the
    parameters. With several buckets, that is with overlapped gradient reduction, everything behind the first padded one
    is saved shifted, without a word; a value head, whose bias has one entry, is enough for that.
    """
    unpadded: list[tuple[Any, int]] = []
    for chained in optimizer.chained_optimizers:
        for buffer in chained.buffers:
            unpadded += [(part, part.numel_unpadded) for part in (buffer, *buffer.buckets)]
            buffer.numel_unpadded = buffer.numel
            for bucket in buffer.buckets:
                bucket.numel_unpadded = bucket.grad_data.numel()
    try:
        yield
    finally:
        for part, numel in unpadded:
            part.numel_unpadded = numel


@contextlib.contextmanager
def _keeping_adam_step(chained: Any) -> Iterator[None]:
    """Megatron copies every entry of an optimizer state from the checkpoint, but keeps "step" elsewhere: a
    KeyError.

    Only torch's AdamW has that entry; the present step, restored from the parameter group, is passed through.
    """
    original = chained._set_main_param_and_optimizer_states

    def with_step(parameter: Any, tensors: dict[str, Any]) -> None:
        group, order = chained.model_param_group_index_map[parameter]
        state = chained.optimizer.state[chained.optimizer.param_groups[group]["params"][order]]
        if "step" in state and "step" not in tensors:
            tensors = {**tensors, "step": state["step"]}
        original(parameter, tensors)

    chained._set_main_param_and_optimizer_states = with_step
    try:
        yield
    finally:
        del chained._set_main_param_and_optimizer_states


def _separate_adam_steps(optimizer: torch.optim.Optimizer) -> None:
    # Megatron restores one shared tensor as every parameter's step, so each update would advance it once per
    # parameter.
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].clone()


def _descriptions(models: Models) -> dict[str, str]:
    return {name: _description(model) for name, model in models.items()}


def _description(model: MegatronPolicy | MegatronCritic) -> str:
    return f"{type(model).__name__} of {model.trained.model}"


def _make_empty(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    if any(path.iterdir()):
        raise CheckpointError(f"cannot save models into {path}: the folder is not empty")


def _generator_shard(states: dict[str, Any] | None) -> Any:
    from megatron.core.dist_checkpointing import ShardedObject

    return ShardedObject("rng", states, (dist.get_world_size(),), (dist.get_rank(),), replica_id=0)


def _generator_states() -> dict[str, Any]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    return {
        "cpu": torch.get_rng_state(),
        "device": torch.cuda.get_rng_state(),
        "tracker": get_cuda_rng_tracker().get_states(),
    }


def _set_generator_states(states: Mapping[str, Any]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker

    # Device first: without CUDA both names mean the same generator.
    torch.cuda.set_rng_state(states["device"])
    torch.set_rng_state(states["cpu"])
    get_cuda_rng_tracker().set_states(states["tracker"])
