"""Which bytes cross from trainer to engines, in which buckets. Both sides cut the same buckets from one manifest.

A size mismatch between the two ends of a gloo broadcast aborts the process, so the two ends compare the
manifest's digest before the first bucket moves.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

ALIGNMENT_BYTES = 16
_ALONE_FROM_PART = 4
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Name in the Hugging Face layout, full (unsharded) shape, dtype as a key of DTYPE_BYTES."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's payload."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


def largest_layer_bytes(tensors: Sequence[TensorMeta]) -> int:
    """Bytes of the largest decoder layer, or of the largest tensor outside of them, such as the embeddings."""
    sizes: dict[str, int] = {}
    for tensor in tensors:
        match = _LAYER.search(tensor.name)
        part = tensor.name if match is None else f"layer {match[1]}"
        sizes[part] = sizes.get(part, 0) + tensor.num_bytes
    return max(sizes.values(), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bucket:
    """A contiguous uint8 buffer: tensor `i` of `tensors` lies at `offsets[i]`, ALIGNMENT_BYTES aligned."""

    tensors: tuple[TensorMeta, ...]
    offsets: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """Everything that one publish sends, in order. `verify_checksum`: with a checksum of every tensor beside it."""

    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int
    verify_checksum: bool = False

    def digest(self) -> str:
        """SHA-256 over names, shapes, dtypes, bucket size and whether checksums go with the tensors."""
        tensors = [[t.name, t.shape, t.dtype] for t in self.tensors]
        text = json.dumps([*tensors, self.bucket_bytes, self.verify_checksum])
        return hashlib.sha256(text.encode()).hexdigest()

    def buckets(self) -> Iterator[Bucket]:
        """Greedy cut in order; a tensor of at least a quarter of `bucket_bytes` gets a bucket of its own, so that it
        can be sent from where it lies.
        """
        tensors: list[TensorMeta] = []
        offsets: list[int] = []
        end = 0
        for tensor in self.tensors:
            start = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            alone = any(self.travels_alone(meta) for meta in (tensor, *tensors[-1:]))
            if tensors and (alone or start + tensor.num_bytes > self.bucket_bytes):
                yield Bucket(tensors=tuple(tensors), offsets=tuple(offsets), num_bytes=end)
                tensors, offsets, start = [], [], 0
            tensors.append(tensor)
            offsets.append(start)
            end = start + tensor.num_bytes
        if tensors:
            yield Bucket(tensors=tuple(tensors), offsets=tuple(offsets), num_bytes=end)

    def travels_alone(self, tensor: TensorMeta) -> bool:
        """Whether the tensor is large enough for a bucket of its own."""
        return tensor.num_bytes * _ALONE_FROM_PART >= self.bucket_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RefitGroupSpec:
    """How one engine joins the broadcast group.

    Attributes:
        generation: counts memberships; a change of members is a new generation on the same store.
        rank_offset: group rank of the engine's first worker; the trainer's rank 0 is group rank 0.
        backend: "gloo" on CPU, "nccl" on CUDA.
    """

    host: str
    port: int
    generation: int
    rank_offset: int
    world_size: int
    backend: str
    timeout_s: float
