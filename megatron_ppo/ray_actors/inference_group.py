"""The inference group: engine replicas in Ray actors, as rank 0 (blocking) and the collector (async) see
them.

`InferenceGroup` lives on trainer rank 0, starts, rebuilds and ends the actors and implements `refit.fleet.EngineFleet`
and `engine_keeper.Rebuildable`.
Invariant: every wait has a limit, and a replica's own error keeps its type on the way to the caller.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

from megatron_ppo.protocol.errors import EngineDeadError, MegatronPPOError, WaitTimeoutError
from megatron_ppo.protocol.replicas import Member, PausedEngines, PauseMode, ReplicaState, ReplicaTable
from megatron_ppo.protocol.trajectory import Completion, GroupRequest, SamplingSettings
from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest
from megatron_ppo.ray_actors.engine_actor import EngineActor
from megatron_ppo.ray_actors.engine_client import RayEngineClient, replica_errors
from megatron_ppo.ray_actors.pauses import GRACE_S, Pauses
from megatron_ppo.ray_actors.replica_processes import ReplicaProcesses

logger = logging.getLogger(__name__)

VLLM_ENGINE = "megatron_ppo.inference.engine.VllmEngine"
_SHUTDOWN_S = 15.0
_POLL_S = 0.5
_IDENTITY_S = 5.0


@contextmanager
def _noting_death(table: ReplicaTable, member: Member, what: str) -> Iterator[None]:
    try:
        with replica_errors(member.replica, what):
            yield
    except EngineDeadError as error:
        table.died(member, str(error))
        raise


class RayPendingCalls:
    """One running call per replica; implements `refit.fleet.PendingCalls`.

    Args:
        what: what is waited for, in messages.   members: whom the calls were made to.   refs: the calls.
        table: told of the deaths that show in the answers.
    """

    def __init__(
        self, what: str, *, members: Sequence[Member], refs: Sequence[Any], table: ReplicaTable
    ) -> None:
        self._what = what
        self._refs = list(refs)
        self._member_of = dict(zip(self._refs, members, strict=True))
        self._table = table
        self._open = list(self._refs)

    def raise_if_failed(self) -> None:
        """Raise the error of a call that has failed by now."""
        if not self._open:
            return
        ready, self._open = ray.wait(self._open, num_returns=len(self._open), timeout=0)
        for ref in ready:
            self._get(ref)

    def wait(self, *, timeout_s: float) -> None:
        """Wait for all calls; the first failure of any ends the wait."""
        self.results(timeout_s=timeout_s)

    def results(self, *, timeout_s: float) -> list[Any]:
        """The calls' results in the order of the replicas. Raises: as `wait`."""
        deadline = time.monotonic() + timeout_s
        while self._open:
            ready, self._open = ray.wait(self._open, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                waiting = sorted(self._member_of[ref].replica for ref in self._open)
                raise WaitTimeoutError(
                    f"waited {timeout_s:.0f} s for {self._what}; engine replicas {waiting} have not answered"
                )
            for ref in ready:
                self._get(ref)
        return ray.get(self._refs)  # type: ignore[no-any-return]

    def _get(self, ref: Any) -> None:
        with _noting_death(self._table, self._member_of[ref], self._what):
            ray.get(ref)


class RayQuestion:
    """One running call for a sign of life; implements `liveness.Question`."""

    def __init__(self, ref: Any) -> None:
        self._ref = ref

    @property
    def answered(self) -> bool:
        """See `Question.answered`."""
        return bool(ray.wait([self._ref], timeout=0)[0])


class RayPauseCall:
    """One replica's running call to pause; implements `pauses.PauseCall`.

    Args:
        table: told of the death that shows in the answer.
    """

    def __init__(self, *, member: Member, ref: Any, table: ReplicaTable) -> None:
        self.ref = ref
        self._member = member
        self._table = table

    def done(self) -> bool:
        """See `PauseCall.done`."""
        return bool(ray.wait([self.ref], timeout=0)[0])

    def result(self) -> None:
        """See `PauseCall.result`."""
        with _noting_death(self._table, self._member, "the engines to pause"):
            ray.get(self.ref)


def _identity(handle: Any) -> str | None:
    """Of the process behind an actor's handle; None while there is none. Raises: GetTimeoutError."""
    try:
        return str(ray.get(handle.identity.remote(), timeout=_IDENTITY_S))
    except GetTimeoutError:
        raise
    except RayError:
        return None


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
        max_restarts: how often each replica may be built again after it has died, see `engine_keeper`.
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
        max_restarts: int = 0,
    ) -> None:
        self.table = ReplicaTable(replicas=replicas, max_restarts=max_restarts)
        self._tensor_parallel_size = tensor_parallel_size
        self._start_timeout_s = start_timeout_s
        actor = ray.remote(
            num_cpus=0,
            num_gpus=gpus_per_worker * tensor_parallel_size,
            # Calls that wait at the gate count, too. One that asks for a sign of life or brings weights must never
            # queue behind them, whatever the collector sends: the engine would seem to hang.
            max_concurrency=100_000,
            # Ray keeps the handles valid; how often is counted in the table, together with the deaths of cores.
            max_restarts=-1 if max_restarts else 0,
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
        self._pauses = Pauses(self)
        self._refitted: tuple[Member, ...] = ()
        self._committed: int | None = None
        self._identities: dict[int, str] = {}
        self._watches: dict[int, tuple[Member, Any]] = {}
        self._processes = ReplicaProcesses()

    # The actors' processes start in the constructor; `start` only waits. Between the two the caller may build
    # models.
    def start(self) -> None:
        """Build the engines and wait until all are up. Raises: EngineDeadError, WaitTimeoutError."""
        self._call_all("start", what="the engines to start").wait(timeout_s=self._start_timeout_s)
        for replica, handle in enumerate(self._handles):
            with replica_errors(replica, "its start"):
                self._identities[replica] = ray.get(handle.identity.remote(), timeout=GRACE_S)
                self._remember_processes(replica)
            self.table.built(replica)

    def clients(self) -> list[RayEngineClient]:
        """One client per replica, for the collector."""
        return [
            RayEngineClient(replica=replica, handle=handle) for replica, handle in enumerate(self._handles)
        ]

    # chaos.engines.MortalEngines

    def serving(self) -> list[int]:
        """Replicas that serve."""
        return [member.replica for member in self.table.members(ReplicaState.HEALTHY)]

    def kill(self, replica: int) -> None:
        """Kill the process of a replica without a warning; returns at once."""
        ray.kill(self._handles[replica], no_restart=False)

    # engine_keeper.Rebuildable

    def wait_for_death(self, member: Member, *, timeout_s: float) -> str | None:
        """Why `member` has died, or counts as dead; None when it is alive after `timeout_s`."""
        watched, ref = self._watches.get(member.replica, (None, None))
        if watched != member:
            ref = self._call(member, "watch")
            self._watches[member.replica] = (member, ref)
        if not ray.wait([ref], timeout=timeout_s)[0]:
            return self._pauses.look(member)
        try:
            with replica_errors(member.replica, "its watch"):
                ray.get(ref)
        except MegatronPPOError as error:
            return f"{type(error).__name__}: {error}"
        return "it ended by itself"

    def ask(self, member: Member) -> RayQuestion:
        """Ask the core of `member`, and every worker of it, for a sign of life."""
        return RayQuestion(self._call(member, "answer"))

    def kill_all(self, member: Member) -> None:
        """SIGKILL every process of `member`, also where they stand still."""
        self._processes.kill(member)

    def rebuild(self, replica: int, *, stopping: Callable[[], bool] = lambda: False) -> None:
        """End what is left of `replica`, let Ray start its actor again and build the engine there.

        Raises: EngineDeadError, WaitTimeoutError.
        """
        deadline = time.monotonic() + self._start_timeout_s
        self._processes.kill_all_of(replica)
        self._await_new_process(replica, deadline, stopping)
        if stopping():
            return
        start = self._handles[replica].call.remote("start")
        while not stopping() and not ray.wait([start], timeout=_POLL_S)[0]:
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"engine replica {replica} was not built again within {self._start_timeout_s:.0f} s"
                )
        if not stopping():
            with replica_errors(replica, "its rebuild"):
                ray.get(start)
                self._remember_processes(replica)
        # A watch that was begun in between is one of the old process.
        self._watches.pop(replica, None)

    def _await_new_process(self, replica: int, deadline: float, stopping: Callable[[], bool]) -> None:
        """Ray has seen by itself that a process died; that a core died in a living process it does not know."""
        handle, before = self._handles[replica], self._identities[replica]
        found: str | None = None
        # One that is being started answers as little as one that hangs.
        if not self._processes.were_killed(replica):
            found = before
            with suppress(GetTimeoutError):
                found = _identity(handle)
            if found == before:
                ray.kill(handle, no_restart=False)
        while found is None or found == before:
            if stopping():
                return
            if time.monotonic() > deadline:
                raise WaitTimeoutError(
                    f"engine replica {replica}: its process was not started again within "
                    f"{self._start_timeout_s:.0f} s"
                )
            time.sleep(_POLL_S)
            with suppress(GetTimeoutError):
                found = _identity(handle)
        self._identities[replica] = found

    def _remember_processes(self, replica: int) -> None:
        handle = self._handles[replica]
        found = ray.get(handle.processes.remote(), timeout=GRACE_S)
        self._processes.remember(self.table.member(replica), found)

    def end_silent(self, *, deadline_s: float) -> None:
        """Kill the replicas of the last refit that run but do not answer within `deadline_s`, and tell the table.

        For a refit that has failed without a death: the workers of those that are well have left the group by then.
        """
        up = set(self.table.live())
        asked = {self._call(member, "answer"): member for member in self._refitted if member in up}
        if not asked:
            return
        _, silent = ray.wait(list(asked), num_returns=len(asked), timeout=deadline_s)
        for ref in silent:
            cause = f"it hangs: its core did not answer within {deadline_s:.0f} s after a refit that failed"
            self.table.died(asked[ref], cause)
            self.kill_all(asked[ref])

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
        """One completion per prompt, in order; prompts are dealt to the serving replicas in turn, in one call each.

        Those of a replica that dies meanwhile are dealt again.
        Raises: GenerationError, WaitTimeoutError; EngineDeadError when no replica serves.
        """
        deadline = time.monotonic() + deadline_s + GRACE_S
        requests = [
            GroupRequest(prompt_token_ids=tuple(prompt), seeds=(seed,))
            for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        found: dict[int, Completion] = {}
        while left := [i for i in range(len(requests)) if i not in found]:
            members = self._serving(f"generation for {len(requests)} prompts")
            shares = [left[position :: len(members)] for position in range(len(members))]
            refs = [
                self._call(
                    member,
                    "generate_groups",
                    [requests[i] for i in share],
                    sampling=sampling,
                    deadline_s=deadline_s,
                )
                for member, share in zip(members, shares, strict=True)
            ]
            for member, share, ref in zip(members, shares, refs, strict=True):
                with suppress(EngineDeadError), _noting_death(self.table, member, "generation"):
                    answers = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
                    found |= {i: answer for i, [answer] in zip(share, answers, strict=True)}
        return [found[i] for i in range(len(requests))]

    def score(self, sequences: Sequence[Sequence[int]], *, deadline_s: float) -> dict[int, list[list[float]]]:
        """Per serving replica, per sequence: nats at temperature 1 of every token after the first.

        Raises: GenerationError, WaitTimeoutError; EngineDeadError when one of them dies, or none serves.
        """
        members = self._serving(f"the scores of {len(sequences)} sequences")
        calls = self._call_each(
            members,
            "score",
            [list(sequence) for sequence in sequences],
            deadline_s=deadline_s,
            what="the engines to score",
        )
        scores = calls.results(timeout_s=deadline_s + GRACE_S)
        return {member.replica: rows for member, rows in zip(members, scores, strict=True)}

    def _serving(self, what: str) -> tuple[Member, ...]:
        members = self.table.members(ReplicaState.HEALTHY)
        if not members:
            raise EngineDeadError(f"no engine replica serves, for {what}; they are: {self.table.describe()}")
        return members

    # refit.fleet.EngineFleet

    def muster(self, *, version: int) -> list[str]:
        """See `EngineFleet.muster`."""
        table = self.table
        table.wait_for(
            lambda: bool(table.lacking(version)) or table.exhausted is not None,
            timeout_s=self._start_timeout_s,
        )
        self._refitted = table.lacking(version)
        if not self._refitted:
            raise EngineDeadError(
                table.exhausted
                or f"no engine replica came up within {self._start_timeout_s:.0f} s: {table.describe()}"
            )
        return self._names_of_refitted()

    def _names_of_refitted(self) -> list[str]:
        workers = range(self._tensor_parallel_size)
        return [
            f"{member}"
            + (f" after {member.deaths} restarts" if member.deaths else "")
            + (f", worker {worker}" if len(workers) > 1 else "")
            for member in self._refitted
            for worker in workers
        ]

    def join_refit_group(self, spec: RefitGroupSpec) -> RayPendingCalls:
        """The m-th replica of the refit takes the ranks `spec.rank_offset` + m·tp and following."""
        self.table.in_transfer(self._refitted)
        offsets = range(spec.rank_offset, spec.world_size, self._tensor_parallel_size)
        return RayPendingCalls(
            "the engines to join the refit group",
            members=self._refitted,
            refs=[
                self._call(member, "join_refit_group", replace(spec, rank_offset=offset))
                for member, offset in zip(self._refitted, offsets, strict=True)
            ],
            table=self.table,
        )

    def begin_refit(
        self, *, mode: PauseMode, timeout_s: float, patience_s: float | None = None
    ) -> PausedEngines:
        """Stop sampling on every replica of the muster; those that have paused are those of the refit."""
        self.table.paused(self._refitted)
        try:
            self._refitted = self._pauses.gather(
                self._refitted, mode=mode, patience_s=patience_s, timeout_s=timeout_s
            )
        finally:
            self.table.in_transfer(self._refitted)
        return PausedEngines(ready=self._names_of_refitted(), num_slow=len(self.table.slow()))

    # pauses.PausingEngines

    def ask_to_pause(self, member: Member, *, mode: PauseMode, timeout_s: float) -> RayPauseCall:
        """Begin to pause it; it gives up after `timeout_s`."""
        ref = self._call(member, "begin_refit", mode=mode, timeout_s=timeout_s)
        return RayPauseCall(member=member, ref=ref, table=self.table)

    def stand_aside(self, member: Member) -> None:
        """Let it turn new requests away until it has a version again; returns at once."""
        self._call(member, "stand_aside")

    def wait_for_any(self, calls: Sequence[RayPauseCall], *, timeout_s: float) -> None:
        """Return when one of `calls` is done, or after `timeout_s`."""
        ray.wait([call.ref for call in calls], timeout=max(0.0, timeout_s))

    def receive_weights(self, manifest: WeightManifest) -> RayPendingCalls:
        """Let every replica receive."""
        return self._call_each(
            self._refitted, "receive_weights", manifest, what="the engines to receive weights"
        )

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """Make the received weights `version` on every replica."""
        self._call_each(
            self._refitted,
            "commit_refit",
            version=version,
            recompute_kv=recompute_kv,
            what=f"the engines to switch to version {version}",
        ).wait(timeout_s=timeout_s)
        self._committed = version

    def end_refit(self, *, timeout_s: float) -> None:
        """Let requests in again on every replica."""
        self._call_each(self._refitted, "end_refit", what="the engines to go on").wait(timeout_s=timeout_s)
        assert self._committed is not None, "end_refit comes after commit_refit"
        self.table.serving(self._refitted, version=self._committed)

    def _call(self, member: Member, method: str, *args: object, **kwargs: object) -> Any:
        return self._handles[member.replica].call.remote(method, *args, **kwargs)

    def _call_each(
        self, members: Sequence[Member], method: str, *args: object, what: str, **kwargs: object
    ) -> RayPendingCalls:
        refs = [self._call(member, method, *args, **kwargs) for member in members]
        return RayPendingCalls(what, members=members, refs=refs, table=self.table)

    def _call_all(self, method: str, *args: object, what: str, **kwargs: object) -> RayPendingCalls:
        """Every replica, whatever its state."""
        members = [self.table.member(replica) for replica in range(len(self._handles))]
        return self._call_each(members, method, *args, what=what, **kwargs)
