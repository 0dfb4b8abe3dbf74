"""The torch side of `protocol.weights.Bucket`: tensors into one byte buffer and back out as views.

Driven by `refit` (packing) and `inference.worker_extension` (views). Invariant: what `views_of_bucket`
returns has the shape, dtype and bits of what `pack_bucket` took, without a copy on the receiving side.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.weights import Bucket, TensorMeta

TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def pack_bucket(bucket: Bucket, tensors: Iterator[Tensor], buffer: Tensor) -> Tensor:
    """Copy the bucket's tensors, taken in order from `tensors`, into `buffer`.

    Args:
        buffer: uint8 [n >= bucket.num_bytes], contiguous, on the device of the broadcast backend.
    Returns: uint8 [bucket.num_bytes], a view of `buffer`. Gaps between tensors keep whatever they held.
    Raises: RefitError when the source ends early or yields another shape or dtype than the manifest says.
    """
    for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True):
        # No name for the tensor: it must be gone before the source gathers the next one.
        _view(buffer, offset, meta).copy_(next_tensor(tensors, meta).detach())
    return buffer[: bucket.num_bytes]


def next_tensor(tensors: Iterator[Tensor], meta: TensorMeta) -> Tensor:
    """The source's next tensor, which should be `meta`. Raises: RefitError when it yields none or another."""
    tensor = next(tensors, None)
    if tensor is None:
        raise RefitError(f"the weight source ended before {meta.name}, which its metadata lists")
    if tuple(tensor.shape) != meta.shape or tensor.dtype != TORCH_DTYPES[meta.dtype]:
        raise RefitError(
            f"the weight source yielded {meta.name} as {tensor.dtype} {tuple(tensor.shape)}; "
            f"its metadata says {meta.dtype} {meta.shape}"
        )
    return tensor


def payload_of(tensor: Tensor, device: torch.device) -> Tensor:
    """uint8 [bytes of the tensor] on `device`: the tensor's own memory where it is contiguous and there already."""
    return tensor.detach().to(device).contiguous().view(-1).view(torch.uint8)


def views_of_bucket(bucket: Bucket, buffer: Tensor) -> list[tuple[str, Tensor]]:
    """(name, view) for each tensor of the bucket; the views share the memory of `buffer` (uint8)."""
    return [
        (meta.name, _view(buffer, offset, meta))
        for meta, offset in zip(bucket.tensors, bucket.offsets, strict=True)
    ]


def _view(buffer: Tensor, offset: int, meta: TensorMeta) -> Tensor:
    return buffer[offset : offset + meta.num_bytes].view(TORCH_DTYPES[meta.dtype]).view(meta.shape)
