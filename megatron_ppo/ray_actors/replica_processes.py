"""Which processes the replicas consist of, wherever they run, so that one that hangs can be ended as a whole.

Owned by `inference_group`; used by the main thread and the keeper's threads, one replica each. Ray ends an actor, but
not a core or a worker below it that stands still. Invariant: only processes of the life that was named are killed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from megatron_ppo.protocol.replicas import Member
from megatron_ppo.telemetry import processes

logger = logging.getLogger(__name__)

_KILL_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProcesses:
    """Where they run (Ray's id of the node), and their start times by process id."""

    node_id: str
    started: Mapping[int, str]


def processes_here(pids: Iterable[int]) -> EngineProcesses:
    """Those of `pids` that run on this node."""
    found = {pid: processes.start_time(pid) for pid in pids}
    return EngineProcesses(
        node_id=ray.get_runtime_context().get_node_id(),
        started={pid: at for pid, at in found.items() if at is not None},
    )


class ReplicaProcesses:
    """What is known of them, by the life of the replica that they belong to."""

    def __init__(self) -> None:
        self._known: dict[Member, EngineProcesses] = {}
        self._killed: set[int] = set()

    def remember(self, member: Member, found: EngineProcesses) -> None:
        """These are the processes of `member`."""
        self._known[member] = found
        self._killed.discard(member.replica)

    def kill(self, member: Member) -> None:
        """SIGKILL for every process of `member`, here or on its node. Harmless when repeated."""
        found = self._known.pop(member, None)
        if found is None or not found.started:
            return
        if found.node_id == ray.get_runtime_context().get_node_id():
            processes.kill(found.started)
            self._killed.add(member.replica)
            return
        there = NodeAffinitySchedulingStrategy(node_id=found.node_id, soft=False)
        kill = ray.remote(num_cpus=0)(processes.kill).options(scheduling_strategy=there)
        try:
            ray.get(kill.remote(dict(found.started)), timeout=_KILL_S)
            self._killed.add(member.replica)
        except RayError as error:  # the node may be what is gone
            logger.warning("the processes of %s could not be killed on their node: %s", member, error)

    def kill_all_of(self, replica: int) -> None:
        """The same for every known life of `replica`."""
        for member in list(self._known):  # a copy: other replicas' threads are here, too
            if member.replica == replica:
                self.kill(member)

    def were_killed(self, replica: int) -> bool:
        """Whether `replica` was killed since its processes were last known; asked once."""
        killed = replica in self._killed
        self._killed.discard(replica)
        return killed
