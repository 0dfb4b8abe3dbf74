"""A driver process with an inference group of two replicas, for `test_inference_group.py`.

Prints one JSON object a line. At the end it says so and sleeps, so that the test can kill it.

Usage: python -m tests.functional.inference.group_driver FOLDER
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from queue import Queue

import psutil
import torch

from megatron_ppo.inference.environment import engine_environment
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.ray_actors.cluster import start_local_cluster
from megatron_ppo.ray_actors.engine_keeper import EngineKeeper
from megatron_ppo.ray_actors.inference_group import InferenceGroup
from megatron_ppo.ray_actors.liveness import LivenessLimits
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.telemetry.processes import start_time
from megatron_ppo.transport.broadcast_group import BroadcastStore
from tests.functional.inference.hf_oracle import HfSource, hf_logprobs, tiny_model, worst_difference

REPLICAS = 2


BUCKET_BYTES = 20_000
"""Small, so that the tiny model needs many buckets."""
STOPPED_LIMIT_S = 10.0
"""Of the refit whose engine stands still; the next one must keep it as well, on a busy machine."""
LIVENESS = LivenessLimits(deadline_s=6.0, misses=2)
"""An answer takes milliseconds, on a busy machine a second; two have to be late."""


def _report(**fields: object) -> None:
    print(json.dumps(fields), flush=True)


def _error_of(function) -> str:
    try:
        function()
    except MegatronPPOError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _served(group: InferenceGroup, model) -> float:
    prompts = [[3, 4, 5 + i] for i in range(8)]
    completions = group.generate_many(
        prompts, sampling=SamplingSettings(max_new_tokens=20), seeds=range(8), deadline_s=60
    )
    version = completions[0].spans[0].version
    return max(worst_difference(model, p, c, version) for p, c in zip(prompts, completions, strict=True))


class _Interruptible:
    """A source that does something half-way through its tensors, when told to."""

    def __init__(self, model) -> None:
        self._source = HfSource(model)
        self.action = None
        self.acted_at = 0.0

    def weight_metadata(self):
        return self._source.weight_metadata()

    def full_weights(self):
        half = len(self.weight_metadata()) // 2
        for position, tensor in enumerate(self._source.full_weights()):
            if position == half and self.action is not None:
                self.action()
                self.acted_at = time.monotonic()
            yield tensor


class _InterruptibleRefit:
    """A refit of `model` in many buckets."""

    def __init__(self, group: InferenceGroup, model, *, timeout_s: float) -> None:
        self._source = _Interruptible(model)
        self._refit = BroadcastRefit(
            source=self._source,
            sink=group,
            store=BroadcastStore(timeout_s=timeout_s),
            bucket_bytes=BUCKET_BYTES,
            timeout_s=timeout_s,
        )

    def push(self, version: int) -> None:
        self._source.action = None
        self._refit.push(version=version)

    def interrupted(self, action, *, version: int) -> tuple[str, float]:
        """The error of a push half-way through which `action` happens, and how long it took from there."""
        self._source.action = action
        error = _error_of(lambda: self._refit.push(version=version))
        return error, time.monotonic() - self._source.acted_at


def _refused(group: InferenceGroup, replica: int) -> str:
    """The error of a request to one replica."""
    request = group.clients()[replica].generate(
        [1, 2], seeds=[1], sampling=SamplingSettings(max_new_tokens=2), deadline_s=0.5
    )
    return _error_of(lambda: asyncio.run(request))


def _leave_a_slow_one_out(group: InferenceGroup, models) -> None:
    """Replica 1 has long requests, and rests, while versions 2 and 3 are published; then it is given version 3."""
    source = HfSource(models[0])
    refit = BroadcastRefit(
        source=source,
        sink=group,
        store=BroadcastStore(timeout_s=60),
        timeout_s=60,
        straggler_patience_s=1.0,
    )
    refit.push(version=1)
    slow, core = group.table.member(1), group.pids()[1][1]
    client, prompt = group.clients()[1], [1, 2, 3]
    answers: Queue[list] = Queue()

    def ask(tokens: int) -> list:
        sampling = SamplingSettings(max_new_tokens=tokens)
        return asyncio.run(client.generate(prompt, seeds=range(4), sampling=sampling, deadline_s=300))

    os.kill(core, signal.SIGSTOP)  # first, or the requests may be done before anybody looks
    threading.Thread(target=lambda: answers.put(ask(400)), daemon=True).start()
    deadline = time.monotonic() + 60
    while group.health()[1].running < 4:
        assert time.monotonic() < deadline, "the requests never ran"
        time.sleep(0.01)
    source._model = models[1]
    started = time.monotonic()
    stragglers = [refit.push(version=version)["refit/stragglers"] for version in (2, 3)]
    _report(
        slow_stragglers=stragglers,
        slow_push_s=time.monotonic() - started,
        slow_states=group.table.describe(),
        slow_refuses=_refused(group, 1),
        slow_others_difference=_served(group, models[1]),
    )
    os.kill(core, signal.SIGCONT)
    finished = answers.get(timeout=120)
    deadline = time.monotonic() + 60
    while slow in group.table.slow() and time.monotonic() < deadline:
        assert group.wait_for_death(slow, timeout_s=0.1) is None  # as the keeper looks
    _report(
        slow_versions=sorted({span.version for answer in finished for span in answer.spans}),
        slow_lengths=[len(answer.token_ids) for answer in finished],
        slow_difference=max(worst_difference(models[0], prompt, answer, 1) for answer in finished),
        paused_states=group.table.describe(),
        paused_lacks_weights=group.table.lacks_weights,
    )
    refit.push(version=3)
    _report(
        caught_up_states=group.table.describe(),
        caught_up_difference=max(worst_difference(models[1], prompt, answer, 3) for answer in ask(20)),
    )


def _stop_an_engine(group: InferenceGroup, core: int, models) -> None:
    """A core that stands still in the middle of a transfer, and goes on after the refit has failed."""
    refit = _InterruptibleRefit(group, models[0], timeout_s=STOPPED_LIMIT_S)
    error, took_s = refit.interrupted(lambda: os.kill(core, signal.SIGSTOP), version=5)
    paused = _refused(group, 0)
    os.kill(core, signal.SIGCONT)
    _report(stopped_error=error, stopped_s=took_s, stopped_other_refuses=paused)
    _report(continued_refuses=_refused(group, 1))
    group.end_silent(deadline_s=STOPPED_LIMIT_S)
    _report(continued_states=group.table.describe())
    refit.push(version=6)
    _report(repaired_difference=_served(group, models[0]))


def _fail_over_and_rebuild(
    group: InferenceGroup, refit: _InterruptibleRefit, model, first_pids: tuple[int, ...]
) -> None:
    """Replica 1 is dead: the other takes the version; then it is rebuilt; then it stands still under requests."""
    started = time.monotonic()
    refit.push(8)
    _report(failover_s=time.monotonic() - started, failover_states=group.table.describe())
    _report(failover_difference=_served(group, model))

    keeper = EngineKeeper(engines=group, give_up=lambda reason: _report(given_up=reason), liveness=LIVENESS)
    keeper.start()
    _report(rebuilt=group.table.wait_for(lambda: len(group.table.live()) == 2, timeout_s=300))
    pids = group.pids()[1]
    _report(
        rebuilt_elsewhere=set(pids).isdisjoint(first_pids),
        rebuilt_states=group.table.describe(),
        rebuilt_refuses=_refused(group, 1),
        rebuilt_serves=asyncio.run(group.clients()[1].serves()),
    )
    refit.push(8)
    scores = group.score([[1, 2, 3, 4, 5, 6]], deadline_s=60)
    expected = hf_logprobs(model, [1, 2, 3, 4, 5, 6])
    _report(
        back_states=group.table.describe(),
        back_serves=asyncio.run(group.clients()[1].serves()),
        back_differences=[
            max(abs(a - b) for a, b in zip(scores[replica][0], expected, strict=True)) for replica in range(2)
        ],
    )

    started = {pid: start_time(pid) for pid in pids}
    os.kill(pids[1], signal.SIGSTOP)
    _report(fallen_over_difference=_served(group, model), fallen_over_states=group.table.describe())
    deadline = time.monotonic() + 10
    while (left := [pid for pid, at in started.items() if start_time(pid) == at]) and (
        time.monotonic() < deadline
    ):
        time.sleep(0.05)
    _report(left_of_the_silent=left)
    keeper.stop()


def _cancel_a_request(group: InferenceGroup) -> int:
    async def scenario() -> None:
        [client, *_] = group.clients()
        request = client.generate(
            [1, 2, 3], seeds=[1, 2], sampling=SamplingSettings(max_new_tokens=400), deadline_s=60
        )
        task = asyncio.create_task(request)
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(scenario())
    deadline = time.monotonic() + 20
    while (running := group.health()[0].running) and time.monotonic() < deadline:
        time.sleep(0.1)
    return running


def main(folder: Path) -> None:
    """Everything in one cluster, because a spawned engine costs tens of CPU seconds."""
    torch.set_num_threads(1)
    models = [tiny_model(seed, tied=True) for seed in (1, 2)]
    models[0].save_pretrained(folder / "model")
    env = engine_environment(device_type="cpu") | {"PYTHONPATH": os.getcwd()}
    with start_local_cluster(log_dir=folder / "logs"):
        group = InferenceGroup(
            replicas=REPLICAS,
            engine_kwargs={
                "model": str(folder / "model"),
                "max_model_len": 512,
                "max_num_seqs": 16,
                "engine_core": "process",
                "kv_cache_memory_bytes": 32 * 2**20,
            },
            env=env,
            log_dir=folder / "logs",
            max_restarts=2,
        )
        group.start()
        sampling = SamplingSettings(max_new_tokens=5)
        _report(
            before_first_refit=_refused(group, 0),
            before_first_refit_in_all=_error_of(
                lambda: group.generate_many([[1, 2]], sampling=sampling, seeds=[1], deadline_s=0.5)
            ),
        )
        _leave_a_slow_one_out(group, models)
        refit = BroadcastRefit(
            source=HfSource(models[1]), sink=group, store=BroadcastStore(timeout_s=60), timeout_s=60
        )
        metrics = refit.push(version=4)
        _report(refit=metrics, versions=[health.version for health in group.health()])
        _report(generation_difference=_served(group, models[1]))
        expected = hf_logprobs(models[1], [1, 2, 3, 4, 5, 6])
        _report(
            score_differences=[
                max(abs(a - b) for a, b in zip(scores[0], expected, strict=True))
                for scores in group.score([[1, 2, 3, 4, 5, 6]], deadline_s=60).values()
            ]
        )
        _report(running_after_cancel=_cancel_a_request(group))
        members = group.table.live()
        _report(deaths_while_alive=[group.wait_for_death(member, timeout_s=0) for member in members])

        pids = group.pids()
        _report(processes_per_replica=[len(each) for each in pids])
        _stop_an_engine(group, pids[1][1], models)

        noticed: Queue[tuple[str | None, float]] = Queue()

        def kill() -> None:
            os.kill(pids[1][1], signal.SIGKILL)
            threading.Thread(target=notice, args=(time.monotonic(),), daemon=True).start()

        def notice(killed: float) -> None:
            noticed.put((group.wait_for_death(members[1], timeout_s=30), time.monotonic() - killed))

        refit = _InterruptibleRefit(group, models[1], timeout_s=60)
        error, took_s = refit.interrupted(kill, version=7)
        _report(killed_error=error, killed_s=took_s, killed_other_refuses=_refused(group, 0))
        cause, noticed_s = noticed.get(timeout=60)
        _report(killed=cause, noticed_s=noticed_s, error=_error_of(lambda: group.health()))
        _fail_over_and_rebuild(group, refit, models[1], pids[1])
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        _report(done=True, processes=[os.getpid(), *children])
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
