"""Tiny random models in transformers, as the source of weights and as the oracle of log-probs. Imports no vLLM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_ppo.protocol.trajectory import Completion
from megatron_ppo.protocol.weights import TensorMeta
from tests.weight_metadata import tensor_meta

VOCABULARY = 300
MAX_MODEL_LEN = 512
# Small enough that the model needs several buckets, so that a transfer can break half-way.
BUCKET_BYTES = 200_000
EITHER = pytest.mark.parametrize("rig", ["tied", "untied"], indirect=True, scope="module")
"""For a test that needs the engine of `conftest.rig` with both kinds of output head."""
TOLERANCE_NATS = 1e-4
"""fp32 on both sides, other reduction orders: 1e-6 to 1e-5 is typical; wrong weights differ by 1e-1."""


def tiny_model(
    seed: int, *, tied: bool, hidden_size: int = 128, intermediate_size: int = 192
) -> Qwen2ForCausalLM:
    """Random weights. Head size 32 is the smallest that vLLM's CPU attention takes.

    Args:
        hidden_size: a multiple of 64.
    """
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=3,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 64,
        max_position_embeddings=MAX_MODEL_LEN,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(config).eval()


def hf_logprobs(model: Qwen2ForCausalLM, tokens: Sequence[int], *, temperature: float = 1.0) -> list[float]:
    """Nats of every token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([list(tokens)])).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[:-1]
    return logprobs.gather(1, torch.tensor(list(tokens[1:]))[:, None])[:, 0].tolist()


def worst_difference(
    model: Qwen2ForCausalLM, prompt: Sequence[int], completion: Completion, version: int
) -> float:
    """Largest |engine - model| in nats over the response tokens that `version` sampled."""
    expected = hf_logprobs(model, [*prompt, *completion.token_ids])[len(prompt) - 1 :]
    return max(
        abs(completion.logprobs[t] - expected[t])
        for span in completion.spans
        if span.version == version
        for t in range(span.start, span.end)
    )


class HfSource:
    """A transformers model as `loop.ports.WeightSource`."""

    def __init__(self, model: Qwen2ForCausalLM) -> None:
        self._model = model

    def _items(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            if not (self._model.config.tie_word_embeddings and name == "lm_head.weight"):
                yield name, tensor

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        """See the port."""
        return tuple(tensor_meta(name, tensor) for name, tensor in self._items())

    def full_weights(self) -> Iterator[Tensor]:
        """See the port."""
        for _, tensor in self._items():
            yield tensor
