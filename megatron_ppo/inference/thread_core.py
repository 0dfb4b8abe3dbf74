"""vLLM's EngineCore as a thread of the AsyncLLM process, an option for tests and small CPU runs.

A spawned EngineCore imports torch and vLLM a second time (about 14 CPU seconds and 1 GB); a thread does not.
Sockets, pause, RPC and aborts stay vLLM's own. A thread cannot be killed and cannot outlive a crash of its
process, so fault tests and GPU runs use the stock process.

Owned by `inference.engine`, which enters `engine_core_in_thread` while it builds an AsyncLLM. Invariant:
nothing stays patched after that.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import cloudpickle
from vllm.v1.engine import EngineCoreRequestType
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

logger = logging.getLogger(__name__)


class ThreadProcess:
    """The part of `multiprocessing.Process` that vLLM's process manager uses, run as a daemon thread."""

    # None keeps vLLM's last resort, killing the process tree below a pid, away from this process.
    pid: int | None = None

    def __init__(self, *, target: Callable[..., None], name: str, kwargs: Mapping[str, Any]) -> None:
        del target  # EngineCoreProc.run_engine_core, whose signal handlers are legal in a main thread only
        self.name = name
        self.exitcode: int | None = None
        self._kwargs = dict(kwargs)
        self._core: EngineCoreProc | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._alive_end, self._thread_end = multiprocessing.Pipe(duplex=False)

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the thread ends."""
        return self._alive_end.fileno()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout)

    def is_alive(self) -> bool:
        """Whether the thread still runs."""
        return self._thread.is_alive()

    def terminate(self) -> None:
        """Ask the busy loop to stop, as SIGTERM would."""
        if self._core is not None:
            self._core.shutdown_state = EngineShutdownState.REQUESTED
            self._core.input_queue.put_nowait((EngineCoreRequestType.WAKEUP, None))

    def kill(self) -> None:
        """A thread cannot be killed; same as `terminate`."""
        self.terminate()

    def _run(self) -> None:
        kwargs = self._kwargs
        dp_rank = kwargs.pop("dp_rank", 0)
        kwargs.pop("local_dp_rank", None)
        # A spawned core gets a copy of the config and changes it; sharing the object would change the
        # client's.
        config = pickle.loads(cloudpickle.dumps(kwargs["vllm_config"]))
        kwargs["vllm_config"] = config
        config.parallel_config.data_parallel_index = dp_rank
        config.parallel_config.reconfigure_for_independent_dp_rank()
        exitcode = 1
        try:
            self._core = EngineCoreProc(engine_index=dp_rank, **kwargs)
            self._core.run_busy_loop()
        except SystemExit:
            exitcode = 0
        except BaseException:  # the thread's border: the client learns of it through the sentinel
            logger.exception("the engine core thread ended with an error")
            if self._core is not None:
                self._core._send_engine_dead()
        finally:
            if self._core is not None:
                self._core.shutdown()
            self.exitcode = exitcode
            self._thread_end.close()


class _ThreadContext:
    Process = ThreadProcess

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


@contextmanager
def engine_core_in_thread() -> Iterator[None]:
    """While active, vLLM's process manager starts engine cores as threads (vllm 0.32 and 0.33: same seam)."""
    real = engine_utils.get_mp_context
    engine_utils.get_mp_context = lambda: _ThreadContext(real())
    try:
        yield
    finally:
        engine_utils.get_mp_context = real
