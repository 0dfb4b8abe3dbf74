"""The endless prompt stream: which example stands at which ordinal.

Driven by the collector. Invariant: `prompt_at(ordinal)` depends on (examples, seed, ordinal) only, so a
resumed run finds at every ordinal the prompt that the first run had there.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from megatron_ppo.data.task import TaskExample
from megatron_ppo.protocol.trajectory import Prompt

# Restores and stragglers look back over at most one border between epochs.
_CACHED_EPOCHS = 2


class ShuffledPrompts:
    """Cycles over the examples for ever, in a new order in every epoch.

    Example: with n examples, ordinal q is position q % n of the permutation of (seed, q // n).
    """

    def __init__(self, *, examples: Sequence[TaskExample], seed: int) -> None:
        """Raises: ValueError for no examples."""
        if not examples:
            raise ValueError("a prompt stream needs at least 1 example, got 0")
        self._examples = tuple(examples)
        self._seed = seed
        self._orders: dict[int, list[int]] = {}

    def __len__(self) -> int:
        """Prompts per epoch."""
        return len(self._examples)

    def prompt_at(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal`. Raises: ValueError if it is negative."""
        if ordinal < 0:
            raise ValueError(f"prompt ordinal must be >= 0, got {ordinal}")
        epoch, position = divmod(ordinal, len(self._examples))
        return self._examples[self._order(epoch)[position]].prompt(ordinal)

    def _order(self, epoch: int) -> list[int]:
        order = self._orders.get(epoch)
        if order is None:
            order = list(range(len(self._examples)))
            # A string seed is hashed by SHA-512: stable across processes, and (1, 23) differs from (12, 3).
            random.Random(f"prompts/{self._seed}/{epoch}").shuffle(order)
            while len(self._orders) >= _CACHED_EPOCHS:
                del self._orders[next(iter(self._orders))]
            self._orders[epoch] = order
        return order
