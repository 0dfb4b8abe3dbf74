"""What a task is: its prompts, the right answers, and which verifier scores it.

Driven by the app (validation, stop tokens), the collector (prompts) and `warm_start` (demonstrations).
Invariant: a task is a pure function of its keyword arguments, so that every process builds the same one.
Imports no torch and no transformers: the collector's process stays small.
"""

from __future__ import annotations

import hashlib
import json
import random
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.trajectory import Prompt

# The right response, EOS included, as decimal token ids; verifiers that compare ids read it.
ANSWER_TOKEN_IDS = "answer_token_ids"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskExample:
    """One prompt before it has a place in the stream.

    Attributes:
        token_ids: prompt tokens, BOS included where the tokenizer uses one.
        text: the same prompt as text.   answer: the right answer as text.
        metadata: what the verifier needs beyond `answer`.
    """

    token_ids: array[int]
    text: str
    answer: str
    metadata: dict[str, str] = field(default_factory=dict)

    def prompt(self, ordinal: int) -> Prompt:
        """This example at `ordinal` of a stream."""
        return Prompt(
            ordinal=ordinal,
            token_ids=self.token_ids,
            text=self.text,
            answer=self.answer,
            metadata=self.metadata,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardSpec:
    """Which verifier scores the task: a dotted class name and its keyword arguments.

    A name and not the class, because `data` and `rewards` do not import each other, and because the
    verifier is built in another process.
    """

    target: str
    kwargs: Mapping[str, str | int | float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSpec:
    """A task with all of its prompts.

    Attributes:
        train, validation: examples, disjoint in `text`.
        reward: the verifier that this task was made for.
        pad_token_id, eos_token_id: of the tokenizer.
        stop_token_ids: tokens besides EOS that end a response; they count as part of it. For the engine.
        max_response_tokens: length of the longest right answer, its EOS or stop token included.
        demonstrate: imperfect answer (text without EOS) that the warm start imitates; None for tasks that
            start from a pretrained model.
    """

    name: str
    train: tuple[TaskExample, ...]
    validation: tuple[TaskExample, ...]
    reward: RewardSpec
    pad_token_id: int
    eos_token_id: int
    stop_token_ids: tuple[int, ...] = ()
    max_response_tokens: int
    demonstrate: Callable[[random.Random, TaskExample], str] | None = None

    def __post_init__(self) -> None:
        if not self.train or not self.validation:
            raise ConfigError(
                f"task {self.name!r} has {len(self.train)} training and {len(self.validation)} validation "
                "prompts; both need at least 1"
            )
        shared = {e.text for e in self.train} & {e.text for e in self.validation}
        if shared:
            raise ConfigError(
                f"task {self.name!r}: {len(shared)} validation prompts are also training prompts, "
                f"e.g. {min(shared)!r}"
            )

    @property
    def max_prompt_tokens(self) -> int:
        """Length of the longest prompt, in tokens."""
        return max(len(e.token_ids) for e in (*self.train, *self.validation))

    def check_prompt_lengths(self, allowed: int) -> None:
        """Raises: ConfigError for a prompt of more than `allowed` tokens, which the engine was not sized for.

        The engine would not refuse it but cut its responses short.
        """
        if self.max_prompt_tokens > allowed:
            raise ConfigError(
                f"data.max_prompt_tokens: got {allowed}; must be >= {self.max_prompt_tokens}, the longest prompt "
                f"of task {self.name!r}"
            )

    def validation_prompts(self, *, limit: int | None = None) -> list[Prompt]:
        """The first `limit` validation prompts (all by default); their ordinals count from 0."""
        return [e.prompt(index) for index, e in enumerate(self.validation[:limit])]


def digest_examples(examples: Iterable[TaskExample]) -> str:
    """16 hex digits that change with any token, answer or place of an example.

    Hence with the data, with the template that makes prompts of it, and with the tokenizer.
    """
    digest = hashlib.sha256()
    for example in examples:
        facts = [list(example.token_ids), example.text, example.answer, example.metadata]
        digest.update(json.dumps(facts, sort_keys=True).encode() + b"\n")
    return digest.hexdigest()[:16]
