"""A vLLM worker that can be told to fail, for `test_tensor_parallel_engine`. Loaded in the worker's process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor

from megatron_ppo.inference.worker_extension import WorkerExtension


class FailingWorker(WorkerExtension):
    """Mixed into vLLM's worker, reached through `collective_rpc`."""

    def reads_from_another(self) -> bool:
        """Whether this worker reads what another one receives."""
        worker: Any = self
        return worker.weight_transfer_engine._group._reader is not None

    def fail_next_load(self, rank: int, before: str) -> None:
        """Let the next load on the worker of that rank fail in front of the tensor of that name."""
        worker: Any = self
        if worker.parallel_config.rank != rank:
            return
        model = worker.model_runner.get_model()
        load = model.load_weights

        def until_it_fails(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                if name == before:
                    raise ValueError("no room in this worker")
                yield name, tensor

        def fail(weights: Iterable[tuple[str, Tensor]]) -> object:
            model.load_weights = load
            return load(until_it_fails(weights))

        model.load_weights = fail
