"""The reward function of a run with faults. Built and called in the process that scores.

Owns nothing: which call has a fault is decided outside, because a process that hangs is killed and remembers nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from megatron_ppo.protocol.faults import FaultKind
from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.build import build_scorer

FAULT_KEY = "megatron_ppo.chaos"
"""Entry of a prompt's metadata that orders a fault; its value is a `FaultKind`."""


class FaultyReward:
    """A `Scorer` that misbehaves where the prompt says so, and is the real one otherwise.

    Args:
        target, kwargs: the real one, as of `build_scorer`.
    """

    def __init__(self, *, target: str, kwargs: Mapping[str, str | int | float]) -> None:
        self._scorer = build_scorer(target, kwargs)

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """See `Scorer`. Raises: RuntimeError where that is the fault."""
        match prompt.metadata.get(FAULT_KEY):
            case FaultKind.HANG_REWARD:
                while True:
                    time.sleep(60.0)
            case FaultKind.RAISE_REWARD:
                raise RuntimeError("chaos.raise_reward")
        return self._scorer(prompt, response_token_ids)
