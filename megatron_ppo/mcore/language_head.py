"""From the last pipeline stage's output to log-probs: the policy's output layer, whole or in chunks.

Driven by `MegatronPolicy`, once for the trained model and once for the frozen reference. Without a chunk size
the model's own output layer makes all logits. With one, the model hands its hidden states out and the layer is
applied here, chunk by chunk, in training and scoring alike, so that both compute the same function.

Invariant: parameters, their names and how their gradients are reduced are the same in both ways.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: S rows that the model sees, L positions of a row on this rank (see `mcore.sequences`), V vocabulary
entries of this rank, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.vocab_parallel import TokenScores, VocabShard, scores_of_hidden, scores_of_logits


class LanguageHead:
    """Scores the output of one language model.

    Args:
        modules: this stage's chunks, as the schedule calls them; with a chunk size, the last one of the last
            stage returns hidden states [S, L, H] from now on.
        chunk_size: positions whose logits exist at a time; None = all of a microbatch.
    """

    def __init__(
        self,
        modules: Sequence[torch.nn.Module],
        model: HFModelConfig,
        parallel: ParallelContext,
        *,
        chunk_size: int | None,
    ) -> None:
        self._gpt: Any = _bare(modules[-1])
        self._chunk_size = chunk_size
        rows = model.padded_vocab_size(parallel.tp_size) // parallel.tp_size
        start = parallel.tp_rank * rows
        self._shard = VocabShard(
            group=parallel.tensor, start=start, size=max(0, min(rows, model.vocab_size - start))
        )
        if chunk_size is not None and self._gpt.post_process:
            _hand_out_hidden_states(self._gpt.output_layer, parallel)

    def scores(
        self, output: Tensor, target_SL: Tensor, *, temperature: float, entropy: bool = False
    ) -> TokenScores:
        """Log-probs [S, L] of the targets under the model's output at the same positions; see
        `vocab_parallel`.

        Args:
            output: what the model returned at these positions: logits [S, L, V] or hidden states [S, L, H].
        """
        if self._chunk_size is None:
            return scores_of_logits(
                output, target_SL, shard=self._shard, temperature=temperature, entropy=entropy
            )
        return scores_of_hidden(
            output,
            self._weight(),
            target_SL,
            shard=self._shard,
            temperature=temperature,
            chunk_size=self._chunk_size,
            entropy=entropy,
        )

    def _weight(self) -> Tensor:
        gpt = self._gpt
        weight: Tensor = (
            gpt.shared_embedding_or_output_weight()
            if gpt.share_embeddings_and_output_weights
            else gpt.output_layer.weight
        )
        return weight


def _bare(module: Any) -> Any:
    # Data parallelism and the bfloat16 wrapper call what they wrap `module`.
    while hasattr(module, "module"):
        module = module.module
    return module


def _hand_out_hidden_states(layer: torch.nn.Module, parallel: ParallelContext) -> None:
    """Leave of Megatron's column-parallel layer its parameters and what it does to its input.

    The layer is still called, so that hooks on it (which wait for its parameters where their gathering
    overlaps with the forward pass) fire as before.
    """

    def forward(hidden_LSH: Tensor, *_: object, **__: object) -> tuple[Tensor, None]:
        if parallel.sequence_parallel:
            return gather_from_sequence_parallel_region(
                hidden_LSH, tensor_parallel_output_grad=True, group=parallel.tensor
            ), None
        hidden: Tensor = _SummedGradient.apply(hidden_LSH, parallel.tensor)
        return hidden, None

    layer.forward = forward  # type: ignore[method-assign]


class _SummedGradient(torch.autograd.Function):
    """Identity whose gradient is summed over the group.

    Not Megatron's `copy_to_tensor_model_parallel_region`: of a gradient that is not contiguous, as the one of
    the transposed output is, 0.16.1 reduces a copy and returns the rank's own part (0.19.2 returns the copy).
    """

    @staticmethod
    def forward(ctx: Any, hidden_LSH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return hidden_LSH

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        summed_LSH = grad_outputs[0].clone(memory_format=torch.contiguous_format)
        dist.all_reduce(summed_LSH, group=ctx.group)
        return summed_LSH, None
