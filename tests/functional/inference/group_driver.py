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
import time
from pathlib import Path

import psutil
import ray
import torch

from megatron_ppo.inference.environment import engine_environment
from megatron_ppo.protocol.errors import MegatronPPOError
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.ray_actors.cluster import start_local_cluster
from megatron_ppo.ray_actors.inference_group import InferenceGroup
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.transport.broadcast_group import BroadcastStore
from tests.functional.inference.hf_oracle import HfSource, hf_logprobs, tiny_model, worst_difference

REPLICAS = 2


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
        )
        group.start()
        watched = group.watch_refs()
        sampling = SamplingSettings(max_new_tokens=5)
        _report(
            before_first_refit=_error_of(
                lambda: group.generate_many([[1, 2]], sampling=sampling, seeds=[1], deadline_s=0.5)
            )
        )
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
                for scores in group.score([[1, 2, 3, 4, 5, 6]], deadline_s=60)
            ]
        )
        _report(running_after_cancel=_cancel_a_request(group))
        _report(watch_ready_while_alive=len(ray.wait(list(watched), timeout=0)[0]))

        pids = group.pids()
        _report(processes_per_replica=[len(each) for each in pids])
        started = time.monotonic()
        os.kill(pids[1][1], signal.SIGKILL)
        ready, _ = ray.wait(list(watched), timeout=30)
        noticed_s = time.monotonic() - started
        _report(killed=watched[ready[0]], noticed_s=noticed_s, error=_error_of(lambda: group.health()))
        started = time.monotonic()
        _report(
            refit_error=_error_of(lambda: refit.push(version=5)), refit_error_s=time.monotonic() - started
        )
        children = [child.pid for child in psutil.Process().children(recursive=True)]
        _report(done=True, processes=[os.getpid(), *children])
        time.sleep(600)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
