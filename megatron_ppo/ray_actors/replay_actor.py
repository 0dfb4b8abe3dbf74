"""The replay buffer's process: a shell around `ReplayService`. Driven by collector and trainer rank 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.telemetry.heartbeat import Heartbeat
from megatron_ppo.telemetry.process_log import redirect_process_output

FLUSH_PERIOD_S = 1.0
"""How far the ledger's file may lag behind; a reader of a stalled run sees everything after that."""


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
class ReplayActor(ReplayService):
    """`ReplayService` with its methods as remote calls.

    Args:
        log_path: file for everything that this process prints.   heartbeat_path: file of its signs of life.
        ledger_path: file of the ledger's history; None keeps none.   The others: see `PromptGroupBuffer`.
    """

    def __init__(
        self,
        *,
        schedule: AsyncSchedule,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        log_path: str,
        heartbeat_path: str,
        ledger_path: str | None = None,
        takes_in_ordinal_order: bool = False,
    ) -> None:
        redirect_process_output(Path(log_path))
        self._heartbeat = Heartbeat(Path(heartbeat_path), describe=self.brief)
        journal = None if ledger_path is None else LedgerFile(Path(ledger_path))
        super().__init__(
            PromptGroupBuffer(
                schedule=schedule,
                num_prompts_per_step=num_prompts_per_step,
                num_generations_per_prompt=num_generations_per_prompt,
                journal=journal,
                takes_in_ordinal_order=takes_in_ordinal_order,
            ),
            journal=journal,
        )

    async def watch(self) -> None:
        """Never returns; its object ref becomes ready only when this process is gone. Gives the signs of life."""
        async with self._heartbeat.running():
            while True:
                await asyncio.sleep(FLUSH_PERIOD_S)
                await self.flush()
