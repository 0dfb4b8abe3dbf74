"""Hypothesis strategies for the records and rules of `protocol`."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy, composite

from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import (
    Completion,
    PromptGroup,
    Trajectory,
    logprob_array,
    token_array,
)
from megatron_ppo.testing.fakes import spans_of


@composite
def schedules(
    draw: DrawFn, *, max_age: int = 4, max_start: int = 6, max_lead: int = 12, max_steps: int = 24
) -> AsyncSchedule:
    """Any valid schedule within the bounds: synchronous, plain asynchronous, or with warm-up and banking."""
    age = draw(st.integers(0, max_age))
    start = draw(st.integers(0, max_start))
    lead: int | None = None
    if start > 0:
        lead = draw(st.none() | st.integers(max(age, 1), max_lead))
    return AsyncSchedule(
        max_num_steps=draw(st.integers(1, max_steps)),
        max_trajectory_age_steps=age,
        policy_training_start_step=start,
        warmup_generation_lead_steps=lead,
    )


def float32s(minimum: float, maximum: float) -> SearchStrategy[float]:
    """Floats that a float32 array keeps exactly."""
    return st.floats(minimum, maximum, width=32, allow_nan=False)


@composite
def completions(
    draw: DrawFn, *, min_version: int = 0, max_version: int = 5, max_tokens: int = 8
) -> Completion:
    """A response whose token versions never fall, as in-flight updates produce them."""
    length = draw(st.integers(1, max_tokens))
    version = st.integers(min_version, max_version)
    versions = sorted(draw(st.lists(version, min_size=length, max_size=length)))
    return Completion(
        token_ids=token_array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=length, max_size=length))),
        logprobs=logprob_array(draw(st.lists(float32s(-50.0, 0.0), min_size=length, max_size=length))),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        spans=spans_of(versions),
    )


@composite
def prompt_groups(
    draw: DrawFn,
    *,
    ordinal: int,
    target_step: int,
    num_generations: int,
    opened_at_step: int = 0,
    min_version: int = 0,
    max_version: int = 5,
) -> PromptGroup:
    """A group of `num_generations` responses to one prompt."""
    prompt = token_array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)))
    responses = st.lists(
        completions(min_version=min_version, max_version=max_version),
        min_size=num_generations,
        max_size=num_generations,
    )
    started_at = draw(st.floats(0, 2e9))
    return PromptGroup(
        ordinal=ordinal,
        target_step=target_step,
        opened_at_step=opened_at_step,
        trajectories=tuple(_scored(draw, prompt, completion) for completion in draw(responses)),
        started_at=started_at,
        finished_at=started_at + draw(st.floats(0, 1e5)),
    )


def _scored(draw: DrawFn, prompt: object, completion: Completion) -> Trajectory:
    mask = st.binary(min_size=len(completion.token_ids), max_size=len(completion.token_ids))
    return Trajectory(
        prompt_token_ids=token_array(prompt),
        completion=completion,
        reward=draw(st.floats(-1e6, 1e6)),
        loss_mask=draw(st.none() | mask),
    )
