"""How sequences are grouped into microbatches: turns the sections into budgets and checks that they can hold a
sequence.
"""

from __future__ import annotations

import math

from megatron_ppo.config.derived import ParallelSizes, TokenBudgets
from megatron_ppo.config.model_sections import TrainedModelSection


def token_budgets(
    section: TrainedModelSection, sizes: ParallelSizes, *, key: str, max_model_len: int
) -> tuple[TokenBudgets | None, list[str]]:
    """Budgets of the model's passes, and what is wrong with them. None: fixed numbers of sequences.

    Args:
        key: dotted key of the section, for messages.   max_model_len: tokens of the longest sequence.
    """
    dynamic, packing = section.dynamic_batching, section.sequence_packing
    if dynamic.enabled and packing.enabled:
        return None, [
            f"{key}.sequence_packing.enabled: got True; must be false with {key}.dynamic_batching.enabled, "
            "since a microbatch is either padded or packed"
        ]
    if not (dynamic.enabled or packing.enabled):
        return None, []
    multiple = length_multiple(sizes, sequence_parallel=section.parallelism.sequence_parallel)
    if dynamic.enabled:
        multiple = math.lcm(multiple, dynamic.sequence_length_round)
    longest = -(-max_model_len // multiple) * multiple
    chosen = packing if packing.enabled else dynamic
    train = chosen.train_mb_tokens or longest * section.train_micro_batch_size
    score = chosen.logprob_mb_tokens or longest * section.logprob_batch_size
    name = "sequence_packing" if packing.enabled else "dynamic_batching"
    problems = [
        f"{key}.{name}.{field}: got {tokens}; must be >= {longest}: a sequence of inference.max_model_len = "
        f"{max_model_len} tokens, rounded up to a multiple of {multiple}, must fit into a microbatch"
        for field, tokens in (("train_mb_tokens", train), ("logprob_mb_tokens", score))
        if tokens < longest
    ]
    return TokenBudgets(train=train, score=score, packed=packing.enabled, multiple=multiple), problems


def length_multiple(sizes: ParallelSizes, *, sequence_parallel: bool) -> int:
    """What the layout rounds the length of a sequence up to; as `mcore.parallel.ParallelContext` does."""
    zigzag = 2 * sizes.context if sizes.context > 1 else 1
    return zigzag * (sizes.tensor if sequence_parallel else 1)
