"""The inference group over real Ray actors: replicas that die in every way are built again, behind the same handles."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.protocol.errors import EngineDeadError
from megatron_ppo.protocol.replicas import ReplicaState
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.protocol.weights import RefitGroupSpec
from megatron_ppo.telemetry.processes import start_time

pytestmark = [pytest.mark.ray, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[3]
LONG_S = 120.0  # starting an actor takes 10 CPU seconds, more on a loaded machine
SILENT_S = 4.0  # an answer takes milliseconds, and two have to be late


class Scene:
    """A group of one replica, with its keeper."""

    def __init__(self, folder: Path, *, max_restarts: int = 3, failing_starts: int = 0) -> None:
        from megatron_ppo.ray_actors.engine_keeper import EngineKeeper
        from megatron_ppo.ray_actors.inference_group import InferenceGroup
        from megatron_ppo.ray_actors.liveness import LivenessLimits

        self.starts = folder / "starts"
        self.group = InferenceGroup(
            replicas=1,
            engine_kwargs={"token": 7, "starts": str(self.starts), "failing_starts": failing_starts},
            env={"PYTHONPATH": str(ROOT)},
            log_dir=folder,
            start_timeout_s=LONG_S,
            engine_target="tests.functional.ray_actors.toy_engine.ToyEngine",
            max_restarts=max_restarts,
        )
        self.group.start()
        self.table = self.group.table
        self.given_up: list[str] = []
        self.keeper = EngineKeeper(
            engines=self.group,
            give_up=self.given_up.append,
            liveness=LivenessLimits(deadline_s=SILENT_S, misses=2),
        )
        self.keeper.start()

    def refit(self, version: int) -> None:
        """What a `BroadcastRefit` asks of the group."""
        group = self.group
        world = 1 + len(group.muster(version=version))
        spec = RefitGroupSpec(
            host="-", port=0, generation=1, rank_offset=1, world_size=world, backend="-", timeout_s=1.0
        )
        group.join_refit_group(spec).wait(timeout_s=LONG_S)
        group.begin_refit(mode="drain", timeout_s=LONG_S)
        group.commit_refit(version=version, recompute_kv=False, timeout_s=LONG_S)
        group.end_refit(timeout_s=LONG_S)

    def served(self, *, tokens: int = 1) -> int:
        """The version behind a request of rank 0's."""
        sampling = SamplingSettings(max_new_tokens=tokens)
        [completion] = self.group.generate_many([[1]], sampling=sampling, seeds=[1], deadline_s=LONG_S)
        return completion.spans[0].version

    def call(self, method: str) -> Any:
        import ray

        return ray.get(self.group._handles[0].call.remote(method), timeout=LONG_S)

    def pid(self) -> int:
        import ray

        return int(ray.get(self.group._handles[0].identity.remote(), timeout=LONG_S).split("-")[0])

    def until(self, state: ReplicaState, *, deaths: int) -> None:
        reached = self.table.wait_for(
            lambda: self.table.statuses()[0].state is state and self.table.deaths == deaths, timeout_s=LONG_S
        )
        assert reached, self.table.describe()


@pytest.fixture
def scene(cluster: Path, tmp_path: Path) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**settings: int) -> Scene:
        made.append(Scene(tmp_path, **settings))
        return made[-1]

    yield make
    for each in made:
        each.keeper.stop()
        each.group.shutdown()


def test_a_replica_comes_back_from_a_broken_core_a_killed_process_and_a_hanging_one(
    scene: Callable[..., Scene],
) -> None:
    run = scene()
    [client] = run.group.clients()
    run.refit(1)
    assert run.served() == 1 and asyncio.run(client.serves())
    pids = [run.pid()]

    run.call("break_core")
    run.until(ReplicaState.STALE, deaths=1)
    pids.append(run.pid())
    assert not asyncio.run(client.serves()), "it has no weights yet"
    with pytest.raises(EngineDeadError, match=r"no engine replica serves.*0 STALE \(died 1x\)"):
        run.served()
    run.refit(1)
    assert run.served() == 1 and asyncio.run(client.serves())

    os.kill(pids[-1], signal.SIGKILL)
    run.until(ReplicaState.STALE, deaths=2)
    pids.append(run.pid())
    run.refit(2)
    assert run.served() == 2

    # A process that stands still dies of no signal that it could ignore, and is seen by no watch. Here a refit waits
    # for its requests; the questions find it before that wait ends by itself.
    os.kill(pids[-1], signal.SIGSTOP)
    with pytest.raises(EngineDeadError, match="the process of engine replica 0 is gone"):
        run.group.begin_refit(mode="drain", timeout_s=2 * LONG_S)
    run.until(ReplicaState.STALE, deaths=3)
    pids.append(run.pid())
    run.refit(3)
    assert run.served() == 3

    assert len(set(pids)) == 4 and len(run.starts.read_text().split()) == 4
    assert run.given_up == []
    # In a transfer the keeper asks nobody; after one that has failed, the main thread does.
    run.group.begin_refit(mode="drain", timeout_s=LONG_S)
    run.group.end_silent(deadline_s=SILENT_S)
    assert run.table.deaths == 3
    os.kill(pids[-1], signal.SIGSTOP)
    run.group.end_silent(deadline_s=SILENT_S)
    run.until(ReplicaState.DEAD, deaths=4)
    deadline = time.monotonic() + LONG_S
    while not run.given_up:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    while start_time(pids[-1]) is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert run.given_up[0].startswith("engine replica 0 died: it hangs: its core did not answer within 4 s")
    assert run.given_up[0].endswith("(inference.max_engine_restarts=3)")


def test_a_death_under_requests_of_rank_0_is_told_and_a_start_that_fails_is_tried_again(
    scene: Callable[..., Scene],
) -> None:
    run = scene(failing_starts=1)
    run.refit(1)
    killer = threading.Timer(0.3, lambda: run.call("break_core"))
    killer.start()
    with pytest.raises(EngineDeadError, match="no engine replica serves"):
        run.served(tokens=10**6)
    run.until(ReplicaState.STALE, deaths=2)
    run.refit(1)
    assert run.served() == 1
    assert len(run.starts.read_text().split()) == 3
