"""A vLLM engine, a sender and Hugging Face models as the oracle, wired like a run but without a trainer.

The engine's core is a thread, so one process imports vLLM once for the whole module of tests.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeVar

from transformers import Qwen2ForCausalLM

from megatron_ppo.inference.engine import VllmEngine
from megatron_ppo.protocol.replicas import PausedEngines
from megatron_ppo.protocol.trajectory import Completion, SamplingSettings
from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.transport.broadcast_group import BroadcastStore
from tests.functional.inference.hf_oracle import BUCKET_BYTES, MAX_MODEL_LEN, HfSource, tiny_model

T = TypeVar("T")

TIMEOUT_S = 60.0


class LoopThread:
    """An event loop in a thread of its own, as the engine has one in its actor."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="engine-loop", daemon=True)
        self._thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run it beside the caller."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T], *, timeout_s: float = TIMEOUT_S) -> T:
        """Run it and wait."""
        return self.start(coroutine).result(timeout_s)

    def close(self) -> None:
        """Stop the loop."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=10)


class LocalCalls:
    """`refit.fleet.PendingCalls` over one future."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def raise_if_failed(self) -> None:
        """See the port."""
        if self._future.done():
            self._future.result()

    def wait(self, *, timeout_s: float) -> None:
        """See the port."""
        self._future.result(timeout_s)


class LocalFleet:
    """`refit.fleet.EngineFleet` over one engine of this process.

    `tell` lets a test hand the engine another manifest than the sender has.
    """

    def __init__(self, engine: VllmEngine, loop: LoopThread, num_workers: int) -> None:
        self._engine = engine
        self._loop = loop
        self.worker_names = [f"worker {rank}" for rank in range(num_workers)]
        self.tell = lambda manifest: manifest

    def muster(self, *, version: int) -> list[str]:
        """See the port."""
        return self.worker_names

    def join_refit_group(self, spec: RefitGroupSpec) -> LocalCalls:
        """See the port."""
        return LocalCalls(self._loop.start(self._engine.join_refit_group(spec)))

    def begin_refit(
        self, *, mode: Literal["drain", "keep"], timeout_s: float, patience_s: float | None
    ) -> PausedEngines:
        """See the port."""
        self._loop.run(self._engine.begin_refit(mode=mode, timeout_s=timeout_s))
        return PausedEngines(ready=self.worker_names)

    def receive_weights(self, manifest: WeightManifest) -> LocalCalls:
        """See the port."""
        return LocalCalls(self._loop.start(self._engine.receive_weights(self.tell(manifest))))

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """See the port."""
        self._loop.run(self._engine.commit_refit(version=version, recompute_kv=recompute_kv))

    def end_refit(self, *, timeout_s: float) -> None:
        """See the port."""
        self._loop.run(self._engine.end_refit())


class EngineRig:
    """An engine that serves `models[0]` as version 0 to begin with; every publish counts up."""

    def __init__(
        self, engine: VllmEngine, loop: LoopThread, models: Sequence[Qwen2ForCausalLM], num_workers: int
    ) -> None:
        self.engine = engine
        self.loop = loop
        self.models = models
        self.fleet = LocalFleet(engine, loop, num_workers)
        self.version = 0

    @contextmanager
    def refit(
        self,
        source: object,
        *,
        in_flight: bool = False,
        recompute_kv: bool = False,
        verify_checksum: bool = False,
        timeout_s: float = TIMEOUT_S,
    ) -> Iterator[BroadcastRefit]:
        """A refit over a group of its own."""
        store = BroadcastStore(timeout_s=timeout_s)
        refit = BroadcastRefit(
            source=source,
            sink=self.fleet,
            store=store,
            bucket_bytes=BUCKET_BYTES,
            verify_checksum=verify_checksum,
            in_flight=in_flight,
            recompute_kv=recompute_kv,
            timeout_s=timeout_s,
        )
        try:
            yield refit
        finally:
            refit.close()

    def publish(self, model: Qwen2ForCausalLM, *, in_flight: bool = False, recompute_kv: bool = False) -> int:
        """Make the engine serve `model`; returns the new version."""
        self.version += 1
        with self.refit(HfSource(model), in_flight=in_flight, recompute_kv=recompute_kv) as refit:
            refit.push(version=self.version)
        return self.version

    def generate(
        self,
        prompt: Sequence[int],
        *,
        seeds: Sequence[int] = (1,),
        max_new_tokens: int = 20,
        temperature: float = 1.0,
        deadline_s: float = TIMEOUT_S,
    ) -> list[Completion]:
        """Completions of one prompt."""
        return self.begin(
            prompt, seeds=seeds, max_new_tokens=max_new_tokens, temperature=temperature, deadline_s=deadline_s
        ).result(2 * TIMEOUT_S)

    def begin(
        self,
        prompt: Sequence[int],
        *,
        seeds: Sequence[int] = (1,),
        max_new_tokens: int = 20,
        temperature: float = 1.0,
        deadline_s: float = TIMEOUT_S,
    ) -> Future[list[Completion]]:
        """The same, running beside the caller."""
        sampling = SamplingSettings(max_new_tokens=max_new_tokens, temperature=temperature)
        return self.loop.start(
            self.engine.generate(prompt, seeds=seeds, sampling=sampling, deadline_s=deadline_s)
        )

    @staticmethod
    def finish(futures: Sequence[Future[T]]) -> list[T]:
        """Results of all, in order."""
        wait(futures, timeout=2 * TIMEOUT_S)
        return [future.result(0) for future in futures]


@contextmanager
def running_rig(
    folder: Path, *, tied: bool, tensor_parallel_size: int = 1, **options: Any
) -> Iterator[EngineRig]:
    """A rig with two models of the same shape; `options` of `running_rig_of`."""
    models = [tiny_model(seed, tied=tied) for seed in (1, 2)]
    with running_rig_of(models, folder, tensor_parallel_size=tensor_parallel_size, **options) as rig:
        yield rig


@contextmanager
def running_rig_of(
    models: Sequence[Any],
    folder: Path,
    *,
    tensor_parallel_size: int = 1,
    max_model_len: int = MAX_MODEL_LEN,
    isolated_batches: bool = False,
    extra_engine_args: Mapping[str, object] | None = None,
) -> Iterator[EngineRig]:
    """A rig with the given transformers models; `folder` holds the first, or is filled with it, as version 0."""
    if not (folder / "config.json").exists():
        models[0].save_pretrained(folder)
    loop = LoopThread()
    engine = VllmEngine(
        model=str(folder),
        max_model_len=max_model_len,
        max_num_seqs=8,
        tensor_parallel_size=tensor_parallel_size,
        engine_core="thread",
        kv_cache_memory_bytes=64 * 2**20,
        initial_version=0,
        isolated_batches=isolated_batches,
        extra_engine_args=extra_engine_args,
    )
    loop.run(engine.start(), timeout_s=240)
    try:
        yield EngineRig(engine, loop, models, tensor_parallel_size)
    finally:
        loop.run(engine.shutdown())
        loop.close()
