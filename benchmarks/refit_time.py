"""A refit against what it cannot do without: a raw broadcast of the same bytes plus the engine's own reload.

    python -m benchmarks.refit_time [--model tiny] [--model 30m] [--model 100m] [--repeats 15]
    python -m benchmarks.refit_time --model 30m --set refit.bucket_bytes=16777216

The sender is the real Megatron policy, the receiver the real vLLM engine in its actor. Refit and baselines are
measured in turn in one run, so that all of them meet the same machine. CPU only: the raw broadcast is gloo's.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.raw_broadcast import SENDER, buffers, gloo_pair, raw_broadcast
from benchmarks.refit_group import BaselineGroup
from benchmarks.report import OUTPUT, machine, save, show_machine, show_table
from megatron_ppo.app.model_folder import model_folder
from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import load
from megatron_ppo.data.tasks import build_task
from megatron_ppo.mcore.parallel import distributed_runtime
from megatron_ppo.ray_actors.cluster import start_local_cluster
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.telemetry.process_log import redirect_process_output
from megatron_ppo.transport.broadcast_group import BroadcastStore
from megatron_ppo.transport.streams import manifest_for

TIMEOUT_S = 120.0
_UNMEASURED = 2
"""First rounds: joining the group, first touch of buffers."""
_PHASES = ("refit/drain_s", "refit/transfer_s", "refit/pause_s", "refit/total_s")

_100M = ("hidden_size=768", "num_layers=12", "num_heads=12", "num_kv_heads=4", "ffn_hidden_size=3072")
MODELS = {
    "tiny": ("+experiment=megatron_40step",),
    "30m": ("+experiment=bench_30m",),
    "100m": ("+experiment=bench_30m", *(f"policy.model.recipe.{field}" for field in _100M)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """What is measured, each a call that returns seconds by name."""

    num_bytes: int
    measure: dict[str, Callable[[], dict[str, float]]]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=list(MODELS), action="append", help="default: tiny and 30m")
    parser.add_argument("--repeats", type=int, default=15, help="rounds measured (default: %(default)s)")
    parser.add_argument("--set", metavar="KEY=VALUE", action="append", default=[], dest="overrides")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    facts = machine()
    show_machine(facts)
    results = {
        name: measure(name, overrides=options.overrides, repeats=options.repeats)
        for name in options.model or ["tiny", "30m"]
    }
    show_table(
        f"refit, medians of {options.repeats} rounds",
        [
            "model",
            "MB",
            "raw broadcast, s",
            "own reload, s",
            "refit, s",
            "of which transfer, s",
            "refit / (raw + reload)",
            "the same, fastest rounds",
        ],
        [
            [*_row(name, result["median"]), f"{result['fastest']['ratio']:.2f}"]
            for name, result in results.items()
        ],
    )
    save("refit_time", facts, results)


def measure(name: str, *, overrides: Sequence[str], repeats: int) -> dict[str, dict[str, float]]:
    """Medians, and the fastest round, of one model."""
    rounds: list[dict[str, float]] = []
    print(f"{name}: starting policy and engine", flush=True)
    with _quiet(OUTPUT / "runs" / f"refit_{name}"), _bench(name, overrides) as bench:
        for _ in range(_UNMEASURED + repeats):
            rounds.append({key: value for part in bench.measure.values() for key, value in part().items()})
    rounds = rounds[_UNMEASURED:]
    summaries = {
        summary: {key: pick(each[key] for each in rounds) for key in rounds[0]}
        for summary, pick in (("median", median), ("fastest", min))
    }
    for values in summaries.values():
        values["megabytes"] = bench.num_bytes / 1e6
        values["ratio"] = values["refit/total_s"] / (values["raw_s"] + values["reload_s"])
    return summaries


@contextlib.contextmanager
def _quiet(folder: Path) -> Iterator[None]:
    """Start-up noise of libraries goes to a log; a failure still reaches the terminal."""
    with redirect_process_output(folder / "trainer.log"):
        yield


@contextlib.contextmanager
def _bench(name: str, overrides: Sequence[str]) -> Iterator[Bench]:
    """The parts of a job that take part in a refit, on this process and in one engine."""
    config = load([*MODELS[name], *overrides])
    derived = derive(config, 1)
    folder = model_folder(
        config.policy.model,
        cache_dir=Path(config.cluster.model_cache_dir),
        timeout_s=config.cluster.prepare_timeout_s,
    )
    task = build_task(**config.data.kwargs())
    logs = OUTPUT / "runs" / f"refit_{name}"
    engine_kwargs = config.inference.engine_kwargs(max_model_len=derived.max_model_len)
    engine_kwargs = {key: engine_kwargs[key] for key in engine_kwargs if key != "tensor_parallel_size"}
    with contextlib.ExitStack() as stack:
        stack.enter_context(distributed_runtime())
        stack.enter_context(start_local_cluster(log_dir=logs, env={"OMP_NUM_THREADS": "1"}))
        group = BaselineGroup(
            engine_kwargs={"model": str(folder), "stop_token_ids": task.stop_token_ids, **engine_kwargs},
            log_dir=logs,
            start_timeout_s=config.inference.start_timeout_s,
        )
        stack.callback(group.shutdown)

        # As in the job: Megatron takes seconds, in which the engine is starting already.
        from megatron_ppo.app.models import build_models

        policy = build_models(
            config, derived, policy_folder=folder, critic_folder=folder, pad_token_id=task.pad_token_id
        ).policy
        group.start()
        refit = BroadcastRefit(
            source=policy,
            sink=group,
            store=BroadcastStore(timeout_s=TIMEOUT_S),
            bucket_bytes=config.refit.bucket_bytes,
            timeout_s=TIMEOUT_S,
        )
        stack.callback(refit.close)
        metadata = policy.weight_metadata()
        buckets = manifest_for(metadata, staging_bytes=config.refit.bucket_bytes).buckets()
        versions = iter(range(10**6))

        def push() -> dict[str, float]:
            metrics = refit.push(version=next(versions))
            return {name: metrics[name] for name in _PHASES}

        def reload() -> dict[str, float]:
            [seconds] = group.bench("bench_reload", str(folder)).results(timeout_s=TIMEOUT_S)
            return {"reload_s": seconds}

        yield Bench(
            num_bytes=sum(meta.num_bytes for meta in metadata),
            measure={
                "refit": push,
                "raw": _raw_broadcast(group, [bucket.num_bytes for bucket in buckets]),
                "reload": reload,
            },
        )


def _raw_broadcast(group: BaselineGroup, sizes: list[int]) -> Callable[[], dict[str, float]]:
    """A bare gloo group with the engine's worker, and a call that times one broadcast of `sizes` bytes over it."""
    store = dist.TCPStore(
        "127.0.0.1", 0, None, is_master=True, timeout=timedelta(seconds=TIMEOUT_S), wait_for_workers=False
    )
    joining = group.bench("bench_join", store.port, sizes, TIMEOUT_S)
    pair, tensors = gloo_pair(store, SENDER, TIMEOUT_S), buffers(sizes)
    joining.wait(timeout_s=TIMEOUT_S)

    def broadcast() -> dict[str, float]:
        receiving = group.bench("bench_receive")
        seconds = raw_broadcast(pair, tensors)
        receiving.wait(timeout_s=TIMEOUT_S)
        return {"raw_s": seconds}

    return broadcast


def _row(name: str, values: dict[str, float]) -> list[str]:
    return [
        name,
        f"{values['megabytes']:.1f}",
        *(f"{values[key]:.3f}" for key in ("raw_s", "reload_s", "refit/total_s", "refit/transfer_s")),
        f"{values['ratio']:.2f}",
    ]


if __name__ == "__main__":
    main()
