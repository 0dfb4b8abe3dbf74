"""An engine of two tensor-parallel workers: each gets all weights and keeps its shard."""

from __future__ import annotations

import inspect
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from megatron_ppo.protocol.errors import RefitError
from tests.functional.inference.hf_oracle import TOLERANCE_NATS, hf_logprobs, worst_difference
from tests.listening_sockets import listening

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig

# The two workers are processes that import vLLM once more each.
pytestmark = [pytest.mark.vllm, pytest.mark.timeout(300)]


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_both_workers_serve_the_refitted_weights(
    tmp_path: Path, engine_process_environment: None, tied: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")  # as app.loopback does in a run
    from vllm.distributed.device_communicators.shm_broadcast import SpinCondition

    from tests.functional.inference.engine_rig import TIMEOUT_S, running_rig

    extension = {"worker_extension_cls": "tests.functional.inference.failing_worker.FailingWorker"}
    with running_rig(tmp_path, tied=tied, tensor_parallel_size=2, extra_engine_args=extension) as rig:
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
            assert _ask_workers(rig, "reads_from_another") == [False, True]
        # vLLM hears the workers in their order, and the first one waits until the second one has read everything.
        for failing in (0, 1):
            _ask_workers(rig, "fail_next_load", failing, "model.norm.weight")
            started = time.monotonic()
            with pytest.raises(RefitError, match="no room in this worker"):
                rig.publish(rig.models[1])
            assert time.monotonic() - started < 0.5 * TIMEOUT_S
            version = rig.publish(rig.models[failing])
            [completion] = rig.generate([3, 4, 5], max_new_tokens=30)
            assert worst_difference(rig.models[failing], [3, 4, 5], completion, version) < TOLERANCE_NATS


def _ask_workers(rig: EngineRig, method: str, *args: object) -> list[object]:
    return rig.loop.run(rig.engine._live().collective_rpc(method, args=args))
