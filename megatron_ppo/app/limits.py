"""Limits of waits that are no key of the configuration."""

from __future__ import annotations

from megatron_ppo.config.schema import RunConfig

GENERATION_TIMEOUT_S = 600.0
"""Limit of one validation or probe; the engines' own deadlines are shorter."""
CONTROL_MARGIN_S = 120.0
"""Covers the grace that rank 0's waits add to their limits."""


def control_timeout_s(config: RunConfig) -> float:
    """How long the other ranks wait while rank 0 acts alone, in seconds.

    Later than every limit of rank 0's own, so that its message comes first and a slow action is no lost rank.
    """
    longest = max(
        config.cluster.process_group_timeout_s,
        2 * config.cluster.prepare_timeout_s,  # policy and critic
        2 * GENERATION_TIMEOUT_S,  # the first probe generates, then scores
        # A publication may find every engine being built again, and then forms a group with the first that is up.
        config.inference.start_timeout_s + 2 * config.refit.timeout_s,
    )
    return longest + CONTROL_MARGIN_S
