"""An engine without a model, for tests of the inference group. Imports neither vLLM nor torch."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence

from megatron_ppo.protocol.errors import EngineDeadError, RefitError
from megatron_ppo.protocol.trajectory import (
    Completion,
    GroupRequest,
    SamplingSettings,
    VersionSpan,
    logprob_array,
    token_array,
)


class ToyEngine:
    """Answers with the version that it serves, when it does; `break_core` is what kill -9 does to a real core.

    Args:
        token: that every response consists of.   starts: file that every start appends a line to.
        failing_starts: starts after the first that fail.
    """

    def __init__(self, *, token: int, starts: str, failing_starts: int = 0, **_: object) -> None:
        self._token = token
        self._starts = starts
        self._failing_starts = failing_starts
        self._version: int | None = None
        self._open = False
        self._alive = False

    async def start(self) -> None:
        with open(self._starts, "a") as file:
            file.write(f"{self._token}\n")
        with open(self._starts) as file:
            number = sum(1 for line in file if line == f"{self._token}\n")
        if 1 < number <= 1 + self._failing_starts:
            raise RefitError(f"start {number} fails")
        self._alive = True

    async def watch(self) -> None:
        while True:
            self._live()
            await asyncio.sleep(0.05)

    async def answer(self) -> None:
        self._live()

    async def pids(self) -> tuple[int, ...]:
        return (os.getpid(),)

    async def serves(self) -> bool:
        return self._alive and self._open

    async def break_core(self) -> None:
        self._alive = False

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        for _ in range(sampling.max_new_tokens):
            self._live()
            await asyncio.sleep(0.01)
        assert self._version is not None and self._open, "a request was let in without weights"
        completion = Completion(
            token_ids=token_array([self._token]),
            logprobs=logprob_array([-1.0]),
            finish_reason="stop",
            spans=(VersionSpan(version=self._version, start=0, end=1),),
        )
        return [[completion] * len(request.seeds) for request in requests]

    async def score(self, sequences: Sequence[Sequence[int]], *, deadline_s: float) -> list[list[float]]:
        self._live()
        return [[-float(self._token)] * (len(sequence) - 1) for sequence in sequences]

    async def join_refit_group(self, spec: object) -> None:
        self._live()

    async def begin_refit(self, *, mode: str, timeout_s: float) -> None:
        self._live()
        self._open = False

    async def receive_weights(self, manifest: object) -> None:
        self._live()

    async def commit_refit(self, *, version: int, recompute_kv: bool) -> None:
        self._live()
        self._version = version

    async def end_refit(self) -> None:
        self._live()
        self._open = True

    async def shutdown(self) -> None:
        self._alive = False

    def _live(self) -> None:
        if not self._alive:
            raise EngineDeadError("the engine core died")
