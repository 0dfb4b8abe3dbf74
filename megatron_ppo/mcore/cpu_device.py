"""The CPU in the place of a CUDA device: what `torch.cuda` and tensors answer to Megatron-Core without one.

Used by `platform.install`, once per process, before Megatron-Core is imported; never where CUDA is available. Nothing
here knows a version of Megatron-Core: both supported ones ask the same questions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from importlib import import_module
from types import TracebackType
from typing import Any

import torch

_FACTORIES = (
    "tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint",
    "empty_like", "zeros_like", "ones_like", "full_like", "as_tensor",
)  # fmt: skip
_CUDA_TYPE_NAMES = {
    torch.float32: "torch.cuda.FloatTensor",
    torch.float16: "torch.cuda.HalfTensor",
    torch.bfloat16: "torch.cuda.BFloat16Tensor",
}


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


def patch_cuda_module() -> None:
    """Answer for the CPU where Megatron asks `torch.cuda`; `is_available` stays False."""
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


def patch_tensors() -> None:
    """Let tensor factories and methods that name CUDA work on the CPU."""
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
