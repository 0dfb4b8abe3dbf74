"""What ends a run between two steps: a signal to any rank, or a process of the run that is gone.

Driven by the training loop and by the wait for groups, on every rank together; signals are noted from another thread.
Invariant: all ranks end at the same step boundary, whichever of them was told.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable

import torch
import torch.distributed as dist

from megatron_ppo.app.termination import process_exists
from megatron_ppo.protocol.errors import StopRequested
from megatron_ppo.ray_actors.rank0 import RankZero


class Interruptions:
    """Collects requests to end, and lets the ranks agree on them.

    Args:
        group: gloo group of all ranks.
    """

    def __init__(self, *, rank_zero: RankZero, group: dist.ProcessGroup, world_size: int) -> None:
        self._rank_zero = rank_zero
        self._group = group
        self._world_size = world_size
        self._signum = 0
        self._peers = self._processes()

    def request(self, signum: int) -> None:
        """End at the next step boundary, because of this signal. The first request counts."""
        self._signum = self._signum or signum

    def a_peer_is_gone(self) -> bool:
        """Whether another rank of this host has ended, so that no collective will ever be complete again."""
        return not all(process_exists(pid) for pid in self._peers)

    def check(self, raise_if_failed: Callable[[], None]) -> None:
        """Collective.

        Args:
            raise_if_failed: called on rank 0 only: raises PartDiedError when a process of the run is gone.
        Raises: on every rank, StopRequested that names the signal, or PartDiedError.
        """
        highest = torch.tensor([self._signum])
        if self._world_size > 1:
            with self._rank_zero.meeting():
                dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=self._group)
        if signum := int(highest.item()):
            raise StopRequested(f"stopped by {signal.Signals(signum).name}")
        self._rank_zero.run("the watch over the run's processes", raise_if_failed)

    def _processes(self) -> tuple[int, ...]:
        """Process ids of the other ranks on this host. Collective."""
        if self._world_size == 1:
            return ()
        here = (socket.gethostname(), os.getpid())
        everyone: list[tuple[str, int]] = [here] * self._world_size
        dist.all_gather_object(everyone, here, group=self._group)
        return tuple(pid for host, pid in everyone if host == here[0] and pid != here[1])
