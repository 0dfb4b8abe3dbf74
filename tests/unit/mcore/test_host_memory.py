"""Reading tensors out of another process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from megatron_ppo.mcore.host_memory import RemoteShard

COUNT = 24 * 1500
OTHER_PROCESS = f"""
import array, sys
numbers = array.array("i", range({COUNT}))
print(numbers.buffer_info()[0], flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def other() -> Iterator[tuple[int, int]]:
    """Process id, and the address of the int32 numbers 0, 1, 2 and so on."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    process.communicate(timeout=10)


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(COUNT, dtype=torch.int32)[: torch.Size(shape).numel()].view(shape)


def shard(other: tuple[int, int], *shape: int) -> RemoteShard:
    return RemoteShard(*other, shape, torch.int32)


def test_a_whole_tensor(other: tuple[int, int]) -> None:
    into = torch.zeros(1500, 24, dtype=torch.int32)
    shard(other, 1500, 24).read_all(into)
    assert torch.equal(into, numbers(1500, 24))


def test_rows_into_columns_of_a_larger_tensor_in_more_pieces_than_one_call_takes(
    other: tuple[int, int],
) -> None:
    whole = torch.full((1500, 60), -1, dtype=torch.int32)
    remote = shard(other, 1500, 24)
    remote.read(remote.layout[:, :20], whole[:, 7:27])
    assert torch.equal(whole[:, 7:27], numbers(1500, 24)[:, :20])
    assert (whole[:, :7] == -1).all() and (whole[:, 27:] == -1).all()
    remote.read(remote.layout, whole[:, 36:])
    assert torch.equal(whole[:, 36:], numbers(1500, 24))


def test_blocks_of_rows_that_lie_apart_on_both_sides(other: tuple[int, int]) -> None:
    remote = shard(other, 30, 8, 5)
    into = torch.zeros(30, 4, 5, dtype=torch.int32)
    remote.read(remote.layout[:, 2:6], into)
    assert torch.equal(into, numbers(30, 8, 5)[:, 2:6])
    apart = torch.zeros(30, 9, 5, dtype=torch.int32)
    remote.read(remote.layout[3:, 7:], apart[3:, 4:5])
    assert torch.equal(apart[3:, 4], numbers(30, 8, 5)[3:, 7])
    assert not apart[:, :4].any() and not apart[:, 5:].any() and not apart[:3].any()


def test_an_empty_part_reads_nothing(other: tuple[int, int]) -> None:
    remote = RemoteShard(other[0], 0, (4, 5), torch.int32)
    remote.read(remote.layout[4:], torch.empty(0, 5, dtype=torch.int32))


def test_memory_that_is_not_there_is_an_error(other: tuple[int, int]) -> None:
    with pytest.raises(OSError, match=f"memory of process {other[0]}"):
        RemoteShard(other[0], 8, (4,), torch.int32).read_all(torch.zeros(4, dtype=torch.int32))


def test_a_process_that_has_ended_is_an_error() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait(timeout=10)
    with pytest.raises(OSError, match=f"memory of process {ended.pid}"):
        RemoteShard(ended.pid, 4096, (4,), torch.int32).read_all(torch.zeros(4, dtype=torch.int32))
