"""Receivers of a refit in a process of their own, without vLLM: what reaches them is what would reach an engine.

Reads one JSON object a line and answers with one. {"join": spec, "receivers": n} makes n threads join a new group;
{"receive": manifest} receives it in all of them and answers with a hash per tensor and receiver.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.protocol.replicas import PausedEngines
from megatron_ppo.protocol.weights import RefitGroupSpec, TensorMeta, WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup
from megatron_ppo.transport.streams import receive_stream


def tensor_hash(tensor: Tensor) -> str:
    """Of shape, dtype and bytes."""
    payload = tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return hashlib.sha256(f"{tuple(tensor.shape)} {tensor.dtype}".encode() + payload).hexdigest()


def main() -> None:
    """Serve until the other end goes away."""
    torch.set_num_threads(1)
    groups: list[BroadcastGroup] = []
    with ThreadPoolExecutor(4) as pool:
        for line in sys.stdin:
            request = json.loads(line)
            if "join" in request:
                for group in groups:
                    group.close()
                spec = RefitGroupSpec(**request["join"])
                groups = list(
                    pool.map(
                        lambda rank, spec=spec: BroadcastGroup(spec, rank=rank, device=torch.device("cpu")),
                        range(1, 1 + request["receivers"]),
                    )
                )
                answer: object = "joined"
            else:
                manifest = _manifest(**request["receive"])
                answer = list(pool.map(lambda group, m=manifest: _received(group, m), groups))
            print(json.dumps(answer), flush=True)


def _received(group: BroadcastGroup, manifest: WeightManifest) -> dict[str, str]:
    return {
        name: tensor_hash(tensor) for tensors in receive_stream(group, manifest) for name, tensor in tensors
    }


def _manifest(tensors: list[dict[str, Any]], **fields: Any) -> WeightManifest:
    metas = tuple(TensorMeta(**{**tensor, "shape": tuple(tensor["shape"])}) for tensor in tensors)
    return WeightManifest(tensors=metas, **fields)


class ReceiverFleet:
    """`refit.fleet.EngineFleet` over such a process. `hashes`: per receiver, of the last refit."""

    def __init__(self, receivers: int, process: subprocess.Popen[str]) -> None:
        self.worker_names = [f"receiver {index}" for index in range(receivers)]
        self.hashes: list[dict[str, str]] = []
        self._process = process

    def muster(self, *, version: int) -> list[str]:
        """See the port."""
        return self.worker_names

    def join_refit_group(self, spec: RefitGroupSpec) -> ReceiverFleet:
        """See the port."""
        self._ask({"join": asdict(spec), "receivers": len(self.worker_names)})
        return self

    def begin_refit(self, *, mode: str, timeout_s: float, patience_s: float | None) -> PausedEngines:
        """Nothing is sampled here."""
        return PausedEngines(ready=self.worker_names)

    def receive_weights(self, manifest: WeightManifest) -> ReceiverFleet:
        """See the port."""
        self._ask({"receive": asdict(manifest)})
        return self

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """Nothing is served here."""

    def end_refit(self, *, timeout_s: float) -> None:
        """Nothing was paused here."""

    def raise_if_failed(self) -> None:
        """See `refit.fleet.PendingCalls`."""
        if self._process.poll() is not None:
            raise RuntimeError(f"the receivers ended with exit code {self._process.returncode}")

    def wait(self, *, timeout_s: float) -> None:
        """See `refit.fleet.PendingCalls`."""
        assert self._process.stdout is not None
        answer = json.loads(self._process.stdout.readline())
        if answer != "joined":
            self.hashes = answer

    def _ask(self, request: dict[str, object]) -> None:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)


_idle: list[subprocess.Popen[str]] = []
"""The receivers of former jobs of this process: their start costs more than what they receive."""


@contextmanager
def receiver_process() -> Iterator[subprocess.Popen[str]]:
    """Receivers for one job. They end with a job that fails, else with this process, whose end closes their input."""
    process = _idle.pop() if _idle else _start()
    try:
        yield process
    except BaseException:
        process.kill()
        process.wait(timeout=30)
        raise
    _idle.append(process)


def _start() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.functional.mcore.receiver_process"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


if __name__ == "__main__":
    main()
