"""A 64-bit checksum of every tensor as sent, compared with the one of the same tensor as received.

Driven by `transport.streams` where the manifest asks for it. The sender publishes the checksums of a bucket before
the bucket travels; each receiver compares before it loads anything of it.

Invariant: a change within one aligned 8-byte word always changes the checksum, because every word is multiplied by
an odd number modulo 2^64; any other change goes unseen with probability about 2^-63.
"""

from __future__ import annotations

import functools
import json

import torch
from torch import Tensor

from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.weights import Bucket
from megatron_ppo.transport.broadcast_group import BroadcastGroup

_WORD_BYTES = 8
# Bounds the scratch memory of the products to 1 MiB, and stays in a core's cache.
_BLOCK_WORDS = 2**17
_BLOCK_FACTOR = -7046029254386353131  # 0x9E3779B97F4A7C15, odd
_MODULUS = 2**64


def checksums(bucket: Bucket, buffer: Tensor) -> list[int]:
    """One checksum in [0, 2^64) per tensor of the bucket.

    Args:
        buffer: uint8 [bucket.num_bytes]; its tensors are aligned to 16 bytes, see `protocol.weights`.
    """
    return [
        checksum(buffer[offset : offset + meta.num_bytes])
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True)
    ]


def checksum(payload: Tensor) -> int:
    """The checksum in [0, 2^64) of uint8 [n] bytes whose start is aligned to 8 bytes."""
    whole = payload.numel() // _WORD_BYTES * _WORD_BYTES
    total = torch.zeros((), dtype=torch.int64, device=payload.device)
    factors = _factors(payload.device)
    for block in payload[:whole].view(torch.int64).split(_BLOCK_WORDS) if whole else ():
        total = total * _BLOCK_FACTOR + (block * factors[: block.numel()]).sum()
    if whole < payload.numel():
        tail = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=payload.device)
        tail[: payload.numel() - whole] = payload[whole:]
        total = total * _BLOCK_FACTOR + tail.view(torch.int64)[0] * factors[0]
    return int(total) % _MODULUS


def publish_checksums(group: BroadcastGroup, index: int, sums: list[int]) -> None:
    """Sender: tell the receivers the checksums of bucket `index`."""
    group.publish(f"checksums/{index}", json.dumps(sums))


def agree_on_checksums(group: BroadcastGroup, index: int, bucket: Bucket, received: list[int]) -> None:
    """Receiver: compare. Raises: RefitError that names the first tensor that arrived changed."""
    sent = json.loads(group.lookup(f"checksums/{index}", what=f"the checksums of bucket {index}"))
    for meta, mine, theirs in zip(bucket.tensors, received, sent, strict=True):
        if mine != theirs:
            raise RefitError(
                f"tensor {meta.name} arrived changed on refit group rank {group.rank}: its checksum is {mine:016x}, "
                f"sent was {theirs:016x}"
            )


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """int64 [_BLOCK_WORDS], odd and all different: where a word stands matters."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**62), 2**62, (_BLOCK_WORDS,), generator=generator, dtype=torch.int64)
    return (2 * factors + 1).to(device)
