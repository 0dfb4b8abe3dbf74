"""The one place that makes Megatron-Core run without CUDA, and that knows both supported versions of it.

`install()` is called before anything imports `megatron.core`, and does its work once: the job, the parallel context,
both models and the checkpoint functions call it, `distributed_runtime` does not. The patches are process-global: an
inference engine never shares this process.

Where CUDA is available it changes nothing of torch, and no kernel, collective or generator of Megatron-Core. Three
mistakes of Megatron-Core that have nothing to do with the device are answered there as well (ADR 0022):
`_name_missing_router_kernel` and `_patch_recomputation`, both only without Transformer Engine, and
`_patch_tied_checkpoint`.

Megatron-Core 0.16.x passes `torch.cuda.current_device()` or the literal "cuda" as `device=` and compares
`Tensor.type()` with "torch.cuda.*Tensor"; 0.19.x still does. Each of the other patches below answers one of these.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron_ppo.mcore import cpu_device, gloo_uneven
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.telemetry.accelerators import Kernels, Precision, TransformerImpl, probe, select

# Of the files of a checkpoint, in both versions; the last one is written by 0.16.x only.
CHECKPOINT_BACKEND, CHECKPOINT_VERSION = "torch_dist", 1
COMMON_FILE = "common.pt"
_state = {"installed": False}


def device() -> torch.device:
    """Where models and batches live: this process's CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def on_cuda() -> bool:
    """Whether models are on a GPU, where only Megatron-Core's own mistakes are answered."""
    return torch.cuda.is_available()


def install() -> None:
    """Prepare this process for Megatron-Core. Idempotent.

    Raises: MegatronPPOError if `megatron.core` was imported before, unprepared, on a machine without CUDA.
    """
    if _state["installed"]:
        return
    if not on_cuda():
        import sys

        if "megatron.core" in sys.modules:
            raise MegatronPPOError(
                "megatron.core was imported before megatron_ppo.mcore.platform.install(); "
                "without CUDA it must come after"
            )
        with _compile_disabled():
            cpu_device.patch_cuda_module()
            cpu_device.patch_tensors()
            _quiet_cuda_search()
            _import_megatron()
        _patch_megatron_rng()
        _patch_expert_dispatcher()
    else:
        _import_megatron()
    _patch_recomputation()
    _patch_tied_checkpoint()
    _state["installed"] = True


def _quiet_cuda_search() -> None:
    """torch warns when it finds a CUDA compiler and no GPU, as Megatron's imports make it look; here that is normal."""
    logging.getLogger("torch.utils.cpp_extension").addFilter(
        lambda record: "No CUDA runtime is found" not in record.getMessage()
    )


def _import_megatron() -> None:
    # Megatron-Core warns once per missing optional package (Transformer Engine, Apex); none is needed here.
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in (
            "megatron.core.models.gpt.gpt_model",
            "megatron.core.optimizer",
            "megatron.core.pipeline_parallel.schedules",
            "megatron.core.tensor_parallel.random",
        ):
            import_module(name)
    _name_missing_router_kernel()


def _name_missing_router_kernel() -> None:
    # 0.16.x asks `te_general_gemm is not None` where Transformer Engine's absence has left the name undefined: the
    # router of every mixture of experts fails with a NameError. 0.19.x defines it as None.
    module: Any = import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(module, "te_general_gemm"):
        module.te_general_gemm = None


@contextlib.contextmanager
def _compile_disabled() -> Any:
    """Megatron decorates small functions with `torch.compile` at import; on CPU that costs seconds and a C++
    compiler.
    """
    original = torch.compile

    def passthrough(function: Any = None, **_: Any) -> Any:
        return function if function is not None else (lambda inner: inner)

    torch.compile = passthrough
    try:
        yield
    finally:
        torch.compile = original


