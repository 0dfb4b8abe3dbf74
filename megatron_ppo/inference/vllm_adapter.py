"""The functions that touch parts of vLLM which are not its public API, each naming the versions it was read
against.

Driven by `inference.engine` alone; everything else there uses AsyncLLM's documented methods.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

from vllm import SamplingParams
from vllm.config import WeightTransferConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector

from megatron_ppo.inference.answering_executor import AnsweringExecutor
from megatron_ppo.inference.thread_core import engine_core_in_thread
from megatron_ppo.inference.worker_extension import BACKEND, WorkerExtension
from megatron_ppo.protocol.errors import ConfigError

EngineCoreMode = Literal["process", "thread"]


def build_async_llm(
    *,
    model: str,
    dtype: str,
    max_model_len: int,
    max_num_seqs: int,
    tensor_parallel_size: int,
    engine_core: EngineCoreMode,
    kv_cache_memory_bytes: int | None,
    enforce_eager: bool,
    extra_engine_args: Mapping[str, object],
) -> AsyncLLM:
    """Build and start vLLM. Blocks for seconds; call it on the event loop that will use the engine.

    Raises: ConfigError on CPU without an explicit key-value cache size.
    """
    if kv_cache_memory_bytes is None and current_platform.is_cpu():
        raise ConfigError(
            "inference.engine.kv_cache_memory_bytes must be set on CPU, or vLLM takes 92 % of all memory"
        )
    args: dict[str, object] = {
        "model": model,
        "dtype": dtype,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "tensor_parallel_size": tensor_parallel_size,
        "distributed_executor_backend": _executor(tensor_parallel_size),
        "kv_cache_memory_bytes": kv_cache_memory_bytes,
        "enforce_eager": enforce_eager,
        # Token ids in, token ids out: the engine needs no tokenizer, and end-of-sequence comes from the
        # model's own configuration.
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        # The log-prob of the distribution that a token was sampled from, temperature included.
        "logprobs_mode": "processed_logprobs",
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        **extra_engine_args,
    }
    in_thread = engine_core_in_thread() if engine_core == "thread" else contextlib.nullcontext()
    with in_thread:
        llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**args))  # type: ignore[arg-type]
    if engine_core == "process":
        for process in _core_processes(llm):
            # Its end is SIGTERM, and SIGKILL 5 s later; the cores of a run inherit that they are deaf to the first.
            process.terminate = process.kill
    return llm


def _executor(tensor_parallel_size: int) -> str | type[object]:
    """vLLM's name, or the class, of what runs the workers."""
    if tensor_parallel_size == 1:
        return "uni"
    if not current_platform.is_cpu():
        return AnsweringExecutor
    from megatron_ppo.inference.sleeping_executor import SleepingExecutor  # changes vLLM where it is imported

    return SleepingExecutor


async def submit(
    llm: AsyncLLM, request_id: str, prompt: TokensPrompt, params: SamplingParams
) -> RequestOutputCollector:
    """Hand one request to the core; on return it is in the core's queue, behind those submitted before.

    vllm 0.32 and 0.33: the first half of `AsyncLLM.generate`, which does not say when it has got so far.
    """
    return await llm.add_request(request_id, prompt, params)


async def finished_output(answer: RequestOutputCollector) -> RequestOutput:
    """Wait for the end of a submitted request. Raises: what the core failed it with, or died of."""
    output = await answer.get()
    while not output.finished:
        output = await answer.get()
    if not isinstance(output, RequestOutput):
        raise TypeError(f"a request to sample was answered with a {type(output).__name__}")
    return output


def unregistered_requests(llm: AsyncLLM, request_ids: Collection[str]) -> set[str]:
    """Those of `request_ids` that `unstarted_requests` cannot see: still being prepared, or finished just now.

    vllm 0.32 and 0.33 prepare a prompt in a thread, between `generate` and the entry in `request_states`.
    """
    states = llm.output_processor.request_states.values()
    return set(request_ids) - {state.external_req_id for state in states}


def unstarted_requests(llm: AsyncLLM, request_ids: Collection[str]) -> set[str]:
    """Those of `request_ids` whose first token has not come back yet.

    vllm 0.32 and 0.33 keep the flag in `output_processor.request_states`, keyed by an internal id.
    """
    wanted = set(request_ids)
    return {
        state.external_req_id
        for state in llm.output_processor.request_states.values()
        if state.is_prefilling and state.external_req_id in wanted
    }


async def freeze(llm: AsyncLLM, *, idle: bool) -> None:
    """Stop scheduling and keep requests and caches as they are.

    Args:
        idle: no request is running. vllm 0.32 and 0.33 end `pause_generation` with a sleep of 20 ms, in which outputs
            of running requests arrive; without any, that is 20 ms in which nothing is served.
    """
    if idle:
        await llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)
    else:
        await llm.pause_generation(mode="keep", clear_cache=False)


def engine_core_pids(llm: AsyncLLM) -> tuple[int, ...]:
    """Process ids of the engine cores; empty when the core is a thread of this process."""
    return tuple(process.pid for process in _core_processes(llm) if process.pid is not None)


def _core_processes(llm: AsyncLLM) -> Sequence[Any]:
    """`multiprocessing.Process` per core, or the thread in its place; vllm 0.32 and 0.33 keep them there."""
    manager = llm.engine_core.resources.engine_manager
    return [] if manager is None else manager.processes  # type: ignore[no-any-return]
