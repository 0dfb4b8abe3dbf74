"""Jobs for a pair of workers that check what `RankZero` makes of results and errors; see `worker_group`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch.distributed as dist

from megatron_ppo.mcore.parallel import distributed_runtime
from megatron_ppo.protocol.errors import NonFiniteError, PartDiedError
from megatron_ppo.ray_actors.rank0 import RankZero, RayGroupSource
from megatron_ppo.testing.fakes import make_group

TIMEOUT_S = 60.0


def outcomes() -> dict[str, object]:
    """What this rank sees of a result, of an error, and of a result after the error."""
    # Prefixed per job: on the launcher's bare store, a second group would meet the keys of the first.
    with distributed_runtime(timeout_s=TIMEOUT_S):
        rank = dist.get_rank()
        control = dist.new_group(backend="gloo")
        calls: list[str] = []
        meetings: list[str] = []

        @contextmanager
        def meeting() -> Iterator[None]:
            meetings.append(f"begun after {len(calls)} calls")
            yield
            meetings.append("over")

        rank_zero = RankZero(rank=rank, world_size=dist.get_world_size(), group=control, meeting=meeting)

        def noting(value: object) -> Callable[[], object]:
            def function() -> object:
                calls.append(repr(value))
                return value

            return function

        def fail() -> object:
            raise NonFiniteError("the reward is NaN", (3, 5))

        before = rank_zero.run("the choice of checkpoint", noting({"step": 4}))
        group = rank_zero.run("take", lambda: make_group(ordinal=7, target_step=2))
        nothing = rank_zero.run("a step without result", noting(None))
        try:
            rank_zero.run("validation after step 5", fail)
            raised = "nothing"
        except (NonFiniteError, PartDiedError) as error:
            raised = f"{type(error).__name__}: {error}"
        after = rank_zero.run("the gates", noting([1, 2]))
        return {
            "before": before,
            "group": group,
            "nothing": nothing,
            "raised": raised,
            "after": after,
            "calls": calls,
            "meetings": meetings,
        }


def result_that_cannot_be_sent() -> list[str]:
    """This rank's error for a result that no other process can have, and the result of the call after it."""
    with distributed_runtime(timeout_s=TIMEOUT_S):
        rank_zero = RankZero(rank=dist.get_rank(), world_size=2, group=dist.new_group(backend="gloo"))
        try:
            rank_zero.run("the start of the actors", lambda: lambda: 1)
            raised = "nothing"
        except (TypeError, PartDiedError) as error:
            raised = f"{type(error).__name__}: {error}"
        return [raised, rank_zero.run("the gates", lambda: "passed")]


def take_without_actors() -> list[str]:
    """A take whose rank 0 fails: no rank may be left waiting. Returns this rank's error."""
    with distributed_runtime(timeout_s=TIMEOUT_S):
        rank_zero = RankZero(rank=dist.get_rank(), world_size=2, group=dist.group.WORLD)

        class Failed:
            def raise_if_failed(self) -> None:
                raise PartDiedError("the collector died: EngineDeadError: killed")

        source = RayGroupSource(
            rank_zero=rank_zero,
            supervisor=Failed() if dist.get_rank() == 0 else None,  # type: ignore[arg-type]
            replay=object() if dist.get_rank() == 0 else None,
            groups_timeout_s=5.0,
        )
        try:
            source.take(target_step=3)
        except PartDiedError as error:
            return [str(error)]
        return []
