"""The replay buffer's process: a shell around `ReplayService`. Driven by collector and trainer rank 0."""

from __future__ import annotations

import asyncio
from pathlib import Path

import ray

from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.telemetry.process_log import redirect_process_output


@ray.remote(num_cpus=0, max_concurrency=1000)  # type: ignore[call-overload, untyped-decorator, unused-ignore]
class ReplayActor(ReplayService):
    """`ReplayService` with its methods as remote calls.

    Args:
        log_path: file for everything that this process prints.   The others: see `PromptGroupBuffer`.
    """

    def __init__(
        self,
        *,
        schedule: AsyncSchedule,
        num_prompts_per_step: int,
        num_generations_per_prompt: int,
        log_path: str,
    ) -> None:
        redirect_process_output(Path(log_path))
        super().__init__(
            PromptGroupBuffer(
                schedule=schedule,
                num_prompts_per_step=num_prompts_per_step,
                num_generations_per_prompt=num_generations_per_prompt,
            )
        )

    async def watch(self) -> None:
        """Never returns; its object ref becomes ready only when this process is gone."""
        await asyncio.Event().wait()
