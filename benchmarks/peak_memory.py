"""Peak memory of the tensors that a piece of code allocates on the CPU, as torch's own allocator records it."""

from __future__ import annotations

from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_bytes(action: Callable[[], object]) -> int:
    """Most bytes that were allocated at once beyond what was there before `action`. Allocations of this thread."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = action()
        del result
    if profiler.profiler is None or profiler.profiler.kineto_results is None:
        raise RuntimeError("this build of torch records no allocations: its profiler has no kineto")
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, num_bytes in changes:
        live += num_bytes
        peak = max(peak, live)
    return peak
