"""Peak memory of the tensors that a piece of code allocates on the CPU, as torch's own allocator records it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from megatron_ppo.transport.broadcast_group import PendingBroadcast

_RELEASE_TIMEOUT_S = 60.0


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


@contextmanager
def broadcasts_release_at_once() -> Iterator[None]:
    """Within the block a broadcast has ended when gloo's thread has let go of its buffer as well.

    The recorder sees no memory that another thread frees: without this, every tensor that gloo's thread is the last to
    hold, for a moment, would count as held for ever. What it may hold longer in truth is one tensor.
    """
    wait = PendingBroadcast.wait

    def waits_for_release(self: PendingBroadcast, **kwargs: Any) -> Tensor:
        buffer = wait(self, **kwargs)
        self._work = None  # type: ignore[assignment]  # holds the buffer as well
        deadline = time.monotonic() + _RELEASE_TIMEOUT_S
        while buffer._use_count() > 1:  # type: ignore[attr-defined]
            if time.monotonic() > deadline:
                raise RuntimeError("gloo still holds a buffer of a broadcast that has ended")
            time.sleep(0.0005)
        return buffer

    with mock.patch.object(PendingBroadcast, "wait", waits_for_release):
        yield
