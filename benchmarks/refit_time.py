"""A refit against what it cannot do without: a raw broadcast of the same bytes plus the engine's own reload.

    python -m benchmarks.refit_time                         # 100M parameters in every layout below, others in 1x1
    python -m benchmarks.refit_time --model 30m --engines 1x1 --trainer tp2 --repeats 15
    python -m benchmarks.refit_time --set refit.bucket_bytes=16777216

Two trainer ranks (tp1: two copies of the model) hold the real Megatron policy, real vLLM engines in their actors
receive; `2x1` are two engines of one worker each. Everything is measured in turn in one run, so that all of it meets
the same machine. CPU only: the raw broadcast is gloo's. Exit code 1 when a median, or the sender's peak, misses its
bound.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peak_memory import broadcasts_release_at_once, peak_bytes
from benchmarks.raw_broadcast import SENDER, buffers, gloo_group, raw_broadcast
from benchmarks.refit_group import BaselineGroup
from benchmarks.report import OUTPUT, machine, save, show_machine, show_table
from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import load
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.microbatch_plan import FixedSize
from megatron_ppo.data.tasks import build_task
from megatron_ppo.mcore.hf_config import read_hf_config
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.settings import OptimizerSettings, SchedulerSettings, TrainingSettings
from megatron_ppo.protocol.weights import largest_layer_bytes
from megatron_ppo.ray_actors.cluster import start_local_cluster
from megatron_ppo.refit.agreement import agreement_over
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.telemetry.process_log import redirect_process_output
from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore, CheckPeers
from megatron_ppo.transport.streams import broadcast_sizes, manifest_for, send_stream

TIMEOUT_S = 120.0
RANKS = 2
TRANSFER_BOUND = 0.8
"""Least speed of the transport alone, as a share of the raw broadcast's."""
REFIT_BOUND = 1.15
"""Longest refit, in units of raw broadcast + reload."""
_UNMEASURED = 4
"""First rounds: joining the group, first touch of buffers."""
_PHASES = ("refit/drain_s", "refit/transfer_s", "refit/pause_s", "refit/total_s")

