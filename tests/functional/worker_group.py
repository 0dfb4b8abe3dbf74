"""Worker processes that stay alive for a whole test session and run functions by name.

Importing Megatron-Core costs more than most checks that use it, so tests share one group: a process starts
when the first job needs it, and smaller jobs run on the first ranks. All are forked from one process that has
imported it (`worker_imports`) and has no other thread. A job is a module-level function of an importable module;
its workers call it with the same keyword arguments, and what it returns (picklable) comes back per rank. A job
enters `distributed_runtime` itself: on n ranks it is a job of n under a launcher of n; a job that runs alone has
no launcher.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import multiprocessing
import os
import socket
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
START_TIMEOUT_S = 120.0


class WorkerError(AssertionError):
    """A job failed in a worker; the message has the worker's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    text: str


class WorkerGroup:
    """Processes on one machine, connected as torchrun would connect them; one launcher per job size."""

    def __init__(self) -> None:
        self._ports: dict[int, int] = {}
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []

    @property
    def process_ids(self) -> list[int]:
        """Of the ranks that have been started."""
        return [process.pid or 0 for process in self._processes]

    def run(self, job: str, *, world_size: int = 2, timeout_s: float = 180.0, **arguments: Any) -> list[Any]:
        """The first `world_size` ranks run `module:function`. Returns: their results, rank 0 first.

        Raises: WorkerError if one of them raised, died or did not answer in time. In the last two cases all workers
            end, and the next job starts new ones: what the others still answer would be taken for its results.
        """
        if world_size not in self._ports:
            self._ports[world_size] = _free_port()
        return self._run(job, world_size, self._ports[world_size], timeout_s, arguments)

    def run_alone(self, job: str, *, timeout_s: float = 180.0, **arguments: Any) -> Any:
        """Rank 0 runs `module:function` as a job of one process."""
        return self._run(job, 1, None, timeout_s, arguments)[0]

    def _run(
        self, job: str, world_size: int, port: int | None, timeout_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        while len(self._processes) < world_size:
            self._start()
        for rank in range(world_size):
            launcher = None if port is None else _launcher(rank, world_size, port)
            try:
                self._connections[rank].send((job, launcher, timeout_s, arguments))
            except OSError as error:  # it died after its last answer
                raise self._lost(job, rank) from error
        deadline = time.monotonic() + timeout_s + START_TIMEOUT_S
        results = [self._receive(job, rank, world_size, deadline) for rank in range(world_size)]
        failures = [f"rank {r}:\n{x.text}" for r, x in enumerate(results) if isinstance(x, _Failure)]
        if failures:
            raise WorkerError(f"job {job} failed\n" + "\n".join(failures))
        return results

    def _start(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.functional.worker_imports"])
        mine, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(mine)

    def _receive(self, job: str, rank: int, world_size: int, deadline: float) -> Any:
        connection = self._connections[rank]
        while not connection.poll(0.2):
            # Any of them: the others wait for it in a collective.
            for other, process in enumerate(self._processes[:world_size]):
                if not process.is_alive():
                    raise self._lost(job, other)
            if time.monotonic() > deadline:
                self.close()
                raise WorkerError(f"rank {rank} did not answer job {job} in time; its stack is on stderr")
        try:
            return connection.recv()
        except EOFError as error:
            raise self._lost(job, rank) from error

    def _lost(self, job: str, rank: int) -> WorkerError:
        process = self._processes[rank]
        process.join(timeout=10)  # its end of the connection closes before its exit code is known
        self.close()
        return WorkerError(
            f"rank {rank} died with exit code {process.exitcode} in or before job {job}; stderr has its stack"
        )

    def close(self) -> None:
        """End all processes; a further job starts new ones."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(timeout=10)
        self._processes.clear()
        self._connections.clear()


@contextmanager
def worker_group() -> Iterator[WorkerGroup]:
    """A group that ends with the block."""
    group = WorkerGroup()
    try:
        yield group
    finally:
        group.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _launcher(rank: int, world_size: int, port: int) -> dict[str, str]:
    values = (str(rank), str(world_size), str(rank), "127.0.0.1", str(port))
    return dict(zip(LAUNCHER_VARIABLES, values, strict=True))


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    faulthandler.enable()
    modules_frozen = 0
    while True:
        try:
            job, launcher, timeout_s, arguments = connection.recv()
        except EOFError:
            return
        for name in LAUNCHER_VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(launcher or {})
        # A hang in a collective is otherwise silent for half an hour.
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.stderr)
        try:
            module, function = job.split(":")
            connection.send(getattr(importlib.import_module(module), function)(**arguments))
        except Exception:
            # The border of the process: the test gets the traceback.
            connection.send(_Failure(text=traceback.format_exc()))
        finally:
            faulthandler.cancel_dump_traceback_later()
        if len(sys.modules) > modules_frozen:
            # A job ends with a full collection, for its models are full of cycles. To search the half a million
            # objects of the imported modules as well would take as long as most jobs.
            gc.collect()
            gc.freeze()
            modules_frozen = len(sys.modules)
