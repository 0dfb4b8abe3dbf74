"""The baselines of a refit, measured in the engine's worker: a raw broadcast, the engine's own reload, and the
package's transport without an engine behind it.

Loaded by vLLM as the worker extension of the benchmark's engine; `refit_engine` calls it. The first two use none of
the package's transport or receiver, so that their cost is in the refit and not in the baselines.
"""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from benchmarks.raw_broadcast import buffers, gloo_group, raw_broadcast
from megatron_ppo.inference.worker_extension import WorkerExtension
from megatron_ppo.protocol.weights import RefitGroupSpec, TensorMeta, WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup
from megatron_ppo.transport.streams import receive_stream


class BaselineExtension(WorkerExtension):
    """Mixed into vLLM's worker, reached through `collective_rpc`."""

    _raw: tuple[Any, list[torch.Tensor]] | None = None
    _stream: tuple[BroadcastGroup, WeightManifest] | None = None
    _tensors: dict[str, torch.Tensor] | None = None

    def bench_join(
        self, first_rank: int, members: int, port: int, sizes: list[int], timeout_s: float
    ) -> None:
        """Join a bare gloo group and allocate the buffers once."""
        store = dist.TCPStore("127.0.0.1", port, None, is_master=False, timeout=timedelta(seconds=timeout_s))
        group = gloo_group(store, first_rank + self._rank(), members, timeout_s)
        self._raw = group, buffers(sizes)

    def bench_receive(self) -> float:
        """Take part in one raw broadcast; seconds."""
        if self._raw is None:
            raise RuntimeError("bench_join comes first")
        return raw_broadcast(*self._raw)

    def bench_join_stream(self, first_rank: int, spec: dict[str, Any], manifest: dict[str, Any]) -> None:
        """Join a group of the package's transport beside the engine's own; both arguments by their fields."""
        tensors = tuple(
            TensorMeta(name=meta["name"], shape=tuple(meta["shape"]), dtype=meta["dtype"])
            for meta in manifest["tensors"]
        )
        group = BroadcastGroup(
            RefitGroupSpec(**spec), rank=first_rank + self._rank(), device=torch.device("cpu")
        )
        self._stream = group, WeightManifest(**{**manifest, "tensors": tensors})

    def bench_receive_stream(self) -> None:
        """Take part in one transfer and throw the tensors away."""
        if self._stream is None:
            raise RuntimeError("bench_join_stream comes first")
        for _ in receive_stream(*self._stream):
            pass

    def bench_reload(self, folder: str) -> float:
        """Load the folder's tensors, in memory since the first call, through vLLM's layerwise reload; seconds."""
        if self._tensors is None:
            self._tensors = load_file(Path(folder) / "model.safetensors")
        worker: Any = self
        started = time.perf_counter()
        with set_current_vllm_config(worker.vllm_config):
            model = worker.model_runner.get_model()
            initialize_layerwise_reload(model)
            model.load_weights(iter(self._tensors.items()))
            finalize_layerwise_reload(model, worker.model_config)
        return time.perf_counter() - started

    def _rank(self) -> int:
        worker: Any = self
        rank: int = worker.parallel_config.rank
        return rank