_100M = ("hidden_size=768", "num_layers=12", "num_heads=12", "num_kv_heads=4", "ffn_hidden_size=3072")
MODELS = {
    "tiny": ("+experiment=megatron_40step",),
    "30m": ("+experiment=bench_30m",),
    "100m": ("+experiment=bench_30m", *(f"policy.model.recipe.{field}" for field in _100M)),
}
TRAINERS: dict[str, dict[str, int]] = {
    "tp1": {},
    "tp2": {"tensor_model_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
}
ENGINES: dict[str, tuple[str, ...]] = {
    "1x1": ("tp1", "tp2", "pp2"),
    "2x1": ("tp1", "tp2", "pp2"),
    "1x2": ("tp2",),
    "2x2": ("tp2",),
}
"""Engines x workers of each: the trainer layouts that are measured with them."""
BOUND_FOR = "100m"
"""Smaller models are measured in one arrangement of engines and have no bound: fixed costs of a refit outweigh them."""

Rounds = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What all layouts of one invocation share."""

    name: str
    config: RunConfig
    folder: Path
    options: argparse.Namespace

    @property
    def engines(self) -> list[str]:
        """Keys of ENGINES to measure."""
        return self.options.engines or (list(ENGINES) if self.name == BOUND_FOR else ["1x1"])

    def takes(self, trainer: str) -> bool:
        """Whether the model's layers can be divided among the stages of this layout; the 9 of `bench_30m` cannot."""
        stages = TRAINERS[trainer].get("pipeline_model_parallel_size", 1)
        return read_hf_config(self.folder).num_layers % stages == 0

    @property
    def staging_bytes(self) -> int:
        """The sender's staging memory."""
        return self.config.refit.bucket_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`measure` times everything once, in turn; `peak_bytes` is what the sender allocates in a refit, at most
    `peak_bound_bytes`: the staging memory and one layer.
    """

    measure: Callable[[], Rounds]
    peak_bytes: Callable[[], int]
    peak_bound_bytes: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line entry point; returns the exit code."""
    options = _options(arguments)
    torch.set_num_threads(1)
    jobs = [_job(name, options) for name in options.models]
    if os.environ.get("RANK") == "1":
        with redirect_process_output(OUTPUT / "runs" / "refit" / "rank_1.log"), distributed_runtime():
            _measure(jobs)
        return 0
    facts = machine()
    show_machine(facts)
    logs = OUTPUT / "runs" / "refit"
    with (
        _second_rank(arguments),
        redirect_process_output(logs / "rank_0.log"),
        distributed_runtime(),
        start_local_cluster(log_dir=logs, env={"OMP_NUM_THREADS": "1"}),
    ):
        results = _measure(jobs)
    codes = [_report(job, results[job.name]) for job in jobs]
    save("refit_time", facts, results)
    return max(codes)


def _job(name: str, options: argparse.Namespace) -> Job:
    config = load([*MODELS[name], *options.overrides])
    folder = model_folder(
        config.policy.model,
        cache_dir=Path(config.cluster.model_cache_dir),
        timeout_s=config.cluster.prepare_timeout_s,
    )
    return Job(name=name, config=config, folder=folder, options=options)


def _measure(jobs: Sequence[Job]) -> dict[str, dict[str, Any]]:
    """Results by model and row; called on both ranks, results on rank 0."""
    results: dict[str, dict[str, Any]] = {}
    for job in jobs:
        results[job.name] = {}
        for engines in job.engines:
            results[job.name] |= _measure_engines(job, engines)
    return results


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), action="append", dest="models", help="default: all")
    parser.add_argument(
        "--engines", choices=list(ENGINES), action="append", help=f"default: all of {BOUND_FOR}, else 1x1"
    )
    parser.add_argument("--trainer", choices=list(TRAINERS), action="append", help="default: see the source")
    parser.add_argument("--repeats", type=int, default=9, help="rounds measured (default: %(default)s)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    options = parser.parse_args(arguments)
    options.models = options.models or list(MODELS)
    return options


@contextlib.contextmanager
def _second_rank(arguments: Sequence[str] | None) -> Iterator[None]:
    """Makes this process rank 0 of two, and runs rank 1 beside it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launcher = {"WORLD_SIZE": str(RANKS), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(launcher, RANK="0", LOCAL_RANK="0")
    words = sys.argv[1:] if arguments is None else list(arguments)
    other = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.refit_time", *words],
        env=os.environ | {"RANK": "1", "LOCAL_RANK": "1"},
    )
    try:
        yield
        other.wait(timeout=TIMEOUT_S)
    finally:
        other.kill()
        other.wait()


def _measure_engines(job: Job, engines: str) -> dict[str, dict[str, Any]]:
    """All trainer layouts against one group of engines; called on both ranks, results on rank 0."""
    replicas, workers = map(int, engines.split("x"))
    trainers = [t for t in job.options.trainer or ENGINES[engines] if t in ENGINES[engines] and job.takes(t)]
    results = {}
    with contextlib.ExitStack() as stack:
        group = None
        if dist.get_rank() == 0:
            group = _engine_group(job, replicas, workers)
            stack.callback(group.shutdown)
            group.start()
        for trainer in trainers:
            row = f"{trainer} → {replicas} engine{'s' * (replicas > 1)}, tp{workers}"
            with _case(job, TRAINERS[trainer], group) as case:
                rounds = [case.measure() for _ in range(_UNMEASURED + job.options.repeats)][_UNMEASURED:]
                peak = case.peak_bytes()
            gc.collect()  # a policy is a ring of references
            if group is not None:
                results[row] = {
                    **_summary(rounds),
                    "peak_bytes": peak,
                    "peak_bound_bytes": case.peak_bound_bytes,
                }
    return results


def _engine_group(job: Job, replicas: int, workers: int) -> BaselineGroup:
    task = build_task(**job.config.data.kwargs())
    derived = derive(job.config, 1)
    engine_kwargs = job.config.inference.engine_kwargs(max_model_len=derived.max_model_len)
    engine_kwargs = {key: engine_kwargs[key] for key in engine_kwargs if key != "tensor_parallel_size"}
    return BaselineGroup(
        replicas=replicas,
        tensor_parallel_size=workers,
        engine_kwargs={"model": str(job.folder), "stop_token_ids": task.stop_token_ids, **engine_kwargs},
        log_dir=OUTPUT / "runs" / "refit",
        start_timeout_s=job.config.inference.start_timeout_s,
    )


@contextlib.contextmanager
def _case(job: Job, layout: dict[str, int], group: BaselineGroup | None) -> Iterator[Case]:
    """One layout of the policy against the engines; both ranks call everything together."""
    with contextlib.ExitStack() as stack:
        policy = _policy(job, layout)
        refit = BroadcastRefit(
            source=policy,
            sink=group,
            store=BroadcastStore(timeout_s=TIMEOUT_S) if group else None,
            bucket_bytes=job.staging_bytes,
            timeout_s=TIMEOUT_S,
            agree=agreement_over(None),
        )
        stack.callback(refit.close)
        sender = _Sender(job, policy, group) if group else None
        versions = iter(range(10**6))

        def measure() -> Rounds:
            """Everything once. Rank 1 does its part of the gathers and otherwise waits."""
            found: Rounds = {}
            dist.barrier()
            metrics = refit.push(version=next(versions))
            found |= {key: metrics[key] for key in (_PHASES if group else ())}
            dist.barrier()
            if sender:
                found |= sender.raw()
                found |= sender.reload()
                found |= sender.transport()
            dist.barrier()
            if sender:
                found |= sender.transport_with_gathers()
            else:
                list(policy.full_weights())
            dist.barrier()
            return found

        metadata = policy.weight_metadata()

        def peak() -> int:
            """With the one tensor that gloo's thread may hold a moment longer than the recorder is shown."""
            with broadcasts_release_at_once():
                recorded = peak_bytes(lambda: refit.push(version=next(versions)))
            late = max(meta.num_bytes for meta in metadata) if layout else 0
            return recorded + late

        yield Case(
            measure=measure,
            peak_bytes=peak,
            peak_bound_bytes=job.staging_bytes + largest_layer_bytes(metadata),
        )


def _policy(job: Job, layout: dict[str, int]) -> MegatronPolicy:
    return MegatronPolicy(
        model=job.folder,
        parallel=ParallelContext.create(**layout),
        training=TrainingSettings(
            optimizer=OptimizerSettings(lr=1e-5),
            scheduler=SchedulerSettings(lr_decay_steps=100),
            train_batches=FixedSize(sequences=1),
            score_batches=FixedSize(sequences=1),
        ),
        pad_token_id=0,
    )


class _Sender:
    """Rank 0's baselines against the workers of `group`."""

    def __init__(self, job: Job, policy: MegatronPolicy, group: BaselineGroup) -> None:
        self._folder = str(job.folder)
        self._policy = policy
        self._group = group
        self._manifest = manifest_for(policy.weight_metadata(), staging_bytes=job.staging_bytes)
        self.num_bytes = sum(meta.num_bytes for meta in policy.weight_metadata())
        members = 1 + len(group.muster(version=0))
        sizes = broadcast_sizes(self._manifest)
        self._store = dist.TCPStore(
            "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
        )
        joining = group.bench_join("bench_join", members, self._store.port, sizes, TIMEOUT_S)
        self._gloo = gloo_group(self._store, SENDER, members, TIMEOUT_S)
        self._buffers = buffers(sizes)
        joining.wait(timeout_s=TIMEOUT_S)
        self._transport_store = BroadcastStore(timeout_s=TIMEOUT_S)
        spec = self._transport_store.spec(generation=1, rank_offset=1, world_size=members)
        joining = group.bench_join("bench_join_stream", asdict(spec), asdict(self._manifest))
        self._stream = _TimedGroup(spec, rank=SENDER, device=torch.device("cpu"), store=self._transport_store)
        joining.wait(timeout_s=TIMEOUT_S)
        self._full = [
            torch.randn(meta.shape, dtype=getattr(torch, meta.dtype)) for meta in policy.weight_metadata()
        ]

    def raw(self) -> Rounds:
        """A bare broadcast of the same bytes in the same buckets."""
        receiving = self._group.bench("bench_receive")
        seconds = raw_broadcast(self._gloo, self._buffers)
        receiving.wait(timeout_s=TIMEOUT_S)
        return {"raw_s": seconds}

    def reload(self) -> Rounds:
        """vLLM's layerwise reload from its own memory, on all workers at once; the slowest."""
        results = self._group.bench("bench_reload", self._folder).results(timeout_s=TIMEOUT_S)
        return {"reload_s": max(seconds for workers in results for seconds in workers)}

    def transport(self) -> Rounds:
        """The transport with its packing, from full tensors, into workers that load nothing."""
        return {"transport_s": self._streamed(iter(self._full))}

    def transport_with_gathers(self) -> Rounds:
        """The same from the policy's shards."""
        return {"gathering_transport_s": self._streamed(self._policy.full_weights())}

    def _streamed(self, tensors: Iterator[torch.Tensor]) -> float:
        receiving = self._group.bench("bench_receive_stream")
        send_stream(self._stream, self._manifest, tensors, check_peers=receiving.raise_if_failed)
        ended = time.perf_counter()
        receiving.wait(timeout_s=TIMEOUT_S)
        return ended - self._stream.accepted_at


class _TimedGroup(BroadcastGroup):
    """`accepted_at` is when all receivers were there: what the first barrier of the raw broadcast is to it."""

    accepted_at = 0.0

    def offer_manifest(self, digest: str, *, check_peers: CheckPeers | None = None) -> None:
        super().offer_manifest(digest, check_peers=check_peers)
        self.accepted_at = time.perf_counter()


def _summary(rounds: list[Rounds]) -> dict[str, Any]:
    """Medians, and the fastest round of each figure; ratios of both."""
    summaries: dict[str, dict[str, float]] = {
        name: {key: pick(each[key] for each in rounds) for key in rounds[0]}
        for name, pick in (("median", median), ("fastest", min))
    }
    for values in summaries.values():
        values["transport_ratio"] = values["raw_s"] / values["transport_s"]
        values["refit_ratio"] = values["refit/total_s"] / (values["raw_s"] + values["reload_s"])
    return {**summaries, "rounds": rounds}


def _report(job: Job, results: dict[str, dict[str, Any]]) -> int:
    show_table(
        f"refit of {job.name}, staging {job.staging_bytes / 2**20:.0f} MiB, medians of {job.options.repeats} rounds; "
        "in brackets: of the fastest rounds",
        [
            "trainer → engines",
            "raw, s",
            "reload, s",
            "transport, s",
            "with gathers, s",
            "refit, s",
            "raw / transport",
            "refit / (raw + reload)",
            "sender's peak (bound), MiB",
        ],
        [_row(name, result) for name, result in results.items()],
    )
    missed = [
        name
        for name, result in results.items()
        if result["peak_bytes"] > result["peak_bound_bytes"]
        or (
            job.name == BOUND_FOR
            and (
                result["median"]["transport_ratio"] < TRANSFER_BOUND
                or result["median"]["refit_ratio"] > REFIT_BOUND
            )
        )
    ]
    if missed:
        print(
            f"missed: {'; '.join(missed)} (raw / transport must be >= {TRANSFER_BOUND}, "
            f"refit / (raw + reload) <= {REFIT_BOUND}, the sender's peak <= staging + one layer)"
        )
    return 1 if missed else 0


def _row(name: str, result: dict[str, Any]) -> list[str]:
    middle, fastest = result["median"], result["fastest"]
    seconds = ("raw_s", "reload_s", "transport_s", "gathering_transport_s", "refit/total_s")
    return [
        name,
        *(f"{middle[key]:.2f}" for key in seconds),
        *(f"{middle[key]:.2f} ({fastest[key]:.2f})" for key in ("transport_ratio", "refit_ratio")),
        f"{result['peak_bytes'] / 2**20:.0f} ({result['peak_bound_bytes'] / 2**20:.0f})",
    ]


if __name__ == "__main__":
    sys.exit(main())
