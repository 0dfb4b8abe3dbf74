"""A whole manifest over a `BroadcastGroup`, with the work at both ends going on beside the transfer.

The sender fills one half of its staging memory while the other half travels; a receiver hands bucket k to its
caller while bucket k + 1 arrives. Driven by `refit.broadcast` and `inference.worker_extension`.

Invariant: the sender holds `staging_bytes` and what its source holds, never more; a tensor that is larger than a
half travels in pieces. The transport never refers to the source's memory, since it lets go of a buffer only some time
after its broadcast. A receiver holds two buckets besides those whose views are in use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ppo.protocol.weights import Bucket, TensorMeta, WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup, CheckPeers, PendingBroadcast
from megatron_ppo.transport.buckets import next_tensor, pack_bucket, payload_of, views_of_bucket
from megatron_ppo.transport.checksums import agree_on_checksums, checksums, publish_checksums

_HALVES = 2


def manifest_for(
    tensors: tuple[TensorMeta, ...], *, staging_bytes: int, verify_checksum: bool = False
) -> WeightManifest:
    """The manifest whose buckets fit into a half of `staging_bytes`, but for single tensors larger than that."""
    return WeightManifest(
        tensors=tensors, bucket_bytes=staging_bytes // _HALVES, verify_checksum=verify_checksum
    )


def send_stream(
    group: BroadcastGroup,
    manifest: WeightManifest,
    tensors: Iterator[Tensor],
    *,
    check_peers: CheckPeers | None = None,
) -> None:
    """Offer the manifest, then send `tensors` in its order; returns when every receiver has all bytes.

    Raises: RefitError, WaitTimeoutError, or what `check_peers` or the source raises. The group is unusable then.
    """
    group.offer_manifest(manifest.digest(), check_peers=check_peers)
    in_flight: deque[PendingBroadcast] = deque()
    halves = _Halves(manifest, group.device)

    def staged() -> Tensor:
        if len(in_flight) == _HALVES:
            in_flight.popleft().wait(check_peers=check_peers)
        return halves.next()

    for index, bucket in enumerate(manifest.buckets()):
        if bucket.num_bytes <= manifest.bucket_bytes:
            payload = pack_bucket(bucket, tensors, staged())
            _publish_checksums(group, manifest, index, bucket, payload)
            in_flight.append(group.start(payload))
            continue
        payload = payload_of(next_tensor(tensors, bucket.tensors[0]), group.device)
        _publish_checksums(group, manifest, index, bucket, payload)
        for start in range(0, bucket.num_bytes, manifest.bucket_bytes):
            piece = payload[start : start + manifest.bucket_bytes]
            in_flight.append(group.start(staged()[: piece.numel()].copy_(piece)))
        del payload, piece  # before the source gathers its next tensor
    while in_flight:
        in_flight.popleft().wait(check_peers=check_peers)


def receive_stream(group: BroadcastGroup, manifest: WeightManifest) -> Iterator[list[tuple[str, Tensor]]]:
    """Accept the manifest, then yield the named tensors of bucket after bucket; the next one arrives meanwhile.

    The tensors are views of the bucket's memory, which lives as long as they do.
    Raises: RefitError for another manifest, a broken transfer, or a tensor whose checksum is not the sender's;
        WaitTimeoutError.
    """
    group.accept_manifest(manifest.digest())
    buckets = list(manifest.buckets())
    arriving = _Arriving(group, manifest, buckets[0]) if buckets else None
    for index, bucket in enumerate(buckets):
        if arriving is None:
            raise AssertionError("a bucket is yielded before it was started")
        buffer = arriving.wait()
        following = buckets[index + 1] if index + 1 < len(buckets) else None
        arriving = None if following is None else _Arriving(group, manifest, following)
        if manifest.verify_checksum:
            agree_on_checksums(group, index, bucket, checksums(bucket, buffer))
        yield views_of_bucket(bucket, buffer)


def broadcast_sizes(manifest: WeightManifest) -> list[int]:
    """Bytes of every broadcast of the manifest, in order."""
    return [
        min(manifest.bucket_bytes, bucket.num_bytes - start)
        for bucket in manifest.buckets()
        for start in range(0, bucket.num_bytes, manifest.bucket_bytes)
    ]


class _Arriving:
    """A bucket on its way to a receiver, in one piece or several."""

    def __init__(self, group: BroadcastGroup, manifest: WeightManifest, bucket: Bucket) -> None:
        # Fresh memory each time: the caller may keep views of older buckets.
        self._buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=group.device)
        self._pieces = [group.start(piece) for piece in self._buffer.split(manifest.bucket_bytes)]

    def wait(self) -> Tensor:
        """uint8 [bucket.num_bytes]. Raises: as `PendingBroadcast.wait`."""
        for piece in self._pieces:
            piece.wait()
        return self._buffer


class _Halves:
    """Two staging buffers, used in turn; each is as large as the largest broadcast."""

    def __init__(self, manifest: WeightManifest, device: torch.device) -> None:
        sizes = broadcast_sizes(manifest)
        self._buffers = [
            torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in range(min(_HALVES, len(sizes)))
        ]
        self._used = 0

    def next(self) -> Tensor:
        """The half that has been idle longest."""
        self._used += 1
        return self._buffers[self._used % len(self._buffers)]


def _publish_checksums(
    group: BroadcastGroup, manifest: WeightManifest, index: int, bucket: Bucket, payload: Tensor
) -> None:
    if manifest.verify_checksum:
        publish_checksums(group, index, checksums(bucket, payload))
