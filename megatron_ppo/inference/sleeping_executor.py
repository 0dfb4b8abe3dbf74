"""The executor of an engine of several workers on a CPU: its processes sleep while they wait for each other.

They talk through shared memory. A reader of vLLM's looks for the next message without a pause until one second after
the last one (vllm 0.32 and 0.33: `SpinCondition.busy_loop_s`, which no option sets), so engine core and workers are
busy with nothing. Where each has a core of its own that saves microseconds; where trainer, workers and core share a
few, it takes time from those that work (ADR 0027). Here a reader sleeps until the writer's notification.

A notification may be lost: the writer's socket holds one (`SNDHWM`), and ZeroMQ drops the next one that comes within
about a millisecond, before the socket has heard that the first is gone. vLLM's readers look again after 5 s only. Here
they look every millisecond for a while after a message, and now and then later.

Imported in the engine core and in every worker, because the class travels in the engine's configuration. Chosen by
`inference.vllm_adapter`.
"""

from __future__ import annotations

import inspect
import time

from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

from megatron_ppo.inference.answering_executor import AnsweringExecutor


class SleepingExecutor(AnsweringExecutor):
    """The same executor. What differs is how the processes that import this module wait."""


_BUSY_S = 0.05
_BUSY_LOOK_MS = 1
_IDLE_LOOK_MS = 50


def _sleep_at_once() -> None:
    parameter = inspect.signature(SpinCondition.__init__).parameters.get("busy_loop_s")
    if parameter is None or SpinCondition.__init__.__defaults__ != (parameter.default,):
        return  # another version of vLLM, which is left as it is
    SpinCondition.__init__.__defaults__ = (0.0,)
    sleep = SpinCondition.wait

    def wait(self: SpinCondition, timeout_ms: int | None = None) -> None:
        busy = time.monotonic() < self.last_read + _BUSY_S
        look_ms = _BUSY_LOOK_MS if busy else _IDLE_LOOK_MS
        sleep(self, look_ms if timeout_ms is None else min(timeout_ms, look_ms))

    SpinCondition.wait = wait


_sleep_at_once()
