"""The real inference group around one `BaselineEngine`. Imports no vLLM: it lives in the trainer's process."""

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
    """One replica on the CPU.

    Args:
        engine_kwargs: of `VllmEngine`.   log_dir: for the engine's log.   start_timeout_s: longest start.
    """

    def __init__(self, *, engine_kwargs: Mapping[str, Any], log_dir: Path, start_timeout_s: float) -> None:
        super().__init__(
            replicas=1,
            engine_kwargs={**engine_kwargs, "extra_engine_args": {"worker_extension_cls": EXTENSION}},
            env=engine_environment(device_type="cpu") | {"PYTHONPATH": str(ROOT)},
            log_dir=log_dir,
            start_timeout_s=start_timeout_s,
            engine_target=ENGINE,
        )

    def bench(self, method: str, *args: object) -> RayPendingCalls:
        """Start the worker's method of that name; the result is a list of one."""
        return self._call_all("bench", method, *args, what=f"the worker's {method}")
