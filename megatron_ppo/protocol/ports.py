"""What the collector, the buffer and the learner expect of the parts around them.

Adapters (vLLM, Ray) and fakes implement these; the contract tests in `tests/` run on both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.trajectory import (
    Completion,
    GroupRequest,
    Prompt,
    PromptGroup,
    Reservation,
    SamplingSettings,
)


class RolloutEngine(Protocol):
    """Samples responses. Implemented by the vLLM engine, by its Ray client, by the replica router and by fakes."""

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """One completion per seed, in order.

        Raises: GenerationError after `deadline_s` or on a failed request; EngineDeadError when the engine is gone.
        """
        ...


class WholeStepEngine(Protocol):
    """Samples the responses of many prompts in one call. Implemented by the vLLM engine, its Ray client and fakes."""

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """Per request one completion per seed, in order.

        Of an engine whose batches are isolated, every bit of the answer is a function of the arguments and the
        weights: the requests are submitted in order, before the first of them starts, and nothing else runs.

        Raises: as `RolloutEngine.generate`; the deadline is that of the whole call.
        """
        ...


class EngineReplica(RolloutEngine, WholeStepEngine, Protocol):
    """One of several engines behind the replica router: it may die, and come back.

    While it waits for a version that other replicas serve already, new requests raise EngineAsideError at once.
    """

    async def serves(self) -> bool:
        """Whether a request would be served now. False while the engine is dead, is being built, or has no weights."""
        ...


class Scorer(Protocol):
    """The reward function. Pure CPU code; called off the event loop."""

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """Reward of one response, in reward units. Raises on anything that it cannot score."""
        ...


class PromptStream(Protocol):
    """Endless and ordinal-addressable: the same ordinal is always the same prompt."""

    def prompt_at(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal` >= 0."""
        ...


class Replay(Protocol):
    """The collector's side of the replay buffer."""

    async def reserve(self, *, limit: int, timeout_s: float) -> list[Reservation]:
        """Up to `limit` slots of the lowest unfinished targets within the open window.

        Waits until at least one slot is free; returns [] after `timeout_s` without one.
        """
        ...

    async def commit(self, group: PromptGroup) -> None:
        """Store a finished group under its reservation. Raises GroupMismatchError if it holds none."""
        ...

    async def note(self, reservation: Reservation, stage: Stage) -> None:
        """Report that a reservation's responses were generated, or scored. Harmless when it is no longer held."""
        ...

    async def release(
        self, reservation: Reservation, *, reason: str, failed: bool = False, others_first: bool = False
    ) -> None:
        """Give a slot back; its ordinal becomes pending again. Harmless when repeated.

        Args:
            failed: the prompt's group failed; the next reservation of the prompt counts it in `failures`.
            others_first: the ordinal is not reserved again before a group of another one was committed.
        """
        ...

    async def drop(self, reservation: Reservation, *, reason: str) -> None:
        """Give a slot back and never try its ordinal again; the reason stays on record. Harmless when repeated."""
        ...

    async def fail(self, message: str) -> None:
        """Report that the collector died of `message`: the learner's present and later waits raise it."""
        ...
