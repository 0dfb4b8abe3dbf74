"""The real inference group around `BaselineEngine`s. Imports no vLLM: it lives in the trainer's process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import ROOT
from megatron_ppo.inference.environment import engine_environment
from megatron_ppo.ray_actors.inference_group import InferenceGroup, RayPendingCalls

ENGINE = "benchmarks.refit_engine.BaselineEngine"
EXTENSION = "benchmarks.refit_worker.BaselineExtension"


class BaselineGroup(InferenceGroup):
    """Replicas on the CPU.

    Args:
        replicas, tensor_parallel_size, engine_kwargs, log_dir, start_timeout_s: of `InferenceGroup`.
    """

    def __init__(
        self,
        *,
        replicas: int,
        tensor_parallel_size: int,
        engine_kwargs: Mapping[str, Any],
        log_dir: Path,
        start_timeout_s: float,
    ) -> None:
        super().__init__(
            replicas=replicas,
            tensor_parallel_size=tensor_parallel_size,
            engine_kwargs={**engine_kwargs, "extra_engine_args": {"worker_extension_cls": EXTENSION}},
            env=engine_environment(device_type="cpu") | {"PYTHONPATH": str(ROOT)},
            log_dir=log_dir,
            start_timeout_s=start_timeout_s,
            engine_target=ENGINE,
        )
        self._workers_each = tensor_parallel_size

    def bench(self, method: str, *args: object) -> RayPendingCalls:
        """Start the workers' method of that name; the result is a list per replica."""
        return self._call_all("bench", method, *args, what=f"the workers' {method}")

    def bench_join(self, method: str, *args: object) -> RayPendingCalls:
        """The same for a method whose first argument is the group rank of its replica's first worker."""
        members = self.table.live()
        return RayPendingCalls(
            f"the workers' {method}",
            members=members,
            refs=[
                self._call(member, "bench", method, 1 + member.replica * self._workers_each, *args)
                for member in members
            ],
            table=self.table,
        )