def _patch_megatron_rng() -> None:
    random: Any = import_module("megatron.core.tensor_parallel.random")
    # The original queues the call until CUDA is initialised, which never happens: a silent no-op.
    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    logging.getLogger(random.__name__).addFilter(
        # On the CPU both names mean the same generator, so this warning is always there and always wrong.
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _patch_recomputation() -> None:
    """Let selective recomputation of norms work without Transformer Engine.

    In 0.16.x and 0.19.x alike `CheckpointWithoutOutput` takes its own default, `fp8=False`, for "FP8 is in use",
    since it asks for `is not None`, and then looks for Transformer Engine's FP8 state.
    """
    random: Any = import_module("megatron.core.tensor_parallel.random")
    if random.HAVE_TE:
        return
    original = random.CheckpointWithoutOutput.__init__

    def without_fp8(self: Any, fp8: Any = None) -> None:
        original(self, fp8=fp8 or None)

    random.CheckpointWithoutOutput.__init__ = without_fp8


def _patch_tied_checkpoint() -> None:
    """Let a pipeline with tied embeddings be saved and loaded without global groups.

    In 0.16.x and 0.19.x alike the last stage's copy of the embedding asks `parallel_state` for the data-parallel rank,
    although the group is in the metadata at hand.
    """
    module: Any = import_module("megatron.core.models.common.language_module.language_module")
    original = module.LanguageModule.tie_embeddings_and_output_weights_state_dict

    def tied(self: Any, state: Any, output_key: str, embedding_key: str, metadata: Any) -> None:
        real = module.parallel_state
        rank = metadata["dp_cp_group"].rank()
        module.parallel_state = SimpleNamespace(get_data_parallel_rank=lambda with_context_parallel: rank)
        try:
            original(self, state, output_key, embedding_key, metadata)
        finally:
            module.parallel_state = real

    module.LanguageModule.tie_embeddings_and_output_weights_state_dict = tied


def _patch_expert_dispatcher() -> None:
    # Split sizes become numpy arrays on their way from the GPU, and gloo takes nothing else; in both versions a tensor
    # that is on the CPU already stays a tensor.
    dispatcher: Any = import_module("megatron.core.transformer.moe.token_dispatcher")

    def on_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    dispatcher.maybe_move_tensor_to_cpu = on_cpu
    even_gather = dispatcher.gather_from_sequence_parallel_region
    even_reduce_scatter = dispatcher.reduce_scatter_to_sequence_parallel_region

    # With tensor and expert parallelism together the shares are unequal, which gloo refuses. The same keywords in both
    # versions.
    def gather(share: Any, *, group: Any, output_split_sizes: list[int] | None = None, **others: Any) -> Any:
        if output_split_sizes is None:
            return even_gather(share, group=group, **others)
        return gloo_uneven.gather(share, output_split_sizes, group)

    def reduce_scatter(whole: Any, *, group: Any, input_split_sizes: list[int] | None = None) -> Any:
        if input_split_sizes is None:
            return even_reduce_scatter(whole, group=group)
        return gloo_uneven.reduce_scatter(whole, input_split_sizes, group)

    dispatcher.gather_from_sequence_parallel_region = gather
    dispatcher.reduce_scatter_to_sequence_parallel_region = reduce_scatter


def forward_backward_function(
    pipeline_model_parallel_size: int, virtual_pipeline_model_parallel_size: int = 1
) -> Callable[..., list[Any]]:
    """Megatron's schedule for this pipeline, interleaved with more than one chunk per stage.

    It does not ask `parallel_state` (unused here). The sizes are arguments of `get_forward_backward_func` in 0.16.x
    and 0.19.x alike.
    """
    schedules: Any = import_module("megatron.core.pipeline_parallel.schedules")
    schedule: Callable[..., list[Any]] = schedules.get_forward_backward_func(
        pp_size=pipeline_model_parallel_size,
        # None, not 1: any number would choose the interleaved schedule.
        vp_size=virtual_pipeline_model_parallel_size if virtual_pipeline_model_parallel_size > 1 else None,
    )
    return schedule


def kernels(transformer_impl: TransformerImpl, precision: Precision) -> Kernels:
    """What a model runs on in this process. Raises: ConfigError for what cannot be used here."""
    return select(
        probe(cuda=on_cuda(), load=import_module), transformer_impl=transformer_impl, precision=precision
    )


def local_rank() -> int:
    """This process's CUDA device under torchrun; 0 otherwise."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def plan_checkpoint(state: Mapping[str, Any], folder: Path) -> tuple[Any, Any, list[Any]]:
    """Plan a save in the torch_dist format without touching the disk or starting a process. Collective.

    0.19.x asks for a strategy by name, prefers another package's, and hands the name on to the callbacks; 0.16.x knows
    none of that.

    Returns: the writer that holds this rank's part, the metadata of the whole (on rank 0), and the content of common.pt
    (on rank 0; empty in 0.19.x, which saves that state with the shards).
    """
    checkpointing: Any = import_module("megatron.core.dist_checkpointing")
    strategies: Any = import_module("megatron.core.dist_checkpointing.strategies.torch")
    planned: list[Any] = []

    class PlanningStrategy(strategies.TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Keeps the plan instead of making callbacks of it."""

        def _get_save_and_finalize_callbacks(self, writer: Any, result: Any, *_: object) -> Any:
            planned.extend((writer, result[1]))
            # `save` appends to the list of what it gets back.
            return SimpleNamespace(finalize_fns=[])

    strategy = PlanningStrategy(CHECKPOINT_BACKEND, CHECKPOINT_VERSION, thread_count=1)
    known = inspect.signature(checkpointing.save).parameters
    own = {"async_strategy": "mcore"} if "async_strategy" in known else {}
    with _planning_only() as common:
        checkpointing.save(dict(state), str(folder), strategy, async_sharded_save=True, **own)
    writer, metadata = planned
    return writer, metadata, common


@contextlib.contextmanager
def _planning_only() -> Iterator[list[Any]]:
    """Keeps a save that is being planned off the disk.

    Both versions start a spawned manager process for the writers' results, which re-imports the main script and
    would outlive a killed trainer; the caller collects the results itself, so an empty queue takes its place. 0.16.x
    also writes common.pt at once, on rank 0 alone, whose failure the other ranks would not meet; 0.19.x saves that
    state with the shards.

    Yields: a list that holds the content of common.pt afterwards, or stays empty in 0.19.x.
    """
    module: Any = import_module("megatron.core.dist_checkpointing.strategies.filesystem_async")
    common_module: Any = import_module("megatron.core.dist_checkpointing.strategies.common")
    strategy = getattr(common_module, "TorchCommonSaveStrategy", None)
    common: list[Any] = []
    original_queue = module._results_queue
    module._results_queue = queue.Queue()
    if strategy is not None:
        original_save = strategy.save_common
        strategy.save_common = lambda self, state, folder: common.append(state)
    try:
        yield common
    finally:
        module._results_queue = original_queue
        if strategy is not None:
            strategy.save_common = original_save


def lacks_common_file(folder: Path, keys: Iterable[str]) -> bool:
    """Whether the checkpoint in `folder`, with the stored `keys`, should have a file common.pt and has none.

    0.16.x saves the common state in that file and stumbles over its absence, 0.19.x with the shards. A run may
    continue under another version than it was saved by, so the checkpoint decides and not the version in use.
    """
    with_shards = any(key.startswith("common_state") for key in keys)
    return not with_shards and not (folder / COMMON_FILE).is_file()


def write_checkpoint_bucket(writer: Any, bucket: Any) -> list[Any]:
    """Write one file of a planned save and flush it. Returns what the checkpoint's metadata says of it.

    Raises: the writer's own error.
    """
    # Undecorated: the decorator turns garbage collection off, and this thread shares the process with training.
    write = inspect.unwrap(writer.write_preloaded_data)
    transforms = [writer.transforms] if hasattr(writer, "transforms") else []
    done: queue.Queue[Any] = queue.Queue()
    count: queue.Queue[int] = queue.Queue()
    count.put(0)
    write(transforms, 0, bucket, done, count, use_fsync=True)
    _, written = done.get_nowait()
    if isinstance(written, Exception):
        raise written
    results: list[Any] = written
    return results
