"""A broadcast group over gloo, its members as threads of this process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore

CPU = torch.device("cpu")

Part = Callable[[BroadcastGroup], object]


def run_members(
    send: Part,
    receives: Sequence[Part],
    *,
    timeout_s: float = 20.0,
    store: BroadcastStore | None = None,
    generation: int = 1,
    names: Sequence[str] = (),
    relay: bool = True,
) -> list[Future[object]]:
    """Futures of the sender and the receivers, all done.

    Args:
        names: what the sender calls the receivers; "engine 0" and so on by default.
    """
    store = store or BroadcastStore(timeout_s=timeout_s)
    spec = store.spec(generation=generation, rank_offset=1, world_size=1 + len(receives))
    names = names or [f"engine {index}" for index in range(len(receives))]

    def member(rank: int) -> object:
        group = BroadcastGroup(
            spec,
            rank=rank,
            device=CPU,
            relay=relay,
            store=None if rank else store,
            receiver_names=() if rank else names,
        )
        try:
            return receives[rank - 1](group) if rank else send(group)
        finally:
            group.close()

    with ThreadPoolExecutor(1 + len(receives)) as pool:
        return [pool.submit(member, rank) for rank in range(1 + len(receives))]
