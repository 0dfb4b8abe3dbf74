"""A whole manifest over a `BroadcastGroup`, with the work at both ends going on beside the transfer.

The sender prepares a bucket while the one before it travels; a receiver hands bucket k to its
caller while bucket k + 1 arrives. Driven by `refit.broadcast` and `inference.worker_extension`.

Large tensors are sent from where they lie, small ones are packed into the sender's staging memory first.

Invariant: the sender holds `staging_bytes` and, of what the source has made, at most one tensor that travels and the
next one, which together are no larger than a layer (or than the largest tensor outside of the layers); gloo's thread
lets go of one more a moment after its broadcast. A tensor that is larger than a half of the staging memory travels in
pieces. A receiver holds three buckets besides those whose views are in use, and one that passes them on a few more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ppo.protocol.weights import Bucket, TensorMeta, WeightManifest, largest_layer_bytes
from megatron_ppo.transport.broadcast_group import BroadcastGroup, CheckPeers, PendingBroadcast
from megatron_ppo.transport.buckets import next_tensor, pack_bucket, payload_of, views_of_bucket
from megatron_ppo.transport.checksums import agree_on_checksums, checksums, publish_checksums

_HALVES = 2
_AHEAD = 2
"""Buckets that arrive while a receiver's caller works on one. Loading takes unequal times: a layer is finished at its
last tensor."""


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
    """Offer the manifest, and send `tensors` in its order when all receivers have accepted it.

    Returns when all bytes are out of the sender's memory; a receiver that reads what another one has got may be a few
    buckets behind. The first bucket is prepared while the receivers get ready.
    Raises: RefitError, WaitTimeoutError, or what `check_peers` or the source raises. The group is unusable then.
    """
    in_flight: deque[PendingBroadcast] = deque()
    halves = _Halves(manifest, group.device)
    layer_bytes = largest_layer_bytes(manifest.tensors)
    travelling_bytes = 0  # of the tensor that was started last, if it keeps memory of its own

    def wait_for_all_but(count: int) -> None:
        while len(in_flight) > count:
            in_flight.popleft().wait(check_peers=check_peers)

    for index, bucket in enumerate(manifest.buckets()):
        wait_for_all_but(1)  # what travels keeps its memory, and the source now needs some for the next
        if travelling_bytes + max(meta.num_bytes for meta in bucket.tensors) > layer_bytes:
            wait_for_all_but(0)  # embeddings or a head, beside which there is no room for another matrix
        if manifest.travels_alone(bucket.tensors[0]):
            payload = _payload(next_tensor(tensors, bucket.tensors[0]), group.device, halves)
        else:
            payload = pack_bucket(bucket, tensors, halves.next())
        travelling_bytes = 0 if halves.owns(payload) else payload.numel()
        if index == 0:
            group.offer_manifest(manifest.digest(), check_peers=check_peers)
        _publish_checksums(group, manifest, index, bucket, payload)
        for piece in torch.split(payload, manifest.bucket_bytes):
            wait_for_all_but(1)
            in_flight.append(group.start(piece))
        del payload, piece
    wait_for_all_but(0)


def _payload(tensor: Tensor, device: torch.device, halves: _Halves) -> Tensor:
    """The tensor's bytes: its own memory where they lie there in order, else a copy, in staging if that is enough."""
    if (tensor.is_contiguous() and tensor.device.type == device.type) or not halves.hold(tensor):
        return payload_of(tensor, device)
    staged = halves.next()[: tensor.nbytes]
    staged.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return staged


def receive_stream(group: BroadcastGroup, manifest: WeightManifest) -> Iterator[list[tuple[str, Tensor]]]:
    """Accept the manifest, then yield the named tensors of bucket after bucket; the next one arrives meanwhile.

    The tensors are views of the bucket's memory, which lives as long as they do.
    Raises: RefitError for another manifest, a broken transfer, or a tensor whose checksum is not the sender's;
        WaitTimeoutError.
    """
    group.accept_manifest(manifest.digest())
    buckets = list(manifest.buckets())
    arriving: deque[_Arriving] = deque()
    started = iter(buckets)
    for index, bucket in enumerate(buckets):
        while len(arriving) <= _AHEAD and (following := next(started, None)) is not None:
            arriving.append(_Arriving(group, manifest, following))
        buffer = arriving.popleft().wait()
        if manifest.verify_checksum:
            agree_on_checksums(group, index, bucket, checksums(bucket, buffer))
        yield views_of_bucket(bucket, buffer)
    group.await_readers()


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
        self._pieces = [group.start(piece) for piece in torch.split(self._buffer, manifest.bucket_bytes)]

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

    def hold(self, tensor: Tensor) -> bool:
        """Whether a half is large enough for the tensor."""
        return bool(self._buffers) and tensor.nbytes <= self._buffers[0].numel()

    def owns(self, payload: Tensor) -> bool:
        """Whether it lies in one of the halves."""
        return any(payload.data_ptr() == buffer.data_ptr() for buffer in self._buffers)

    def next(self) -> Tensor:
        """The half that has been idle longest."""
        self._used += 1
        return self._buffers[self._used % len(self._buffers)]


def _publish_checksums(
    group: BroadcastGroup, manifest: WeightManifest, index: int, bucket: Bucket, payload: Tensor
) -> None:
    if manifest.verify_checksum:
        publish_checksums(group, index, checksums(bucket, payload))
