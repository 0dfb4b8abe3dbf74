"""The interleaved pipeline gets microbatches that Megatron's schedule can take, whatever their number."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.mcore.schedule import largest_microbatch, microbatch_group_size


@given(stages=st.integers(2, 9), extra=st.integers(0, 200))
def test_the_group_leaves_no_remainder_smaller_than_the_stages(stages: int, extra: int) -> None:
    microbatches = stages + extra
    size = microbatch_group_size(microbatches, stages=stages)
    assert stages <= size <= microbatches
    assert microbatches % size == 0 or microbatches % size >= stages
    # Activations of a group are alive together: no smaller group would do.
    assert all(0 < microbatches % smaller < stages for smaller in range(stages, size))


@given(
    sequences=st.integers(1, 100),
    wanted=st.integers(1, 100),
    stages=st.integers(1, 8),
    chunks=st.integers(1, 4),
)
def test_microbatches_are_as_large_as_wanted_where_there_are_enough_of_them(
    sequences: int, wanted: int, stages: int, chunks: int
) -> None:
    needed = stages if chunks > 1 else 1
    if sequences < needed:
        with pytest.raises(ValueError, match=f"at least {needed} sequences"):
            largest_microbatch(sequences, wanted=wanted, stages=stages, chunks=chunks)
        return
    size = largest_microbatch(sequences, wanted=wanted, stages=stages, chunks=chunks)
    assert 1 <= size <= wanted
    assert -(-sequences // size) >= needed
    assert size == wanted or sequences // (size + 1) < needed


def test_without_an_interleaved_pipeline_nothing_changes() -> None:
    assert largest_microbatch(3, wanted=8, stages=4, chunks=1) == 3
    assert largest_microbatch(8, wanted=4, stages=4, chunks=1) == 4
