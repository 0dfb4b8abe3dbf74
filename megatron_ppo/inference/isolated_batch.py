"""One batch that runs alone in vLLM, so that every bit of its answers is a function of the batch and the weights.

A processor's sums depend on how many rows a matrix has and where a row stands in it. Which requests the core schedules
together is normally a matter of timing: of the moment at which each arrives. Here the core is paused while they arrive,
one after the other, and starts with all of them, in their order, with nothing cached.

Driven by `inference.engine`, which lets nothing else in meanwhile. Invariant: afterwards the core is not paused and
holds none of the requests, whatever happened.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_ppo.inference.vllm_adapter import finished_output, submit

T = TypeVar("T")


class WhileAlive(Protocol):
    """Awaits a call that vLLM never answers when its core dies. Raises: EngineDeadError then."""

    async def __call__(self, call: Coroutine[Any, Any, T], /) -> T: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One request as vLLM takes it."""

    request_id: str
    prompt: TokensPrompt
    params: SamplingParams


async def isolated_batch(
    llm: AsyncLLM, submissions: Sequence[Submission], *, while_alive: WhileAlive
) -> list[RequestOutput]:
    """The finished outputs, in order. Raises: what vLLM raises; all requests are aborted then, and when cancelled."""
    complete = False
    try:
        # Nothing runs, so "keep" keeps nothing; the cached prefixes of earlier batches go.
        await while_alive(llm.pause_generation(mode="keep", clear_cache=True))
        answers = [await submit(llm, s.request_id, s.prompt, s.params) for s in submissions]
        await while_alive(llm.resume_generation())
        outputs = [await while_alive(finished_output(answer)) for answer in answers]
        complete = True
        return outputs
    finally:
        if not complete and not llm.errored:
            await llm.abort([submission.request_id for submission in submissions])
            await llm.resume_generation()
