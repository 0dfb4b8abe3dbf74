"""Log-probs and entropy over a vocabulary that is cut over ranks, whole and in chunks, against log_softmax."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_ppo.mcore.vocab_parallel import TokenScores, VocabShard, scores_of_hidden, scores_of_logits

ROWS, WIDTH, HIDDEN, VOCAB, PADDED = 2, 5, 6, 11, 12
TEMPERATURE = 0.7
CHUNKS = [None, 1, 3, 64]


@contextmanager
def shards(ranks: int) -> Iterator[list[VocabShard]]:
    """The vocabulary of 11 entries, padded to 12, over groups whose members are threads of this process."""
    store, size = dist.HashStore(), PADDED // ranks
    timeout = timedelta(seconds=20)
    with ThreadPoolExecutor(ranks) as pool:
        groups = list(pool.map(lambda rank: dist.ProcessGroupGloo(store, rank, ranks, timeout), range(ranks)))
    yield [
        VocabShard(group=group, start=rank * size, size=min(size, VOCAB - rank * size))
        for rank, group in enumerate(groups)
    ]


def on_every_rank(work: Callable[[VocabShard], Any], ranks: int) -> list[Any]:
    with shards(ranks) as members, ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(work, members))


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, output weight (its last row is padding and must not matter), targets, a gradient."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn((ROWS, WIDTH, HIDDEN), generator=generator, dtype=torch.float64)
    weight = 3.0 * torch.randn((PADDED, HIDDEN), generator=generator, dtype=torch.float64)
    weight[VOCAB:] = 100.0
    target = torch.randint(0, VOCAB, (ROWS, WIDTH), generator=generator)
    gradient = torch.randn((ROWS, WIDTH), generator=generator, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), target, gradient.to(dtype)


def reference(hidden: Tensor, weight: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    logprobs = torch.log_softmax((hidden @ weight[:VOCAB].T) / TEMPERATURE, dim=-1)
    return logprobs.gather(-1, target[..., None])[..., 0], -(logprobs.exp() * logprobs).sum(-1)


def own_part(weight: Tensor, shard: VocabShard, ranks: int) -> Tensor:
    size = PADDED // ranks
    return weight[shard.start : shard.start + size].detach().clone().requires_grad_()


def scored(
    way: str, hidden: Tensor, weight: Tensor, target: Tensor, shard: VocabShard, chunk_size: int | None
) -> TokenScores:
    common = {"shard": shard, "temperature": TEMPERATURE, "chunk_size": chunk_size, "entropy": True}
    if way == "hidden":
        return scores_of_hidden(hidden, weight, target, **common)
    return scores_of_logits(hidden @ weight.T, target, **common)


@pytest.mark.parametrize("way", ["logits", "hidden"])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_size", CHUNKS)
def test_scores_and_gradients_are_those_of_log_softmax(way: str, ranks: int, chunk_size: int | None) -> None:
    hidden, weight, target, gradient = inputs(torch.float64)
    exact_hidden, exact_weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprobs, entropy = reference(exact_hidden, exact_weight, target)
    logprobs.backward(gradient)

    def work(shard: VocabShard) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        mine_hidden, mine_weight = hidden.clone().requires_grad_(), own_part(weight, shard, ranks)
        seen = scored(way, mine_hidden, mine_weight, target, shard, chunk_size)
        seen.logprobs_P.backward(gradient)
        assert seen.entropy_P is not None and not seen.entropy_P.requires_grad
        return seen.logprobs_P.detach(), seen.entropy_P, mine_hidden.grad, mine_weight.grad

    seen = on_every_rank(work, ranks)
    # float64: sums in another order.
    close = {"rtol": 1e-12, "atol": 1e-12}
    for mine_logprobs, mine_entropy, _, _ in seen:
        torch.testing.assert_close(mine_logprobs, logprobs.detach(), **close)
        torch.testing.assert_close(mine_entropy, entropy.detach(), **close)
    torch.testing.assert_close(torch.cat([grad for *_, grad in seen]), exact_weight.grad, **close)
    torch.testing.assert_close(sum(grad for _, _, grad, _ in seen), exact_hidden.grad, **close)


@pytest.mark.parametrize("way", ["logits", "hidden"])
@pytest.mark.parametrize("chunk_size", [None, 3])
def test_gradients_are_those_of_finite_differences(way: str, chunk_size: int | None) -> None:
    hidden, weight, target, _ = inputs(torch.float64)
    with shards(1) as (shard,):
        assert torch.autograd.gradcheck(
            lambda h, w: scored(way, h, w, target, shard, chunk_size).logprobs_P,
            (hidden.requires_grad_(), weight.requires_grad_()),
        )


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("chunk_size", [1, 4])
def test_chunks_of_logits_change_no_bit(ranks: int, chunk_size: int) -> None:
    hidden, weight, target, gradient = inputs(torch.float32)

    def work(shard: VocabShard) -> None:
        seen = []
        for size in (None, chunk_size):
            logits = (hidden @ own_part(weight, shard, ranks).T).detach().requires_grad_()
            common = {"shard": shard, "temperature": TEMPERATURE, "entropy": True}
            scores = scores_of_logits(logits, target, chunk_size=size, **common)
            scores.logprobs_P.backward(gradient)
            seen.append((scores.logprobs_P.detach(), scores.entropy_P, logits.grad))
        for whole, chunked in zip(*seen, strict=True):
            assert torch.equal(whole, chunked)

    on_every_rank(work, ranks)


@pytest.mark.parametrize("way", ["logits", "hidden"])
def test_bfloat16_is_computed_in_float32_and_keeps_its_format_in_the_gradient(way: str) -> None:
    hidden, weight, target, gradient = inputs(torch.bfloat16)
    hidden.requires_grad_()
    weight.requires_grad_()
    # What a bfloat16 output layer gives, continued exactly.
    logits = (hidden @ weight[:VOCAB].T).double()
    logprobs = torch.log_softmax(logits / TEMPERATURE, -1).gather(-1, target[..., None])[..., 0]
    logprobs.backward(gradient.double())
    expected = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    with shards(1) as (shard,):
        seen = scored(way, hidden, weight, target, shard, 3).logprobs_P
        seen.backward(gradient.float())
    assert seen.dtype == torch.float32 and hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    # float32 rounding of numbers up to 100.
    torch.testing.assert_close(seen.double(), logprobs, rtol=0.0, atol=1e-5)
    # Rounded to bfloat16 per chunk and once more in the sum: 3 roundings of 2^-9 of the largest entry.
    for mine, exact in zip((hidden.grad, weight.grad), expected, strict=True):
        bound = 3 * 2.0**-9 * float(exact.abs().max())
        torch.testing.assert_close(mine.float(), exact.float(), rtol=0.0, atol=bound)


def test_float32_hidden_states_of_a_bfloat16_model_give_the_models_own_logits() -> None:
    hidden, weight, target, _ = inputs(torch.bfloat16)
    with shards(1) as (shard,):
        seen = [scores_of_hidden(h, weight, target, shard=shard).logprobs_P for h in (hidden, hidden.float())]
    assert torch.equal(*seen)


@pytest.mark.parametrize("way", ["logits", "hidden"])
def test_large_logits_neither_overflow_nor_lose_the_target(way: str) -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    weight = 1e4 * weight
    logprobs, entropy = reference(hidden.double(), weight.double(), target)

    def work(shard: VocabShard) -> TokenScores:
        return scored(way, hidden, own_part(weight, shard, 2), target, shard, 3)

    for seen in on_every_rank(work, 2):
        # float32 rounding of logits of size 1e5, over the temperature.
        torch.testing.assert_close(seen.logprobs_P.detach().double(), logprobs, rtol=1e-6, atol=0.1)
        torch.testing.assert_close(seen.entropy_P.double(), entropy, rtol=0.0, atol=1e-3)


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            # A view holds no memory of its own.
            if isinstance(tensor, Tensor) and tensor._base is None:
                self.elements = max(self.elements, tensor.numel())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_or_a_gradient() -> None:
    positions, vocabulary, chunk_size = 600, 500, 20
    hidden, weight = torch.randn(positions, HIDDEN), torch.randn(vocabulary, HIDDEN)
    target = torch.randint(0, vocabulary, (positions,))
    hidden.requires_grad_()
    weight.requires_grad_()
    with shards(1) as (one,), _Largest() as whole, _Largest() as chunked:
        shard = VocabShard(group=one.group, start=0, size=vocabulary)
        scores = scores_of_hidden(hidden, weight, target, shard=shard, chunk_size=chunk_size, entropy=True)
        scores.logprobs_P.sum().backward()
        assert chunked.elements == max(chunk_size * vocabulary, hidden.numel(), weight.numel())
        scores_of_hidden(hidden, weight, target, shard=shard).logprobs_P.sum().backward()
        assert whole.elements == positions * vocabulary


def test_shapes_that_do_not_fit_are_refused() -> None:
    hidden, weight, target, _ = inputs(torch.float32)
    with shards(1) as (shard,):
        with pytest.raises(ValueError, match=r"logits \[2, 5, 10\] do not fit targets \[2, 5\] and 11"):
            scores_of_logits((hidden @ weight.T)[..., :10], target, shard=shard)
        with pytest.raises(ValueError, match=r"hidden states \[2, 4, 6\].* do not fit"):
            scores_of_hidden(hidden[:, :-1], weight, target, shard=shard)
        with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
            scores_of_hidden(hidden, weight, target, shard=shard, chunk_size=0)
