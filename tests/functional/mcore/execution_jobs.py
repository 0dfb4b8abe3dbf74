"""Jobs that look at how a pass runs: what is computed twice, when reductions start, which tensors exist."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peak_memory import peak_bytes
from megatron_ppo.mcore.hf_files import HFWeights
from megatron_ppo.mcore.settings import RecomputeSettings
from megatron_ppo.mcore.weights import load_hf_weights
from tests.functional.mcore.jobs import Layout, build, context, random_batch


def forward_calls(
    *, folder: str, kind: str, ways: dict[str, RecomputeSettings], parts: tuple[str, ...]
) -> dict[str, dict[str, int]]:
    """How often the parts of a layer are computed in one update of a single microbatch, for each way to recompute.

    Args:
        parts: names of modules within a layer; summed over the layers.
    """
    found = {}
    with context({}) as parallel:
        for way, recompute in ways.items():
            model = build(kind, folder, parallel, recompute=recompute, train_micro_batch_size=8)
            calls: Counter[str] = Counter()
            for chunk in model.trained.chunks:
                for name, module in chunk.named_modules():
                    part = name.rpartition(".")[2]
                    if part in parts:
                        module.register_forward_pre_hook(
                            lambda *_, part=part, calls=calls: calls.update((part,))
                        )
            model.update([random_batch()])
            found[way] = dict(calls)
    return found


def gradient_events(*, folder: str, **changes: Any) -> dict[str, Any]:
    """What happened in the second update, in order: `gradient` of a parameter in the last microbatch, `reduce`, and
    `backward is over`. The first update only shows Megatron which gradients to wait for.
    """
    with context({}) as parallel:
        policy = build("policy", folder, parallel, train_micro_batch_size=2, **changes)
        events: list[str] = []
        groups = [group for module in policy.trained.modules for group in module.bucket_groups]
        for group in groups:
            _note(group, "start_grad_sync", "reduce", events)
            _note(group, "register_grad_ready", "gradient", events)
        _note(policy.trained.config, "finalize_model_grads_func", "backward is over", events)
        policy.update([random_batch(seed=0)])
        events.clear()
        policy.update([random_batch(seed=1)])
        return {"events": list(events), "buckets": len(groups)}


def _note(holder: Any, method: str, event: str, events: list[str]) -> None:
    """Write `event` down whenever the method is called."""
    original = getattr(holder, method)

    def noting(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        return original(*args, **kwargs)

    setattr(holder, method, noting)


class _MostLogits(TorchDispatchMode):
    """Positions of the largest tensor whose last dimension is the vocabulary; the output weight itself is none."""

    def __init__(self, vocabulary: int, hidden: int) -> None:
        super().__init__()
        self.positions = 0
        self._vocabulary, self._weight = vocabulary, (hidden, vocabulary)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else ()
            if shape[-1:] == (self._vocabulary,) and shape != self._weight:
                self.positions = max(self.positions, tensor.numel() // self._vocabulary)
        return result


def positions_with_logits(*, folder: str, **changes: Any) -> dict[str, int]:
    """For how many positions logits exist at a time, in a scoring pass, one of the reference and an update."""
    with context({}) as parallel:
        policy = build("policy", folder, parallel, reference=True, **changes)
        model, batch = policy.trained.model, random_batch(rows=8)

        def most(action: Any) -> int:
            with _MostLogits(model.vocab_size, model.hidden_size) as seen:
                action()
            return seen.positions

        return {
            "logprobs": most(lambda: policy.logprobs(batch)),
            "reference": most(lambda: policy.reference_logprobs(batch)),
            "update": most(lambda: policy.update([batch])),
        }


def loading(*, folder: str, layout: Layout, kind: str) -> dict[str, int]:
    """Bytes of loading a model's weights once more: read from the files, of what was read and alive at a time at most,
    allocated at a time at most; beside them those of this rank's parameters, all together and of the largest.
    """
    with context(layout) as parallel:
        trained = build(kind, folder, parallel).trained
        sizes = [parameter.nbytes for chunk in trained.chunks for parameter in chunk.parameters()]
        before = _bits(trained.chunks)
        with torch.no_grad():
            for chunk in trained.chunks:
                for parameter in chunk.parameters():
                    parameter.zero_()
        with _recorded_reads() as reads:
            peak = peak_bytes(lambda: load_hf_weights(trained.chunks, trained.weight_map, folder))
        assert all(torch.equal(mine, old) for mine, old in zip(_bits(trained.chunks), before, strict=True))
        return {**reads, "peak": peak, "own": sum(sizes), "largest": max(sizes)}


def _bits(chunks: Any) -> list[Tensor]:
    return [parameter.detach().clone() for chunk in chunks for parameter in chunk.parameters()]


@contextmanager
def _recorded_reads() -> Iterator[dict[str, int]]:
    read, seen = HFWeights.read, {"read": 0, "alive": 0}
    held: list[tuple[weakref.ref[Tensor], int]] = []

    def reading(self: HFWeights, name: str, **part: Any) -> Tensor:
        tensor = read(self, name, **part)
        held.append((weakref.ref(tensor), tensor.nbytes))
        seen["read"] += tensor.nbytes
        seen["alive"] = max(seen["alive"], sum(size for alive, size in held if alive() is not None))
        return tensor

    with mock.patch.object(HFWeights, "read", reading):
        yield seen
