"""Every token is in one place of one context rank, and comes back to where it was."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.sequence_map import stream_map, zigzag_order


@st.composite
def cut_sequences(draw: st.DrawFn) -> tuple[list[int], int]:
    """Padded lengths that context ranks can share, and the number of ranks."""
    ranks = draw(st.sampled_from([1, 2, 3, 4, 8]))
    chunks = draw(st.lists(st.integers(min_value=1, max_value=5), min_size=1, max_size=6))
    return [chunk * (2 * ranks if ranks > 1 else 1) for chunk in chunks], ranks


@settings(deadline=None)
@given(cut=cut_sequences())
def test_every_position_is_in_one_slot_of_one_rank(cut: tuple[list[int], int]) -> None:
    lengths, ranks = cut
    stream = stream_map(lengths, ranks=ranks)
    assert stream.order_RN.shape == (ranks, sum(lengths) // ranks)
    assert sorted(stream.order_RN.flatten().tolist()) == list(range(sum(lengths)))
    assert torch.equal(stream.order_RN.flatten()[stream.slot_P], torch.arange(sum(lengths)))
    pairs = list(zip(stream.row_P.tolist(), stream.position_P.tolist(), strict=True))
    assert pairs == [(row, at) for row, length in enumerate(lengths) for at in range(length)]


@settings(deadline=None)
@given(cut=cut_sequences(), data=st.data())
def test_the_slot_of_a_token_holds_the_position_before_it(
    cut: tuple[list[int], int], data: st.DataObject
) -> None:
    lengths, ranks = cut
    stream = stream_map(lengths, ranks=ranks)
    # What each rank computes for its positions, laid end to end as a gather does.
    mine = [(stream.row_P[order], stream.position_P[order]) for order in stream.order_RN]
    rows, positions = (torch.cat(parts) for parts in zip(*mine, strict=True))
    real = [data.draw(st.integers(min_value=1, max_value=length)) for length in lengths]
    width = max(real)
    slot_BT = stream.next_token_slots(width)
    assert slot_BT.shape == (len(lengths), width - 1)
    seen = set()
    for row, length in enumerate(real):
        for token in range(1, length):
            slot = int(slot_BT[row, token - 1])
            assert (int(rows[slot]), int(positions[slot])) == (row, token - 1)
            seen.add(slot)
    # Each counted once.
    assert len(seen) == sum(length - 1 for length in real)


def test_chunks_are_dealt_from_both_ends_of_each_sequence() -> None:
    # Sequences of 8 and 4 positions over 2 ranks: chunks of 2 and of 1.
    assert zigzag_order((8, 4), 2).tolist() == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]


@settings(deadline=None)
@given(cut=cut_sequences())
def test_every_rank_attends_to_the_same_number_of_positions(cut: tuple[list[int], int]) -> None:
    lengths, ranks = cut
    stream = stream_map(lengths, ranks=ranks)
    # A query at position p attends to p + 1 keys.
    work = [int((stream.position_P[order] + 1).sum()) for order in stream.order_RN]
    assert len(set(work)) == 1


@pytest.mark.parametrize(("lengths", "ranks"), [((), 1), ((4, 6), 2), ((0,), 1)])
def test_lengths_that_cannot_be_cut_are_refused(lengths: tuple[int, ...], ranks: int) -> None:
    with pytest.raises(ValueError, match=f"cannot be cut over {ranks} context ranks"):
        stream_map(lengths, ranks=ranks)
