"""The real engine, whose workers can also be told to measure the baselines of `refit_worker`. Runs in the actor."""

from __future__ import annotations

from typing import Any

from megatron_ppo.inference.engine import VllmEngine


class BaselineEngine(VllmEngine):
    """`VllmEngine` with one more method."""

    async def bench(self, method: str, *args: object) -> list[Any]:
        """Call every worker's method of that name; their results."""
        results: list[Any] = await self._live().collective_rpc(method, args=args)
        return results
