"""Reads tensors, or rows and columns of them, from the safetensors of a Hugging Face model folder.

Driven by `mcore.weights`, one tensor at a time; `hf_preflight` has looked at the same files before.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from megatron_ppo.mcore.hf_preflight import tensor_files
from megatron_ppo.protocol.errors import ConfigError


class HFWeights:
    """Read access to the safetensors of a model folder, whole or sharded with an index.

    Use as a context manager. Raises: ConfigError for a folder without safetensors or without a wanted tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._file_of = tensor_files(self.folder)
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor, or some of its rows or columns; only those bytes are read."""
        if name not in self._file_of:
            raise ConfigError(f"model folder {self.folder} has no tensor {name}")
        file = self._file_of[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        if rows is None and columns is None:
            tensor: Tensor = self._opened[file].get_tensor(name)
            return tensor
        view = self._opened[file].get_slice(name)
        part: Tensor = view[rows] if columns is None else view[:, columns]
        return part
