"""The 64-bit checksum of bytes."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.protocol.weights import WeightManifest
from megatron_ppo.transport.buckets import pack_bucket
from megatron_ppo.transport.checksums import checksum, checksums
from tests.weight_metadata import tensor_meta

# More than two blocks of 2^17 words, and an end that is no whole word.
LONG = 3 * 2**20 + 5


def _bytes(size: int) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))


@settings(deadline=None, max_examples=40)
@given(size=st.sampled_from([1, 7, 8, 9, 100, LONG]), data=st.data())
def test_any_flipped_bit_changes_the_checksum(size: int, data: st.DataObject):
    payload = _bytes(size)
    before = checksum(payload)
    position, bit = data.draw(st.integers(0, size - 1)), data.draw(st.integers(0, 7))
    payload[position] ^= 1 << bit
    assert checksum(payload) != before
    payload[position] ^= 1 << bit
    assert checksum(payload) == before
    assert 0 <= before < 2**64


def test_words_that_change_places_change_the_checksum_within_and_across_blocks():
    payload = _bytes(LONG)
    before = checksum(payload)
    for one, other in ((0, 8), (16, 2**20 + 16), (0, 2**21)):
        swapped = payload.clone()
        swapped[one : one + 8], swapped[other : other + 8] = (
            payload[other : other + 8],
            payload[one : one + 8],
        )
        assert checksum(swapped) != before


def test_the_gaps_of_a_bucket_do_not_count():
    tensors = {"a": torch.randn(3), "b": torch.randn(5).to(torch.bfloat16), "c": torch.empty(0)}
    manifest = WeightManifest(
        tensors=tuple(tensor_meta(name, tensor) for name, tensor in tensors.items()), bucket_bytes=80
    )
    [bucket] = manifest.buckets()
    filled = [
        checksums(
            bucket, pack_bucket(bucket, iter(tensors.values()), torch.full((80,), gap, dtype=torch.uint8))
        )
        for gap in (0, 255)
    ]
    assert filled[0] == filled[1]
    assert len(set(filled[0])) == 3
