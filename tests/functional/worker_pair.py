"""Two worker processes that stay alive for a whole test session and run functions by name.

Importing Megatron-Core costs more than most checks that use it, so tests share one pair. A job is a
module-level function of an importable module; both workers call it with the same keyword arguments, and what
it returns (picklable) comes back per rank. A job enters `distributed_runtime` itself: on both ranks it is a
job of two, with `alone=True` only rank 0 runs it, as a job of one.
"""

from __future__ import annotations

import faulthandler
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


class WorkerPair:
    """Two processes on one machine, connected as torchrun would connect them."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._port = _free_port()
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for rank in range(2):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(mine)

    def run(self, job: str, *, timeout_s: float = 180.0, **arguments: Any) -> list[Any]:
        """Both ranks run `module:function`. Returns: the results of rank 0 and rank 1.

        Raises: WorkerError if one of them raised, died or did not answer in time; the pair is unusable
        afterwards
            in the last two cases.
        """
        return self._run(job, ranks=(0, 1), timeout_s=timeout_s, arguments=arguments)

    def run_alone(self, job: str, *, timeout_s: float = 180.0, **arguments: Any) -> Any:
        """Rank 0 runs `module:function` as a job of one process."""
        return self._run(job, ranks=(0,), timeout_s=timeout_s, arguments=arguments)[0]

    def _run(
        self, job: str, *, ranks: tuple[int, ...], timeout_s: float, arguments: dict[str, Any]
    ) -> list[Any]:
        for rank in ranks:
            self._connections[rank].send((job, len(ranks) == 1, timeout_s, arguments))
        deadline = time.monotonic() + timeout_s + START_TIMEOUT_S
        results = [self._receive(job, rank, deadline) for rank in ranks]
        failures = [
            f"rank {r}:\n{x.text}" for r, x in zip(ranks, results, strict=True) if isinstance(x, _Failure)
        ]
        if failures:
            raise WorkerError(f"job {job} failed\n" + "\n".join(failures))
        return results

    def _receive(self, job: str, rank: int, deadline: float) -> Any:
        connection, process = self._connections[rank], self._processes[rank]
        while not connection.poll(0.2):
            if not process.is_alive():
                raise WorkerError(f"rank {rank} died with exit code {process.exitcode} in job {job}")
            if time.monotonic() > deadline:
                self.close()
                raise WorkerError(f"rank {rank} did not answer job {job} in time; its stack is on stderr")
        return connection.recv()

    def close(self) -> None:
        """End both processes."""
        for process in self._processes:
            if process.is_alive():
                process.terminate()
        for process in self._processes:
            process.join(timeout=10)


@contextmanager
def worker_pair() -> Iterator[WorkerPair]:
    """A pair that ends with the block."""
    pair = WorkerPair()
    try:
        yield pair
    finally:
        pair.close()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _serve(rank: int, port: int, connection: Connection) -> None:
    launcher = dict(zip(LAUNCHER_VARIABLES, (str(rank), "2", str(rank), "127.0.0.1", str(port)), strict=True))
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, alone, timeout_s, arguments = connection.recv()
        except EOFError:
            return
        os.environ.update(launcher)
        if alone:
            for name in LAUNCHER_VARIABLES:
                os.environ.pop(name)
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
