"""Buckets and digest of a manifest: both ends of a refit must cut the same bytes."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.protocol.weights import (
    ALIGNMENT_BYTES,
    DTYPE_BYTES,
    TensorMeta,
    WeightManifest,
    largest_layer_bytes,
)

_metas = st.builds(
    TensorMeta,
    name=st.text("abc.", min_size=1, max_size=8),
    shape=st.lists(st.integers(1, 40), max_size=3).map(tuple),
    dtype=st.sampled_from(sorted(DTYPE_BYTES)),
)
_manifests = st.builds(
    WeightManifest,
    tensors=st.lists(_metas, max_size=20).map(tuple),
    bucket_bytes=st.integers(1, 5000),
)


@given(_manifests)
def test_buckets_hold_every_tensor_once_and_in_order(manifest: WeightManifest):
    assert tuple(t for bucket in manifest.buckets() for t in bucket.tensors) == manifest.tensors


@given(_manifests)
def test_tensors_of_a_bucket_are_aligned_do_not_overlap_and_fit(manifest: WeightManifest):
    for bucket in manifest.buckets():
        end = 0
        for tensor, offset in zip(bucket.tensors, bucket.offsets, strict=True):
            assert offset % ALIGNMENT_BYTES == 0
            assert end <= offset < end + ALIGNMENT_BYTES
            end = offset + tensor.num_bytes
        assert bucket.num_bytes == end
        assert end <= manifest.bucket_bytes or len(bucket.tensors) == 1


@given(_manifests)
def test_a_bucket_is_closed_only_when_the_next_tensor_does_not_fit_or_one_of_the_two_travels_alone(
    manifest: WeightManifest,
):
    buckets = list(manifest.buckets())
    for bucket, following in pairwise(buckets):
        start = -(-bucket.num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        alone = any(each.tensors[0].num_bytes * 4 >= manifest.bucket_bytes for each in (bucket, following))
        assert alone or start + following.tensors[0].num_bytes > manifest.bucket_bytes


@given(_manifests)
def test_a_tensor_of_a_quarter_of_a_bucket_is_alone_in_its_own(manifest: WeightManifest):
    for bucket in manifest.buckets():
        if any(tensor.num_bytes * 4 >= manifest.bucket_bytes for tensor in bucket.tensors):
            assert len(bucket.tensors) == 1


def test_bytes_of_a_tensor_count_its_dtype():
    assert TensorMeta(name="w", shape=(3, 5), dtype="float32").num_bytes == 60
    assert TensorMeta(name="w", shape=(3, 5), dtype="bfloat16").num_bytes == 30
    assert TensorMeta(name="scalar", shape=(), dtype="float16").num_bytes == 2


def test_the_largest_layer_may_be_one_of_the_decoder_or_a_tensor_outside_of_it():
    def meta(name: str, size: int) -> TensorMeta:
        return TensorMeta(name=name, shape=(size,), dtype="float32")

    layers = [
        meta(f"model.layers.{layer}.{part}", size) for layer, size in ((1, 5), (11, 7)) for part in "ab"
    ]
    assert largest_layer_bytes([meta("model.embed", 13), *layers]) == 2 * 7 * 4
    assert largest_layer_bytes([*layers, meta("model.norm", 15), meta("lm_head", 16)]) == 16 * 4
    assert largest_layer_bytes([]) == 0


def test_known_buckets_of_a_small_manifest():
    tensors = tuple(
        TensorMeta(name=name, shape=(size,), dtype="float32")
        for name, size in [("a", 1), ("b", 5), ("c", 100)]
    )
    first, second = WeightManifest(tensors=tensors, bucket_bytes=96).buckets()
    assert (first.offsets, first.num_bytes) == ((0, 16), 36)
    assert (second.offsets, second.num_bytes) == ((0,), 400)


def test_the_digest_tells_apart_whatever_changes_the_bytes():
    meta = TensorMeta(name="a", shape=(2, 3), dtype="float32")
    manifest = WeightManifest(tensors=(meta, replace(meta, name="b")), bucket_bytes=64)
    others = [
        replace(manifest, bucket_bytes=65),
        replace(manifest, tensors=manifest.tensors[:1]),
        replace(manifest, tensors=manifest.tensors[::-1]),
        replace(manifest, tensors=(replace(meta, shape=(3, 2)), manifest.tensors[1])),
        replace(manifest, tensors=(replace(meta, dtype="bfloat16"), manifest.tensors[1])),
    ]
    digests = {m.digest() for m in [manifest, *others]}
    assert len(digests) == 6
    assert manifest.digest() == replace(manifest).digest()
