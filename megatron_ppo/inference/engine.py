"""One vLLM engine: samples responses, scores sequences, and takes new weights without losing a request.

Owns an AsyncLLM, the admission gate in front of it and the weight version that it serves. Driven on one
asyncio loop by `ray_actors.engine_actor` or by a test. Implements `protocol.ports.RolloutEngine`.

Invariants:
- Every sampled token carries the version of the weights that sampled it, stamped by the engine core.
- No request starts on key-value blocks of older weights: a request takes a cache salt that is new with every
  refit, and requests that had not sampled yet when the weights changed are started again under the new salt.
- After a failed refit nothing is served until a complete one has succeeded.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from megatron_ppo.inference.admission import AdmissionGate
from megatron_ppo.inference.isolated_batch import Submission, isolated_batch
from megatron_ppo.inference.outputs import completion_of, prompt_logprobs_of, version_name
from megatron_ppo.inference.request_params import sampling_params, scoring_params
from megatron_ppo.inference.vllm_adapter import (
    EngineCoreMode,
    build_async_llm,
    engine_core_pids,
    freeze,
    unregistered_requests,
    unstarted_requests,
)
from megatron_ppo.protocol.errors import (
    EngineAsideError,
    EngineDeadError,
    GenerationError,
    MegatronPPOError,
    RefitError,
)
from megatron_ppo.protocol.replicas import PauseMode
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings
from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest

logger = logging.getLogger(__name__)

T = TypeVar("T")
_Request = tuple[list[int], SamplingParams]
_WATCH_PERIOD_S = 0.5
_PREPARING_POLL_S = 0.005


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """What the engine is doing. `version` is None until the first refit; `paused`: nothing is admitted."""

    version: int | None
    running: int
    waiting: int
    paused: bool


class VllmEngine:
    """An AsyncLLM behind an admission gate.

    Args:
        model: folder in Hugging Face format.
        dtype: "float32", "bfloat16" or "float16".
        max_model_len: prompt plus response tokens.
        max_num_seqs: most requests inside vLLM at once.
        tensor_parallel_size: workers of this engine.
        engine_core: "process" (stock) or "thread" (cheaper to start, cannot be killed).
        kv_cache_memory_bytes: exact size of the key-value cache; None leaves it to vLLM (GPU only).
        enforce_eager: skip compilation and graph capture.
        extra_engine_args: further fields of vLLM's AsyncEngineArgs.
        stop_token_ids: end a response, besides the end-of-sequence ids of the model's own configuration.
        initial_version: version that the folder's weights count as; None serves nothing before the first
            refit.
        isolated_batches: for deterministic runs. Every call runs alone: its requests are submitted in order while
            the core is paused, with nothing cached, so that the batches that the core forms, and with them every bit
            of the answers, are a function of the call and the weights. Calls take turns.
    """

    def __init__(
        self,
        *,
        model: str,
        dtype: str = "float32",
        max_model_len: int,
        max_num_seqs: int = 64,
        tensor_parallel_size: int = 1,
        engine_core: EngineCoreMode = "process",
        kv_cache_memory_bytes: int | None = None,
        enforce_eager: bool = True,
        extra_engine_args: Mapping[str, object] | None = None,
        stop_token_ids: Sequence[int] = (),
        initial_version: int | None = None,
        isolated_batches: bool = False,
    ) -> None:
        self._build_args = {
            "model": model,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "tensor_parallel_size": tensor_parallel_size,
            "engine_core": engine_core,
            "kv_cache_memory_bytes": kv_cache_memory_bytes,
            "enforce_eager": enforce_eager,
            "extra_engine_args": dict(extra_engine_args or {}),
        }
        self._stop_token_ids = list(stop_token_ids)
        self._version = initial_version
        self._gate = AdmissionGate(max_num_seqs)
        self._isolated_batches = isolated_batches
        self._turn = asyncio.Lock()
        self._llm: AsyncLLM | None = None
        self._request_ids = itertools.count()
        self._refits = 0
        self._refit_mode: PauseMode | None = None
        self._stands_aside = False
        self._weights_complete = False
        self._committed = False
        self._inside: set[str] = set()
        self._to_restart: set[str] = set()

    # --- life -----------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Build vLLM; blocks the event loop for seconds. Serves at once only with an `initial_version`."""
        self._llm = build_async_llm(**self._build_args)  # type: ignore[arg-type]
        if self._version is not None:
            await self._llm.update_weight_version(version_name(self._version))
            self._gate.open()

    async def watch(self) -> None:
        """Run until shutdown. Raises: EngineDeadError within about a second of the core's death."""
        while self._llm is not None:
            self._live()
            await asyncio.sleep(_WATCH_PERIOD_S)

    async def health(self) -> EngineHealth:
        """Raises: EngineDeadError."""
        self._live()
        return EngineHealth(
            version=self._version,
            running=self._gate.running,
            waiting=self._gate.waiting,
            paused=not self._gate.is_open,
        )

    async def serves(self) -> bool:
        """Whether a request would be let in now: the engine is alive and has a whole version. Never raises."""
        return self._llm is not None and not self._llm.errored and self._gate.is_open

    async def answer(self) -> None:
        """A sign of life of the core and its workers, which they give between two steps. Raises: EngineDeadError."""
        await self._while_alive(self._live().collective_rpc("megatron_ppo_worker_pid"))

    async def pids(self) -> tuple[int, ...]:
        """This process first, then the engine core and its workers where they are processes of their own."""
        llm = self._live()
        workers = await llm.collective_rpc("megatron_ppo_worker_pid")
        return tuple(dict.fromkeys((os.getpid(), *engine_core_pids(llm), *workers)))

    async def shutdown(self) -> None:
        """Stop vLLM and its processes. Harmless when repeated."""
        self._gate.close()
        llm, self._llm = self._llm, None
        if llm is not None:
            await asyncio.to_thread(llm.shutdown)

    # --- sampling -------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """One completion per seed, in order. Time in front of a closed gate counts against `deadline_s`.

        Raises: GenerationError after `deadline_s` or on a refused request; EngineDeadError when the core is
            gone; EngineAsideError at once between `stand_aside` and the end of the next refit.
        """
        request = GroupRequest(prompt_token_ids=tuple(prompt_token_ids), seeds=tuple(seeds))
        [completions] = await self.generate_groups([request], sampling=sampling, deadline_s=deadline_s)
        return completions

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """Per request one completion per seed, in order. Time in front of a closed gate counts against `deadline_s`.

        Raises: as `generate`.
        """
        self._live()
        if self._stands_aside:
            raise EngineAsideError("the other engines serve a version that this one does not have yet")
        wanted = [
            (
                list(request.prompt_token_ids),
                sampling_params(sampling, seed=seed, stop_token_ids=self._stop_token_ids),
            )
            for request in requests
            for seed in request.seeds
        ]
        longest = max((len(request.prompt_token_ids) for request in requests), default=0)
        what = f"{len(wanted)} responses to {len(requests)} prompts of up to {longest} tokens"
        outputs = iter(await self._before(deadline_s, wanted, what=what))
        return [
            [completion_of(output.outputs[0]) for output in itertools.islice(outputs, len(request.seeds))]
            for request in requests
        ]

    async def score(self, sequences: Sequence[Sequence[int]], *, deadline_s: float) -> list[list[float]]:
        """Log-probs in nats, at temperature 1 and under the current weights, of every token after the first.

        Computed afresh: vLLM reads no cached prefix for a request that asks for prompt log-probs.
        Raises: as `generate`.
        """
        self._live()
        params = scoring_params()
        outputs = await self._before(
            deadline_s,
            [(list(sequence), params) for sequence in sequences],
            what=f"the scores of {len(sequences)} sequences",
        )
        return [prompt_logprobs_of(output, list(seq)) for output, seq in zip(outputs, sequences, strict=True)]

    async def _before(self, deadline_s: float, requests: list[_Request], *, what: str) -> list[RequestOutput]:
        if not requests:
            return []
        if self._isolated_batches:
            try:
                async with asyncio.timeout(deadline_s):
                    return await self._in_turn(requests)
            except TimeoutError as error:
                raise self._late(len(requests), len(requests), deadline_s, what) from error
        tasks = [asyncio.create_task(self._request(prompt, params)) for prompt, params in requests]
        try:
            _, pending = await asyncio.wait(tasks, timeout=deadline_s, return_when=asyncio.FIRST_EXCEPTION)
            for task in tasks:
                if task.done() and (error := task.exception()) is not None:
                    raise error
            if pending:
                raise self._late(len(pending), len(tasks), deadline_s, what)
            return [task.result() for task in tasks]
        finally:
            # Cancelling a request aborts it in the engine core; one that is done ignores it.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _late(self, unfinished: int, total: int, deadline_s: float, what: str) -> GenerationError:
        return GenerationError(
            f"{unfinished} of {total} requests unfinished after {deadline_s:.1f} s, "
            f"waiting for {what}; gate {'open' if self._gate.is_open else 'closed by a refit'}"
        )

    async def _in_turn(self, requests: list[_Request]) -> list[RequestOutput]:
        """Answer `requests` while nothing else is inside: the whole batch holds one place of the gate."""
        async with self._turn, self._gate.slot(), self._request_errors(f"{len(requests)} requests"):
            submissions = [
                Submission(
                    request_id=str(next(self._request_ids)),
                    prompt=self._salted(prompt),
                    params=params.clone(),
                )
                for prompt, params in requests
            ]
            return await isolated_batch(self._live(), submissions, while_alive=self._while_alive)

    async def _request(self, prompt: list[int], params: SamplingParams) -> RequestOutput:
        while True:
            async with self._gate.slot():
                request_id = str(next(self._request_ids))
                self._inside.add(request_id)
                try:
                    output = await self._run(request_id, prompt, params)
                finally:
                    self._inside.discard(request_id)
                    restart = request_id in self._to_restart
                    self._to_restart.discard(request_id)
            if restart and output.outputs[0].finish_reason == "abort":
                continue
            return output

    async def _run(self, request_id: str, prompt: list[int], params: SamplingParams) -> RequestOutput:
        last: RequestOutput | None = None
        async with self._request_errors(f"a request of {len(prompt)} prompt tokens"):
            async for output in self._live().generate(
                self._salted(prompt), params.clone(), request_id=request_id
            ):
                last = output
        if last is None:
            raise GenerationError("the engine ended a request without an output")
        return last

    def _salted(self, prompt: list[int]) -> TokensPrompt:
        return TokensPrompt(prompt_token_ids=prompt, cache_salt=f"{self._version}-{self._refits}")

    @asynccontextmanager
    async def _request_errors(self, what: str) -> AsyncIterator[None]:
        try:
            yield
        except VllmEngineDeadError as error:
            raise EngineDeadError(f"the vLLM engine core died: {error}") from error
        except MegatronPPOError:
            raise
        except Exception as error:  # vLLM's own tree of request errors has no common base
            self._live()
            raise GenerationError(f"the engine failed {what}: {error!r}") from error

    # --- refit ----------------------------------------------------------------------------------------------

    async def join_refit_group(self, spec: RefitGroupSpec) -> None:
        """Every worker joins the group; returns when all members of it are there. Raises: RefitError."""
        async with self._refit_errors("joining the refit group"):
            llm = self._live()
            await self._while_alive(llm.collective_rpc("megatron_ppo_forget_update"))
            request = WeightTransferInitRequest(init_info=asdict(spec))
            await self._while_alive(llm.init_weight_transfer_engine(request))

    async def begin_refit(self, *, mode: PauseMode, timeout_s: float) -> None:
        """Stop sampling so that weights can change.

        "drain" lets running requests finish under the old weights; "keep" freezes them where they are, and
        starts again those that have not sampled yet. New requests wait in front of the gate in both.

        Raises: RefitError after `timeout_s`; the gate then stays closed.
        """
        llm = self._live()
        self._gate.close()
        self._weights_complete = self._committed = False
        async with self._refit_errors(f"pausing ({mode})"), asyncio.timeout(timeout_s):
            if mode == "drain":
                await self._gate.drained(timeout_s=timeout_s)
            # A request that is still being prepared would reach the frozen engine unseen, and start after the
            # refit on blocks of the old weights.
            while unregistered_requests(llm, self._inside):
                await asyncio.sleep(_PREPARING_POLL_S)
            await self._while_alive(freeze(llm, idle=not self._inside))
            if restart := unstarted_requests(llm, self._inside):
                self._to_restart |= restart
                await llm.abort(restart)
        self._refit_mode = mode

    async def stand_aside(self) -> None:
        """Turn new requests away until the end of the next refit, because one has gone on without this engine.

        `begin_refit` goes on, and so does what runs. Requests that came before and wait in front of the gate stay.
        """
        self._stands_aside = True

    async def receive_weights(self, manifest: WeightManifest) -> None:
        """Take a whole manifest from the sender; runs while the sender sends.

        Raises: RefitError. The engine then stays paused, and a complete transfer over a new generation of the
            group repairs it.
        """
        if self._refit_mode is None:
            raise RefitError("receive_weights was called without begin_refit")
        llm = self._live()
        tensors = [[meta.name, list(meta.shape), meta.dtype] for meta in manifest.tensors]
        update = {
            "tensors": tensors,
            "bucket_bytes": manifest.bucket_bytes,
            "verify_checksum": manifest.verify_checksum,
        }
        self._weights_complete = self._committed = False
        async with self._refit_errors("receiving weights"):
            await self._while_alive(llm.start_weight_update())
            request = WeightTransferUpdateRequest(update_info=update)
            await self._while_alive(llm.update_weights(request))
            await self._while_alive(llm.finish_weight_update())
        self._weights_complete = True

    async def commit_refit(self, *, version: int, recompute_kv: bool) -> None:
        """Make the received weights `version`. Nothing is served yet: another engine may fail here.

        Args:
            recompute_kv: frozen requests compute their key-value cache again under the new weights; otherwise
                they go on with a cache that mixes versions. Cached prefixes are dropped in both cases.
        Raises: RefitError when no complete set of weights has arrived since `begin_refit`.
        """
        if self._refit_mode is None or not self._weights_complete:
            raise RefitError(f"version {version} has not arrived completely; the engine stays paused")
        llm = self._live()
        clear_running = recompute_kv or self._refit_mode == "drain"
        async with self._refit_errors(f"switching to version {version}"):
            await self._while_alive(llm.update_weight_version(version_name(version)))
            # With requests that keep their blocks this does nothing; the new salt hides the old blocks then.
            await self._while_alive(llm.reset_prefix_cache(reset_running_requests=clear_running))
        self._version = version
        self._refits += 1
        self._committed = True

    async def end_refit(self) -> None:
        """Let requests in again. Raises: RefitError when no version was committed since `begin_refit`."""
        if self._refit_mode is None or not self._committed:
            raise RefitError("no version was committed; the engine stays paused")
        async with self._refit_errors("letting requests in again"):
            await self._while_alive(self._live().resume_generation())
        self._refit_mode = None
        self._weights_complete = self._committed = self._stands_aside = False
        self._gate.open()

    @asynccontextmanager
    async def _refit_errors(self, doing: str) -> AsyncIterator[None]:
        try:
            yield
        except VllmEngineDeadError as error:
            raise EngineDeadError(f"the vLLM engine core died while {doing}: {error}") from error
        except EngineDeadError:
            raise
        except TimeoutError as error:
            raise RefitError(f"the engine ran out of time while {doing}") from error
        except Exception as error:  # worker errors cross vLLM's RPC as plain Exception
            self._live()
            raise RefitError(f"the engine failed while {doing}: {error}") from error

    async def _while_alive(self, call: Coroutine[Any, Any, T]) -> T:
        """The result of a control call. vLLM (0.32) answers none that is open when its core dies."""
        task = asyncio.create_task(call)
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=_WATCH_PERIOD_S)
                if not task.done():
                    self._live()
            return task.result()
        finally:
            task.cancel()

    def _live(self) -> AsyncLLM:
        if self._llm is None:
            raise EngineDeadError(
                "the engine is not running: start() has not returned, or shutdown() was called"
            )
        if self._llm.errored:
            raise EngineDeadError("the vLLM engine core died")
        return self._llm
