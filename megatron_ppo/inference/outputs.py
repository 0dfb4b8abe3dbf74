"""vLLM's request outputs as protocol records. Pure; driven by `inference.engine`."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.outputs import CompletionOutput, RequestOutput

from megatron_ppo.protocol.errors import GenerationError
from megatron_ppo.protocol.trajectory import (
    Completion,
    FinishReason,
    VersionSpan,
    logprob_array,
    token_array,
)

_VERSION_PREFIX = "v"


def version_name(version: int) -> str:
    """The engine's name of a weight version, which it stamps on every token."""
    return f"{_VERSION_PREFIX}{version}"


def completion_of(output: CompletionOutput) -> Completion:
    """Token ids, log-probs and exact version spans of one finished request.

    Raises: GenerationError for an empty, aborted or unstamped response.
    """
    if output.logprobs is None or not output.token_ids:
        raise GenerationError(f"the engine returned no sampled tokens (finish reason {output.finish_reason})")
    return Completion(
        token_ids=token_array(output.token_ids),
        logprobs=logprob_array(
            [entries[token].logprob for token, entries in zip(output.token_ids, output.logprobs, strict=True)]
        ),
        finish_reason=_finish_reason(output.finish_reason),
        spans=_spans(output),
    )


def prompt_logprobs_of(output: RequestOutput, token_ids: Sequence[int]) -> list[float]:
    """Nats, of every token after the first, at temperature 1. Raises: GenerationError when one is missing."""
    entries = output.prompt_logprobs
    if entries is None or len(entries) != len(token_ids):
        raise GenerationError(f"the engine scored {len(entries or ())} of {len(token_ids)} tokens")
    scored = []
    for token, entry in zip(token_ids[1:], entries[1:], strict=True):
        if entry is None:
            raise GenerationError("the engine left out a prompt token's log-prob")
        scored.append(float(entry[token].logprob))
    return scored


def _finish_reason(reason: str | None) -> FinishReason:
    if reason == "stop":
        return "stop"
    if reason == "length":
        return "length"
    raise GenerationError(f'a response ended with "{reason}"; allowed are "stop" and "length"')


def _spans(output: CompletionOutput) -> tuple[VersionSpan, ...]:
    if not output.weight_versions:
        raise GenerationError("the engine returned tokens without a weight version")
    spans = []
    for span in output.weight_versions:
        if not span.version.startswith(_VERSION_PREFIX):
            raise GenerationError(f'tokens carry the weight version "{span.version}", which no refit has set')
        version = int(span.version.removeprefix(_VERSION_PREFIX))
        spans.append(VersionSpan(version=version, start=span.start, end=span.end))
    return tuple(spans)
