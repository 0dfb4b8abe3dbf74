"""The Ray actor around one inference engine: names, logs and nothing else. Driven by `inference_group`.

The engine's class comes in as a dotted path, so that this package imports no vLLM.
"""

from __future__ import annotations

import importlib
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_ppo.protocol.imports import no_garbage
from megatron_ppo.protocol.signals import stay_deaf
from megatron_ppo.ray_actors.replica_processes import EngineProcesses, processes_here
from megatron_ppo.telemetry.heartbeat import Heartbeat
from megatron_ppo.telemetry.process_log import redirect_process_output


class EngineActor:
    """Asynchronous actor: any number of `call`s run at once on the engine's event loop.

    Args:
        target: dotted path of the engine's class.
        kwargs: its constructor's arguments.
        log_path: takes everything that this process and its children print.
        heartbeat_path: file of its signs of life; None writes none.
    """

    def __init__(
        self, *, target: str, kwargs: Mapping[str, object], log_path: str, heartbeat_path: str | None = None
    ) -> None:
        stay_deaf()
        # Before the import: vLLM prints while it is imported.
        redirect_process_output(Path(log_path))
        if heartbeat_path is not None:
            Heartbeat(Path(heartbeat_path)).run_in_daemon()
        self._identity = f"{os.getpid()}-{uuid.uuid4().hex}"
        module, _, name = target.rpartition(".")
        with no_garbage():
            engine = getattr(importlib.import_module(module), name)
        self._engine = engine(**kwargs)

    async def identity(self) -> str:
        """Different for every process that has ever been this actor, because Ray starts it again under one handle."""
        return self._identity

    async def processes(self) -> EngineProcesses:
        """This one, the engine's core and its workers."""
        return processes_here(await self._engine.pids())

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Await the engine's method of that name."""
        return await getattr(self._engine, method)(*args, **kwargs)
