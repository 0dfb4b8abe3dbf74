"""How microbatches meet the chunks of an interleaved pipeline. Pure arithmetic, used by `mcore.forward`.

Megatron's interleaved schedule runs groups of consecutive microbatches through one chunk before it turns to the
next chunk. A group, and what is left over after the last whole one, must have at least as many microbatches as
there are stages, or a stage would wait for its own output.
"""

from __future__ import annotations


def fewest_microbatches(*, stages: int, chunks: int) -> int:
    """The smallest number of microbatches that a pass may have."""
    return stages if chunks > 1 else 1


def microbatch_group_size(microbatches: int, *, stages: int) -> int:
    """Microbatches per turn of a chunk: the smallest group that leaves no remainder, or one of >= `stages`.

    The smallest, because activations of a whole group are alive at a time.

    Args:
        microbatches: >= `stages`.
    """
    return next(
        size
        for size in range(stages, microbatches + 1)
        if microbatches % size == 0 or microbatches % size >= stages
    )
