"""Manifests of tensors that a test has at hand; a trainer derives its own from the model's configuration."""

from __future__ import annotations

from torch import Tensor

from megatron_ppo.protocol.weights import TensorMeta


def tensor_meta(name: str, tensor: Tensor) -> TensorMeta:
    """Name, shape and dtype of a whole tensor."""
    return TensorMeta(name=name, shape=tuple(tensor.shape), dtype=str(tensor.dtype).removeprefix("torch."))
