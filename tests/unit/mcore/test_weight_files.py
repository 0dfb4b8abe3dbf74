"""The files of an exported model: what safetensors reads back, and how little is held while they are written."""

from __future__ import annotations

import json
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from megatron_ppo.mcore.hf_export import write_weights
from megatron_ppo.mcore.hf_preflight import INDEX, tensor_files
from megatron_ppo.protocol.weights import TensorMeta
from tests.weight_metadata import tensor_meta

ALL_IN_ONE = 10**9


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"embed": (7, 5), "norm": (5,), "ü.weight": (3, 5), "scalar": (1,), "head": (7, 5)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def metadata(of: dict[str, Tensor]) -> list[TensorMeta]:
    return [tensor_meta(name, tensor) for name, tensor in of.items()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("max_file_bytes", [ALL_IN_ONE, 100, 1])
def test_every_bit_and_every_format_is_read_back(
    tmp_path: Path, dtype: torch.dtype, max_file_bytes: int
) -> None:
    expected = tensors(dtype)
    # A transposed one, as a source may yield: what counts is its content, not how it lies in memory.
    expected["head"] = expected["head"].T
    write_weights(tmp_path, metadata(expected), iter(expected.values()), max_file_bytes=max_file_bytes)
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (max_file_bytes != ALL_IN_ONE)
    found = {name: tensor for path in files for name, tensor in load_file(path).items()}
    assert found.keys() == expected.keys() == tensor_files(tmp_path).keys()
    for name, tensor in expected.items():
        assert found[name].dtype == dtype
        assert torch.equal(found[name], tensor), name
    for path in files:
        with safe_open(path, framework="pt") as opened:
            assert opened.metadata() == {"format": "pt"}
        # The data begins at a multiple of eight, so that a reader may map it into memory as numbers.
        assert (8 + int.from_bytes(path.read_bytes()[:8], "little")) % 8 == 0
    if max_file_bytes != ALL_IN_ONE:
        total = json.loads((tmp_path / INDEX).read_text())["metadata"]["total_size"]
        assert total == sum(tensor.nbytes for tensor in expected.values())


@pytest.mark.parametrize("max_file_bytes", [ALL_IN_ONE, 100])
def test_one_tensor_is_held_at_a_time(tmp_path: Path, max_file_bytes: int) -> None:
    meta = metadata(tensors(torch.bfloat16))
    alive: list[int] = []

    def gathered() -> Iterator[Tensor]:
        seen: list[weakref.ref[Tensor]] = []
        for tensor_name in [each.name for each in meta]:
            alive.append(sum(reference() is not None for reference in seen))
            tensor = tensors(torch.bfloat16)[tensor_name]
            seen.append(weakref.ref(tensor.untyped_storage()))
            yield tensor
            del tensor

    write_weights(tmp_path, meta, gathered(), max_file_bytes=max_file_bytes)
    assert alive == [0] * len(meta), "a tensor was kept while another one was gathered"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [(torch.zeros(5, 7), "embed has shape"), (torch.zeros(7, 5, dtype=torch.float64), "float64")],
)
def test_a_tensor_that_is_not_what_the_header_says_is_an_error(
    tmp_path: Path, wrong: Tensor, words: str
) -> None:
    (meta, *_) = metadata(tensors(torch.float32))
    with pytest.raises(AssertionError, match=words):
        write_weights(tmp_path, [meta], iter([wrong]), max_file_bytes=ALL_IN_ONE)
