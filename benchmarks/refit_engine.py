"""The real engine, whose worker can also be told to measure the baselines of `refit_worker`. Runs in the actor."""

from __future__ import annotations

from typing import Any

from megatron_ppo.inference.engine import VllmEngine


class BaselineEngine(VllmEngine):
    """`VllmEngine` with one more method."""

    async def bench(self, method: str, *args: object) -> Any:
        """Call the worker's method of that name; the result of the only worker."""
        [result] = await self._live().collective_rpc(method, args=args)
        return result
