"""Peak memory of log-probs and entropy: in chunks of positions against all logits at once.

    python -m benchmarks.logprob_memory
    python -m benchmarks.logprob_memory --tokens 4096 --precision bf16 --chunks 64,512

Every case runs in a process of its own: hidden states, output weight and targets are made, then the peak is reset,
and one pass is measured. On a CUDA device the peak is the allocator's, else the resident set's.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.report import ROOT, BenchmarkError, machine, save, show_machine, show_table

MIB = 2**20
PASSES = ("scoring", "training")
_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One pass to measure. `chunk`: positions at a time, 0 = all logits at once."""

    kind: str
    chunk: int
    tokens: int
    vocabulary: int
    hidden: int
    precision: str

    @property
    def logits_bytes(self) -> int:
        """Of all logits, in the model's precision."""
        return self.tokens * self.vocabulary * (4 if self.precision == "fp32" else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Attributes:
    peak_bytes: beyond what was there before the pass.   seconds: of the pass.
    mean_logprob: to see that all ways compute the same.
    """

    peak_bytes: int
    seconds: float
    mean_logprob: float


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=2048, help="of a microbatch (default: %(default)s)")
    parser.add_argument("--vocabulary", type=int, default=151_936, help="default: %(default)s, Qwen2.5's")
    parser.add_argument("--hidden", type=int, default=64, help="default: %(default)s")
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--chunks", default="64,256,1024", help="chunk sizes, tokens (default: %(default)s)")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        print(json.dumps(asdict(measure(Case(**json.loads(options.case))))))
        return
    facts = machine()
    show_machine(facts)
    cases = cases_of(options)
    results = {case: run(case) for case in cases}
    _check_agreement(results)
    _show(results)
    save("logprob_memory", facts, {"cases": [asdict(case) | asdict(seen) for case, seen in results.items()]})


def cases_of(options: argparse.Namespace) -> list[Case]:
    """Both kinds of pass, whole and in every chunk size."""
    sizes = {key: getattr(options, key) for key in ("tokens", "vocabulary", "hidden", "precision")}
    chunks = [0, *(int(word) for word in options.chunks.split(","))]
    return [Case(kind=kind, chunk=chunk, **sizes) for kind in PASSES for chunk in chunks]


def run(case: Case) -> Measured:
    """Measure in a fresh process. Raises: BenchmarkError if it fails."""
    command = [sys.executable, "-m", "benchmarks.logprob_memory", "--case", json.dumps(asdict(case))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=_TIMEOUT_S)
    if done.returncode != 0:
        raise BenchmarkError(f"{case} failed:\n{done.stderr[-2000:]}")
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def measure(case: Case) -> Measured:
    """One pass in this process."""
    import torch
    import torch.distributed as dist

    from megatron_ppo.mcore.vocab_parallel import VocabShard, scores_of_hidden, scores_of_logits

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.float32 if case.precision == "fp32" else torch.bfloat16
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    shard = VocabShard(group=dist.group.WORLD, start=0, size=case.vocabulary)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((case.tokens, case.hidden), generator=generator).to(device, dtype)
    weight = torch.randn((case.vocabulary, case.hidden), generator=generator).to(device, dtype)
    target = torch.randint(0, case.vocabulary, (case.tokens,), generator=generator).to(device)
    trained = case.kind == "training"
    hidden.requires_grad_(trained)
    weight.requires_grad_(trained)

    def one_pass() -> float:
        with torch.set_grad_enabled(trained):
            if case.chunk:
                scores = scores_of_hidden(
                    hidden, weight, target, shard=shard, chunk_size=case.chunk, entropy=trained
                )
            else:
                scores = scores_of_logits(hidden @ weight.T, target, shard=shard, entropy=trained)
            if trained:
                scores.logprobs_P.mean().backward()
        return float(scores.logprobs_P.detach().mean())

    before = _reset_peak(device)
    start = time.perf_counter()
    mean = one_pass()
    seconds = time.perf_counter() - start
    result = Measured(peak_bytes=_peak(device) - before, seconds=seconds, mean_logprob=mean)
    dist.destroy_process_group()
    return result


def _reset_peak(device: object) -> int:
    """Bytes in use now, from which the peak counts."""
    import torch

    if str(device) == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Linux: sets the high-water mark of the resident set to its present size.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _peak(device)


def _peak(device: object) -> int:
    import torch

    if str(device) == "cuda":
        return torch.cuda.max_memory_allocated()
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise BenchmarkError(f"process {os.getpid()}: no VmHWM in /proc/self/status")


def _check_agreement(results: dict[Case, Measured]) -> None:
    """Chunks that computed something else would be measured in vain."""
    means = [seen.mean_logprob for seen in results.values()]
    if max(means) - min(means) > 1e-3 * abs(means[0]):
        raise BenchmarkError(f"mean log-probs differ between the cases: {means}")


def _show(results: dict[Case, Measured]) -> None:
    whole = {case.kind: seen.peak_bytes for case, seen in results.items() if not case.chunk}
    rows = [
        [
            f"{case.kind}, {f'chunks of {case.chunk}' if case.chunk else 'whole'}",
            f"{seen.peak_bytes / MIB:.0f}",
            f"{seen.peak_bytes / whole[case.kind]:.3f}",
            f"{seen.seconds:.2f}",
        ]
        for case, seen in results.items()
    ]
    first = next(iter(results))
    show_table(
        f"{first.tokens} tokens, vocabulary {first.vocabulary}, hidden {first.hidden}, {first.precision}; all logits "
        f"are {first.logits_bytes / MIB:.0f} MiB",
        ["pass", "peak, MiB", "peak / whole", "seconds"],
        rows,
    )


if __name__ == "__main__":
    main()
