"""The records refuse what would train on wrong numbers."""

from __future__ import annotations

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.errors import GroupMismatchError
from megatron_ppo.protocol.trajectory import Completion, PromptGroup, VersionSpan, logprob_array, token_array
from megatron_ppo.testing.fakes import make_group, spans_of
from megatron_ppo.testing.strategies import prompt_groups

no_deadline = settings(deadline=None)  # the machine may be busy; time is not what these tests check


def completion(*, tokens: int, logprobs: int, spans: tuple[VersionSpan, ...]) -> Completion:
    return Completion(
        token_ids=token_array(range(tokens)),
        logprobs=logprob_array([-1.0] * logprobs),
        finish_reason="stop",
        spans=spans,
    )


def span(version: int, start: int, end: int) -> VersionSpan:
    return VersionSpan(version=version, start=start, end=end)


def test_a_response_that_spans_two_versions_reports_both() -> None:
    group = make_group(ordinal=0, target_step=1, versions=(2, 2, 3))
    assert (group.min_version, group.max_version) == (2, 3)
    assert group.trajectories[0].completion.spans == (span(2, 0, 2), span(3, 2, 3))


@pytest.mark.parametrize(
    ("tokens", "logprobs", "spans", "message"),
    [
        (2, 1, (span(0, 0, 2),), "2 tokens but 1 log-probs"),
        (0, 0, (), "completion is empty"),
        (2, 2, (), "cover 0 of 2"),
        (2, 2, (span(0, 0, 1),), "cover 1 of 2"),
        (2, 2, (span(0, 0, 3),), "cover 3 of 2"),
        (2, 2, (span(0, 1, 2),), "do not tile"),
        (2, 2, (span(0, 0, 1), span(1, 0, 2)), "do not tile"),
        (2, 2, (span(0, 0, 0), span(1, 0, 2)), "do not tile"),
    ],
)
def test_a_malformed_response_is_refused(
    tokens: int, logprobs: int, spans: tuple[VersionSpan, ...], message: str
) -> None:
    with pytest.raises(GroupMismatchError, match=message):
        completion(tokens=tokens, logprobs=logprobs, spans=spans)


def test_a_group_without_trajectories_is_refused() -> None:
    with pytest.raises(GroupMismatchError, match="ordinal 3 has no trajectories"):
        PromptGroup(
            ordinal=3, target_step=0, opened_at_step=0, trajectories=(), started_at=0.0, finished_at=0.0
        )


@no_deadline
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_spans_reproduce_the_version_of_every_token(versions: list[int]) -> None:
    rebuilt = [s.version for s in spans_of(versions) for _ in range(s.start, s.end)]
    assert rebuilt == versions


@settings(no_deadline, max_examples=30)
@given(prompt_groups(ordinal=1, target_step=2, num_generations=2))
def test_groups_survive_pickling(group: PromptGroup) -> None:
    assert pickle.loads(pickle.dumps(group)) == group
