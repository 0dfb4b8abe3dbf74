"""A bare gloo broadcast between processes, the floor under the transport of a refit."""

from __future__ import annotations

import time
from datetime import timedelta

import torch
import torch.distributed as dist

SENDER = 0


def gloo_group(store: dist.Store, rank: int, members: int, timeout_s: float) -> dist.ProcessGroupGloo:
    """A process group of sender and receivers over the loopback interface, like the refit's."""
    options = dist.ProcessGroupGloo._Options()
    options._devices = [dist.ProcessGroupGloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=timeout_s)
    return dist.ProcessGroupGloo(store, rank, members, options)


def buffers(sizes: list[int]) -> list[torch.Tensor]:
    """One touched buffer per bucket."""
    return [torch.zeros(size, dtype=torch.uint8) for size in sizes]


def raw_broadcast(group: dist.ProcessGroupGloo, tensors: list[torch.Tensor]) -> float:
    """Broadcast them one after another between two barriers; seconds."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = SENDER, 0
    group.barrier().wait()
    started = time.perf_counter()
    for tensor in tensors:
        group.broadcast([tensor], options).wait()
    group.barrier().wait()
    return time.perf_counter() - started
