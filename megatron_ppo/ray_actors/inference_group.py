"""The inference group: engine replicas in Ray actors, as rank 0 (blocking) and the collector (async) see
them.

`InferenceGroup` lives on trainer rank 0, starts and ends the actors and implements `refit.fleet.EngineFleet`.
`RayEngineClient` is a `protocol.ports.RolloutEngine` that may be pickled into another actor.
Invariant: every wait has a limit, and a replica's own error keeps its type on the way to the caller.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from megatron_ppo.protocol.errors import EngineDeadError, MegatronPPOError, WaitTimeoutError
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings
from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest
from megatron_ppo.ray_actors.engine_actor import EngineActor

logger = logging.getLogger(__name__)

VLLM_ENGINE = "megatron_ppo.inference.engine.VllmEngine"
# The engine keeps its own deadlines; this much later its silence itself is the error.
_GRACE_S = 30.0
_SHUTDOWN_S = 15.0


@contextmanager
def _replica_errors(replica: int, what: str) -> Iterator[None]:
    try:
        yield
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, MegatronPPOError):
            raise type(cause)(f"engine replica {replica}: {cause}") from None
        raise EngineDeadError(f"engine replica {replica} failed during {what}: {error}") from error
    except RayActorError as error:
        raise EngineDeadError(f"the process of engine replica {replica} is gone ({what}): {error}") from error
    except GetTimeoutError:
        raise WaitTimeoutError(f"engine replica {replica} did not answer in time: {what}") from None


class RayEngineClient:
    """One replica as a `RolloutEngine`. Cheap to pickle."""

    def __init__(self, *, replica: int, handle: Any) -> None:
        self._replica = replica
        self._handle = handle

    async def generate(
        self,
        prompt_token_ids: Sequence[int],
        *,
        seeds: Sequence[int],
        sampling: SamplingSettings,
        deadline_s: float,
    ) -> list[Completion]:
        """See `RolloutEngine.generate`. Cancelling it aborts the requests in the engine."""
        completions: list[Completion] = await self._call(
            "generate", list(prompt_token_ids), seeds=list(seeds), sampling=sampling, deadline_s=deadline_s
        )
        return completions

    async def generate_groups(
        self, requests: Sequence[GroupRequest], *, sampling: SamplingSettings, deadline_s: float
    ) -> list[list[Completion]]:
        """See `WholeStepEngine.generate_groups`. Cancelling it aborts the requests in the engine."""
        groups: list[list[Completion]] = await self._call(
            "generate_groups", list(requests), sampling=sampling, deadline_s=deadline_s
        )
        return groups

    async def _call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        ref = self._handle.call.remote(method, *args, **kwargs)
        try:
            with _replica_errors(self._replica, method):
                return await ref
        except asyncio.CancelledError:
            ray.cancel(ref)
            raise


class RayPendingCalls:
    """One running call per replica; implements `refit.fleet.PendingCalls`."""

    def __init__(self, what: str, refs: Sequence[Any]) -> None:
        self._what = what
        self._refs = list(refs)
        self._replica_of = {ref: replica for replica, ref in enumerate(self._refs)}
        self._open = list(self._refs)

    def raise_if_failed(self) -> None:
        """Raise the error of a call that has failed by now."""
        if not self._open:
            return
        ready, self._open = ray.wait(self._open, num_returns=len(self._open), timeout=0)
        for ref in ready:
            with _replica_errors(self._replica_of[ref], self._what):
                ray.get(ref)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for all calls; the first failure of any ends the wait."""
        self.results(timeout_s=timeout_s)

    def results(self, *, timeout_s: float) -> list[Any]:
        """The calls' results in the order of the replicas. Raises: as `wait`."""
        deadline = time.monotonic() + timeout_s
        while self._open:
            ready, self._open = ray.wait(self._open, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = sorted(self._replica_of[ref] for ref in self._open)
                raise WaitTimeoutError(
                    f"waited {timeout_s:.0f} s for {self._what}; engine replicas {waiting} have not answered"
                )
            for ref in ready:
                with _replica_errors(self._replica_of[ref], self._what):
                    ray.get(ref)
        return ray.get(self._refs)  # type: ignore[no-any-return]


class InferenceGroup:
    """Starts, steers and ends the replicas. Needs a connected Ray cluster.

    Args:
        replicas: engines.
        tensor_parallel_size: workers of each engine.
        engine_kwargs: arguments of every engine besides `tensor_parallel_size`.
        env: environment of the actors' processes, read by vLLM while it is imported.
        log_dir: one log file per replica, `engine_<replica>.log`.
        heartbeat_dir: one file of signs of life per replica, `engine_<replica>.json`; None writes none.
        gpus_per_worker: what Ray reserves; 0 on CPU.
        engine_target: dotted path of the engine's class.
    """

    def __init__(
        self,
        *,
        replicas: int,
        tensor_parallel_size: int = 1,
        engine_kwargs: Mapping[str, object],
        env: Mapping[str, str],
        log_dir: Path,
        heartbeat_dir: Path | None = None,
        start_timeout_s: float = 600.0,
        gpus_per_worker: float = 0.0,
        engine_target: str = VLLM_ENGINE,
    ) -> None:
        self._tensor_parallel_size = tensor_parallel_size
        self._start_timeout_s = start_timeout_s
        actor = ray.remote(
            num_cpus=0,
            num_gpus=gpus_per_worker * tensor_parallel_size,
            max_concurrency=1000,
            max_restarts=0,
            runtime_env={"env_vars": dict(env)},
        )(EngineActor)
        kwargs = {**engine_kwargs, "tensor_parallel_size": tensor_parallel_size}
        self._handles = [
            actor.remote(
                target=engine_target,
                kwargs=kwargs,
                log_path=str(log_dir / f"engine_{replica}.log"),
                heartbeat_path=str(heartbeat_dir / f"engine_{replica}.json") if heartbeat_dir else None,
            )
            for replica in range(replicas)
        ]

    # The actors' processes start in the constructor; `start` only waits. Between the two the caller may build
    # models.
    def start(self) -> None:
        """Build the engines and wait until all are up. Raises: EngineDeadError, WaitTimeoutError."""
        self._call_all("start", what="the engines to start").wait(timeout_s=self._start_timeout_s)

    def clients(self) -> list[RayEngineClient]:
        """One client per replica, for the collector."""
        return [
            RayEngineClient(replica=replica, handle=handle) for replica, handle in enumerate(self._handles)
        ]

    def watch_refs(self) -> dict[Any, str]:
        """Object ref of a never-ending call -> name of the replica; the ref is ready only when it is dead."""
        return {
            handle.call.remote("watch"): f"engine replica {replica}"
            for replica, handle in enumerate(self._handles)
        }

    def health(self, *, timeout_s: float = 30.0) -> list[Any]:
        """`inference.engine.EngineHealth` per replica. Raises: EngineDeadError."""
        return self._call_all("health", what="the engines' health").results(timeout_s=timeout_s)

    def pids(self, *, timeout_s: float = 30.0) -> list[tuple[int, ...]]:
        """Process ids per replica, the actor's first."""
        return self._call_all("pids", what="the engines' process ids").results(timeout_s=timeout_s)

    def shutdown(self) -> None:
        """End the engines and their processes. Harmless when repeated and when replicas are dead already."""
        handles, self._handles = self._handles, []
        pending = [handle.call.remote("shutdown") for handle in handles]
        if pending:
            _, late = ray.wait(pending, num_returns=len(pending), timeout=_SHUTDOWN_S)
            if late:
                logger.warning(
                    "%d of %d engines did not shut down in time and are killed", len(late), len(pending)
                )
        for handle in handles:
            ray.kill(handle)

    # Rank 0's own requests

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingSettings,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        """One completion per prompt, in order; prompts are dealt to the replicas in turn, in one call each.

        Raises: GenerationError, EngineDeadError, WaitTimeoutError.
        """
        requests = [
            GroupRequest(prompt_token_ids=tuple(prompt), seeds=(seed,))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        replicas = len(self._handles)
        calls = RayPendingCalls(
            f"generation for {len(requests)} prompts",
            [
                handle.call.remote(
                    "generate_groups", requests[replica::replicas], sampling=sampling, deadline_s=deadline_s
                )
                for replica, handle in enumerate(self._handles)
            ],
        )
        shares = calls.results(timeout_s=deadline_s + _GRACE_S)
        return [shares[i % replicas][i // replicas][0] for i in range(len(requests))]

    def score(self, sequences: Sequence[Sequence[int]], *, deadline_s: float) -> list[list[list[float]]]:
        """Per replica, per sequence: nats at temperature 1 of every token after the first."""
        calls = self._call_all(
            "score",
            [list(sequence) for sequence in sequences],
            deadline_s=deadline_s,
            what="the engines to score",
        )
        return calls.results(timeout_s=deadline_s + _GRACE_S)

    # refit.fleet.EngineFleet

    @property
    def worker_names(self) -> list[str]:
        """Workers of all replicas, those of replica 0 first."""
        workers = range(self._tensor_parallel_size)
        return [
            f"engine replica {replica}" + (f", worker {worker}" if len(workers) > 1 else "")
            for replica in range(len(self._handles))
            for worker in workers
        ]

    def join_refit_group(self, spec: RefitGroupSpec) -> RayPendingCalls:
        """Replica r takes the ranks `spec.rank_offset` + r·tp and following."""
        return RayPendingCalls(
            "the engines to join the refit group",
            [
                handle.call.remote(
                    "join_refit_group",
                    replace(spec, rank_offset=spec.rank_offset + replica * self._tensor_parallel_size),
                )
                for replica, handle in enumerate(self._handles)
            ],
        )

    def begin_refit(self, *, mode: Literal["drain", "keep"], timeout_s: float) -> None:
        """Stop sampling on every replica."""
        calls = self._call_all(
            "begin_refit", mode=mode, timeout_s=timeout_s, what=f"the engines to pause ({mode})"
        )
        calls.wait(timeout_s=timeout_s + _GRACE_S)

    def receive_weights(self, manifest: WeightManifest) -> RayPendingCalls:
        """Let every replica receive."""
        return self._call_all("receive_weights", manifest, what="the engines to receive weights")

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """Make the received weights `version` on every replica."""
        self._call_all(
            "commit_refit",
            version=version,
            recompute_kv=recompute_kv,
            what=f"the engines to switch to version {version}",
        ).wait(timeout_s=timeout_s)

    def end_refit(self, *, timeout_s: float) -> None:
        """Let requests in again on every replica."""
        self._call_all("end_refit", what="the engines to go on").wait(timeout_s=timeout_s)

    def _call_all(self, method: str, *args: object, what: str, **kwargs: object) -> RayPendingCalls:
        return RayPendingCalls(
            what, [handle.call.remote(method, *args, **kwargs) for handle in self._handles]
        )
