"""The one place that makes Megatron-Core run without CUDA, and that knows both supported versions of it.

`install()` is called once per process before anything imports `megatron.core`; `MegatronPolicy`,
`MegatronCritic`, the checkpoint functions and `distributed_runtime` do that. Where CUDA is available it does
nothing at all, so a GPU runs unpatched Megatron-Core. The patches are process-global: an inference engine
never shares this process.

Megatron-Core 0.16.x passes `torch.cuda.current_device()` or the literal "cuda" as `device=` and compares
`Tensor.type()` with "torch.cuda.*Tensor"; 0.19.x still does. Each patch below answers one of these.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import queue
from collections.abc import Callable, Iterator
from importlib import import_module
from types import SimpleNamespace, TracebackType
from typing import Any

import torch

from megatron_ppo.mcore import gloo_uneven
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.telemetry.accelerators import Kernels, Precision, TransformerImpl, probe, select

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint",
    "empty_like", "zeros_like", "ones_like", "full_like", "as_tensor",
)  # fmt: skip
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}
_state = {"installed": False}


def device() -> torch.device:
    """Where models and batches live: this process's CUDA device, or the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if on_cuda() else torch.device("cpu")


def on_cuda() -> bool:
    """Whether the unpatched GPU path runs."""
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
            _patch_cuda_module()
            _patch_tensors()
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


class _Event:
    """Stands in for a CUDA event; on the CPU everything has already happened."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def record(self, *_: Any) -> None:
        """Nothing to record."""

    def wait(self, *_: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        """Always complete."""
        return True

    def elapsed_time(self, *_: Any) -> float:
        """No device time passes."""
        return 0.0


class _Stream:
    """Stands in for a CUDA stream; work on the CPU is already in order."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, *_: Any) -> None:
        """Nothing to wait for."""

    def record_event(self, *_: Any) -> _Event:
        """An event that has happened."""
        return _Event()

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def __enter__(self) -> _Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None


def _patch_cuda_module() -> None:
    cuda: Any = torch.cuda
    cpu, stream = torch.device("cpu"), _Stream()

    # A new function object per name: dynamo refuses one object under two names.
    def nothing() -> Callable[..., None]:
        return lambda *_, **__: None

    def zero() -> Callable[..., int]:
        return lambda *_, **__: 0

    def get_state() -> Callable[..., torch.Tensor]:
        return lambda device=None: torch.get_rng_state()

    def set_state() -> Callable[..., None]:
        return lambda state, device=None: torch.set_rng_state(state)

    def manual_seed(seed: int) -> None:
        # Not torch.manual_seed: that one calls back into torch.cuda.
        torch.default_generator.manual_seed(seed)

    cuda.current_device = lambda: cpu
    cuda.manual_seed = manual_seed
    for name in ("synchronize", "empty_cache", "set_device"):
        setattr(cuda, name, nothing())
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved"):
        setattr(cuda, name, zero())
    for module in (cuda, cuda.random):
        module.get_rng_state, module.set_rng_state = get_state(), set_state()
    cuda.Stream, cuda.Event = _Stream, _Event
    cuda.current_stream = lambda *_: stream
    cuda.default_stream = lambda *_: stream
    cuda.stream = lambda *_: contextlib.nullcontext()


def _patch_tensors() -> None:
    cpu = torch.device("cpu")
    # `with torch.device(...)` recognises factories by identity, in a set made on first use: make it of the
    # originals.
    device_module: Any = import_module("torch.utils._device")
    device_module._device_constructors()

    def on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def create(*args: Any, **kwargs: Any) -> torch.Tensor:
            where = kwargs.get("device")
            if where is not None and where is not cpu and str(where).startswith("cuda"):
                kwargs["device"] = cpu
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return factory(*args, **kwargs)

        return create

    for name in _FACTORIES:
        setattr(torch, name, on_cpu(getattr(torch, name)))
    original_type = torch.Tensor.type

    def type_name(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dtype is None and not args and self.dtype in _CUDA_TYPE_NAMES:
            return _CUDA_TYPE_NAMES[self.dtype]
        return original_type(self, dtype, *args, **kwargs) if dtype is not None else original_type(self)

    tensor_class: Any = torch.Tensor
    tensor_class.type = type_name
    tensor_class.cuda = lambda self, *_, **__: self
    module_class: Any = torch.nn.Module
    module_class.cuda = lambda self, *_, **__: self


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


@contextlib.contextmanager
def checkpoint_planning() -> Iterator[list[Any]]:
    """Lets torch_dist plan a save without touching the disk or starting a process.

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


def own_async_strategy() -> dict[str, str]:
    """Arguments that keep `dist_checkpointing.save` to Megatron's own planning: 0.19.x prefers another package."""
    save = import_module("megatron.core.dist_checkpointing").save
    return {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(save).parameters else {}


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
