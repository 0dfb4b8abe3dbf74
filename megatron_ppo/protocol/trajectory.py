"""The records that travel from engine to learner. Frozen; lengths are checked once, at construction.

Token ids are the truth end to end: nothing here is ever decoded and tokenised again. Token ids and
log-probs are stdlib arrays, which pickle compactly and turn into tensors without a Python loop.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import Literal

from megatron_ppo.protocol.errors import GroupMismatchError

FinishReason = Literal["stop", "length"]


def token_array(ids: object) -> array[int]:
    """Token ids as a signed 64-bit array, the dtype that torch embeddings take."""
    return array("q", ids)  # type: ignore[call-overload,no-any-return]


def logprob_array(logprobs: object) -> array[float]:
    """Log-probs in nats as a float32 array, the precision at which both sides compute them."""
    return array("f", logprobs)  # type: ignore[call-overload,no-any-return]


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One prompt of the endless stream.

    Attributes:
        ordinal: position in the endless stream, counted from 0; the prompt's identity in the ledger.
        token_ids: prompt tokens, BOS included where the tokenizer uses one.
        text: the same prompt as text, for rewards, logs and messages.
        answer: what the reward function compares with.
        metadata: further fields of the task, strings only.
    """

    ordinal: int
    token_ids: array[int]
    text: str
    answer: str
    metadata: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What an engine is asked for one prompt.

    Attributes:
        prompt_token_ids: [P] tokens.   seeds: one per response that is wanted, each in [0, 2**63).
    """

    prompt_token_ids: tuple[int, ...]
    seeds: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSettings:
    """How the engine samples. `temperature` 0 is greedy.

    `top_p` and `top_k` (0 = off) exist for validation only: truncation biases importance weights.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens [start, end) were sampled by weights of `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One sampled response as the engine returns it.

    Attributes:
        token_ids: response tokens, EOS included when it was sampled.
        logprobs: nats, of each response token under the distribution that it was sampled from.
        spans: which weight version sampled which tokens; they tile [0, len(token_ids)).
    """

    token_ids: array[int]
    logprobs: array[float]
    finish_reason: FinishReason
    spans: tuple[VersionSpan, ...]

    def __post_init__(self) -> None:
        if len(self.token_ids) != len(self.logprobs):
            raise GroupMismatchError(
                f"completion has {len(self.token_ids)} tokens but {len(self.logprobs)} log-probs"
            )
        if not self.token_ids:
            raise GroupMismatchError("completion is empty; a failed generation is an error, never a response")
        position = 0
        for span in self.spans:
            if span.start != position or span.end <= span.start:
                raise GroupMismatchError(f"version spans do not tile the response: {self.spans}")
            position = span.end
        if position != len(self.token_ids):
            raise GroupMismatchError(
                f"version spans cover {position} of {len(self.token_ids)} response tokens: {self.spans}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """A scored response to a prompt.

    Attributes:
        prompt_token_ids: [P] tokens.   completion: the sampled response.   reward: reward units.
        loss_mask: None when every response token is the policy's own; otherwise one byte per response
            token, 1 = sampled by the policy (0: tool or user turns, never trained on).
    """

    prompt_token_ids: array[int]
    completion: Completion
    reward: float
    loss_mask: bytes | None = None

    @property
    def min_version(self) -> int:
        """Oldest weight version that sampled a token of this response."""
        return min(span.version for span in self.completion.spans)

    @property
    def max_version(self) -> int:
        """Newest weight version that sampled a token of this response."""
        return max(span.version for span in self.completion.spans)

    @property
    def num_tokens(self) -> int:
        """Prompt plus response tokens."""
        return len(self.prompt_token_ids) + len(self.completion.token_ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """The right and duty to fill one slot of `target_step` with the prompt `ordinal`.

    Attributes:
        opened_at_step: learner step that was announced with the window open at reservation time.
        failures: groups of this prompt that failed so far, earlier attempts at the run included.
    """

    ordinal: int
    target_step: int
    opened_at_step: int
    failures: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptGroup:
    """One prompt with its G trajectories; the unit of collection and replay.

    Attributes:
        started_at, finished_at: seconds since the epoch, of dispatch and of the last token.
    """

    ordinal: int
    target_step: int
    opened_at_step: int
    trajectories: tuple[Trajectory, ...]
    started_at: float
    finished_at: float

    def __post_init__(self) -> None:
        if not self.trajectories:
            raise GroupMismatchError(f"prompt group of ordinal {self.ordinal} has no trajectories")

    @property
    def min_version(self) -> int:
        """Oldest weight version that sampled a token of this group."""
        return min(t.min_version for t in self.trajectories)

    @property
    def max_version(self) -> int:
        """Newest weight version that sampled a token of this group."""
        return max(t.max_version for t in self.trajectories)
