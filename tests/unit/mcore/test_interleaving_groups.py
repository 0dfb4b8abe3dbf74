"""The interleaved pipeline gets microbatches that Megatron's schedule can take, whatever their number."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.mcore.schedule import fewest_microbatches, microbatch_group_size


@given(stages=st.integers(2, 9), extra=st.integers(0, 200))
def test_the_group_leaves_no_remainder_smaller_than_the_stages(stages: int, extra: int) -> None:
    microbatches = stages + extra
    size = microbatch_group_size(microbatches, stages=stages)
    assert stages <= size <= microbatches
    assert microbatches % size == 0 or microbatches % size >= stages
    # Activations of a group are alive together: no smaller group would do.
    assert all(0 < microbatches % smaller < stages for smaller in range(stages, size))


def test_only_an_interleaved_pipeline_needs_a_microbatch_per_stage() -> None:
    assert fewest_microbatches(stages=4, chunks=1) == 1
    assert fewest_microbatches(stages=4, chunks=2) == 4
