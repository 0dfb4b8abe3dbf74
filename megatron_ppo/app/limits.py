"""Limits of waits that are no key of the configuration."""

from __future__ import annotations

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.telemetry.metrics import WAIT_TIMER
from megatron_ppo.telemetry.watchdog import Deadlines

ENDING = "ending"
"""Stage of a trainer rank that closes what it has opened."""

GENERATION_TIMEOUT_S = 600.0
"""Limit of one validation or probe; the engines' own deadlines are shorter."""
MEETING_S = 90.0
"""How long rank 0, in the wait for groups, waits for ranks that have nothing to do but to wait for it. Longer than the
largest message takes, which is a step's batch, and than a machine that is short of memory or swaps."""
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
        config.inference.liveness_deadline_s,  # after a publication that failed
    )
    return longest + CONTROL_MARGIN_S


def stage_deadlines(config: RunConfig, *, rank: int) -> Deadlines:
    """Of every stage that the stage clock of trainer rank `rank` may show.

    The wait for groups, the start and the end have limits of their own, with better messages; the watchdog comes after
    them. In the wait for groups the ranks meet every few seconds. Rank 0 comes last, from the buffer that it asks, or
    together with the others, from a publication that all take part in: it never waits long for them, however slow
    generation is. The others wait for it as long as it may wait for groups.
    """
    watchdog, cluster = config.watchdog, config.cluster
    scoring = (watchdog.scoring_s, "watchdog.scoring_s")
    training = (watchdog.training_s, "watchdog.training_s")
    # Each engine that is built again meanwhile begins the wait anew.
    waits = 1 + config.inference.replicas * config.inference.max_engine_restarts
    wait_s = CONTROL_MARGIN_S + waits * (
        cluster.groups_timeout_s + config.inference.start_timeout_s + watchdog.refit_s
    )
    start_s = 2 * cluster.prepare_timeout_s + config.inference.start_timeout_s + control_timeout_s(config)
    meeting = (MEETING_S, "the limit of rank 0's wait for the other ranks")
    return Deadlines(
        otherwise=(watchdog.other_s, "watchdog.other_s"),
        meetings={WAIT_TIMER: meeting} if rank == 0 else {},
        of={
            "starting": (start_s, "the sum of the limits of a start"),
            WAIT_TIMER: (wait_s, "the sum of the limits of a wait for groups"),
            "data_processing": scoring,
            "value_inference": scoring,
            "policy_and_reference_logprobs": scoring,
            "advantage_calculation": scoring,
            "update": training,
            "value_training": training,
            "policy_training": training,
            "weight_sync": (watchdog.refit_s, "watchdog.refit_s"),
            "idle/validation": (watchdog.validation_s, "watchdog.validation_s"),
            "checkpointing": (watchdog.checkpoint_s, "watchdog.checkpoint_s"),
            ENDING: (
                4 * cluster.shutdown_timeout_s + CONTROL_MARGIN_S,
                "four times cluster.shutdown_timeout_s with a margin",
            ),
        },
    )
