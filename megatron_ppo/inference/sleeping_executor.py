"""The executor of an engine of several workers on a CPU: its processes sleep while they wait for each other.

They talk through shared memory. A reader of vLLM's looks for the next message without a pause until one second after
the last one (vllm 0.32 and 0.33: `SpinCondition.busy_loop_s`, which no option sets), so engine core and workers are
busy with nothing. Where each has a core of its own that saves microseconds; where trainer, workers and core share a
few, it takes time from those that work (ADR 0027). Here a reader sleeps until the writer's notification.

Imported in the engine core and in every worker, because the class travels in the engine's configuration. Chosen by
`inference.vllm_adapter`.
"""

from __future__ import annotations

import inspect

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition
from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class SleepingExecutor(MultiprocExecutor):
    """vLLM's executor of worker processes. What differs is how the processes that import this module wait."""


def _sleep_at_once() -> None:
    parameter = inspect.signature(SpinCondition.__init__).parameters.get("busy_loop_s")
    if parameter is not None and SpinCondition.__init__.__defaults__ == (parameter.default,):
        SpinCondition.__init__.__defaults__ = (0.0,)


_sleep_at_once()
