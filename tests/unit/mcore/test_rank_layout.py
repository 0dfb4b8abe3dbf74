"""Which ranks form which group."""

from __future__ import annotations

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.mcore.rank_layout import Axis, RankLayout

SIZES = st.integers(min_value=1, max_value=4)


AXES: tuple[Axis, ...] = ("tensor", "context", "data", "pipeline")


@settings(deadline=None)
@given(
    tensor=SIZES, context=SIZES, data=SIZES, pipeline=SIZES, axes=st.sets(st.sampled_from(AXES), min_size=1)
)
def test_each_kind_of_group_covers_every_rank_once(
    tensor: int, context: int, data: int, pipeline: int, axes: set[Axis]
) -> None:
    layout = RankLayout(tensor=tensor, context=context, data=data, pipeline=pipeline)
    groups = layout.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(
        range(tensor * context * data * pipeline)
    )
    assert {len(group) for group in groups} == {math.prod(getattr(layout, axis) for axis in axes)}
    assert all(group == sorted(group) for group in groups)


@settings(deadline=None)
@given(tensor=SIZES, data=SIZES, pipeline=SIZES)
def test_two_ranks_share_at_most_one_kind_of_line(tensor: int, data: int, pipeline: int) -> None:
    # Coordinates are unique, so a tensor and a data group have exactly one rank in common, or none.
    layout = RankLayout(tensor=tensor, data=data, pipeline=pipeline)
    for first in layout.tensor_groups():
        for second in layout.data_groups():
            assert len(set(first) & set(second)) <= 1


def test_tensor_ranks_are_neighbours_and_stages_are_far_apart() -> None:
    layout = RankLayout(tensor=2, data=2, pipeline=2)
    assert layout.tensor_groups() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.data_groups() == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.pipeline_groups() == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.model_groups() == [[0, 1, 4, 5], [2, 3, 6, 7]]


def test_context_ranks_lie_between_tensor_and_data_ranks() -> None:
    # Megatron's order, tp-cp-ep-dp-pp: of 8 ranks with tensor 2, context 2, data 2.
    layout = RankLayout(tensor=2, context=2, data=2, pipeline=1)
    assert layout.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert layout.groups("context") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert layout.groups("data") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert layout.groups("context", "data") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert layout.rank(tensor=1, context=1, data=0, pipeline=0) == 3


def test_only_first_and_last_stage_share_embeddings() -> None:
    assert RankLayout(tensor=1, data=1, pipeline=4).embedding_groups() == [[0, 3]]
    assert RankLayout(tensor=1, data=1, pipeline=1).embedding_groups() == [[0]]


@settings(deadline=None)
@given(tensor=SIZES, copies=SIZES, expert=SIZES, pipeline=SIZES)
def test_expert_groups_cover_every_rank_once_and_refine_the_data_groups(
    tensor: int, copies: int, expert: int, pipeline: int
) -> None:
    layout = RankLayout(tensor=tensor, data=copies * expert, pipeline=pipeline, expert=expert)
    world = list(range(tensor * copies * expert * pipeline))
    for groups, size in (
        (layout.expert_groups(), expert),
        (layout.expert_data_groups(), copies),
        (layout.tensor_expert_groups(), tensor * expert),
        (layout.model_expert_groups(), tensor * expert * pipeline),
    ):
        assert sorted(rank for group in groups for rank in group) == world
        assert {len(group) for group in groups} == {size}
    data = [set(group) for group in layout.data_groups()]
    for fine in layout.expert_groups() + layout.expert_data_groups():
        assert any(set(fine) <= group for group in data)


def test_experts_are_shared_out_over_neighbours_on_the_data_axis() -> None:
    layout = RankLayout(tensor=2, data=4, pipeline=1, expert=2)
    assert layout.expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_data_groups() == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert layout.tensor_expert_groups() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Context ranks hold the same dense parameters, so experts are shared out over them first.
    layout = RankLayout(tensor=2, context=2, data=2, pipeline=1, expert=2)
    assert layout.expert_groups() == [[0, 2], [4, 6], [1, 3], [5, 7]]
    assert layout.expert_groups()[0] == layout.groups("context")[0]
