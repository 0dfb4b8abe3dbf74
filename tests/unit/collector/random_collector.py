"""The real collector with limits drawn at random, for whole runs over fakes that fail at any moment."""

from __future__ import annotations

import random
from typing import Any

from megatron_ppo.collector.collector import Collector
from megatron_ppo.protocol.trajectory import SamplingSettings
from megatron_ppo.testing.fakes import FakePromptStream


def random_collector(rng: random.Random, *, most_retries: int, deadline_s: float, **parts: Any) -> Collector:
    """Failures never end the run.

    Args:
        parts: `replay`, `engine`, `scoring`, `num_generations`, `seed`, `reserve_timeout_s` and others of `Collector`.
    """
    return Collector(
        prompts=FakePromptStream(),
        sampling=SamplingSettings(max_new_tokens=6),
        max_concurrent_groups=rng.randint(1, 4),
        deadline_s=deadline_s,
        max_retries=rng.randint(0, most_retries),
        retry_backoff_s=0.0,
        max_generation_failures=10**6,
        **parts,
    )
