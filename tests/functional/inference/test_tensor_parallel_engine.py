"""An engine of two tensor-parallel workers: each is a member of the broadcast group and keeps its shard."""

from __future__ import annotations

import inspect
from pathlib import Path

import psutil
import pytest

from tests.functional.inference.hf_oracle import TOLERANCE_NATS, hf_logprobs, worst_difference
from tests.listening_sockets import listening

# The two workers are processes that import vLLM once more each.
pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("tied", [True, False])
def test_both_workers_serve_the_refitted_weights(
    tmp_path: Path, engine_process_environment: None, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as app.loopback does in a run
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from tests.functional.inference.engine_rig import running_rig

    with running_rig(tmp_path, tied=tied, tensor_parallel_size=2) as rig:
        pids = rig.loop.run(rig.engine.pids())
        assert len(pids) == 3, "this process, with the core, and two workers"
        assert inspect.signature(SpinCondition.__init__).parameters["busy_loop_s"].default == 0.0
        sockets = listening(psutil.Process(pid) for pid in pids)
        assert sockets and not any(sockets.values()), sockets
        for model in (rig.models[1], rig.models[0]):
            version = rig.publish(model)
            [completion] = rig.generate([3, 4, 5], max_new_tokens=30)
            assert worst_difference(model, [3, 4, 5], completion, version) < TOLERANCE_NATS
            [scores] = rig.loop.run(rig.engine.score([[9, 8, 7, 6]], deadline_s=60))
            assert scores == pytest.approx(hf_logprobs(model, [9, 8, 7, 6]), abs=TOLERANCE_NATS)
