"""What the buffer takes: finished groups, and the snapshots that it is restored from. Functions of `PromptGroupBuffer`.

A group that fails a check here is a bug of its sender and raises; one that is only too old is an ordinary event, which
`is_fresh` tells and the buffer counts.
"""

from __future__ import annotations

import logging

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import Ledger, OrdinalStatus
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.replay.state import BufferState

logger = logging.getLogger(__name__)


def is_fresh(group: PromptGroup, schedule: AsyncSchedule) -> bool:
    """Whether every token is of a version that the group's target step may train on."""
    oldest = schedule.oldest_version_for(group.target_step)
    return oldest <= group.min_version and group.max_version <= schedule.version_at(group.target_step)


def check_group(group: PromptGroup, *, schedule: AsyncSchedule, num_generations: int) -> None:
    """Raises: GroupMismatchError for the wrong size, different prompts, or weights newer than the target step's."""
    if len(group.trajectories) != num_generations:
        raise GroupMismatchError(
            f"group of ordinal {group.ordinal} has {len(group.trajectories)} trajectories, "
            f"algorithm.num_generations_per_prompt is {num_generations}"
        )
    prompt = group.trajectories[0].prompt_token_ids
    if any(trajectory.prompt_token_ids != prompt for trajectory in group.trajectories):
        raise GroupMismatchError(f"group of ordinal {group.ordinal} mixes different prompts")
    newest = schedule.version_at(group.target_step)
    if group.max_version > newest:
        raise GroupMismatchError(
            f"group of ordinal {group.ordinal} was sampled by version {group.max_version}, "
            f"but its target step {group.target_step} holds version {newest} at most"
        )


def check_state(state: BufferState, *, resume_step: int, num_prompts: int, num_generations: int) -> None:
    """Raises: CheckpointError for a snapshot of other settings, of a later step, or one that contradicts itself."""
    if state.num_generations_per_prompt != num_generations:
        if state.groups:
            raise CheckpointError(
                "algorithm.num_generations_per_prompt cannot change on resume: the saved groups have "
                f"{state.num_generations_per_prompt} trajectories, the run has {num_generations}; "
                "set checkpoint.load_replay_buffer=false to generate them again"
            )
        logger.warning(
            "algorithm.num_generations_per_prompt was %d when saved, is %d now; no saved group is restored",
            state.num_generations_per_prompt,
            num_generations,
        )
    if state.lowest_unfinished > resume_step:
        raise CheckpointError(
            f"the replay snapshot has trained step {state.lowest_unfinished - 1} already, the weights "
            f"have {resume_step} completed steps; snapshot and weights must come from one checkpoint"
        )
    if state.num_prompts_per_step != num_prompts:
        logger.warning(
            "algorithm.num_prompts_per_step was %d when saved, is %d now; targets are filled or trimmed",
            state.num_prompts_per_step,
            num_prompts,
        )
    ordinals = [group.ordinal for group in state.groups]
    if len(set(ordinals)) != len(ordinals):
        raise CheckpointError(f"the replay snapshot holds an ordinal twice: {sorted(ordinals)}")
    ledger = Ledger(state.ledger)
    final = [q for q in ordinals if ledger.status(q) is not OrdinalStatus.PENDING]
    if final:
        raise CheckpointError(f"the replay snapshot holds groups of ordinals that are not open: {final}")
    for group in state.groups:
        if len(group.trajectories) != num_generations:
            raise CheckpointError(
                f"saved group of ordinal {group.ordinal} has {len(group.trajectories)} trajectories, "
                f"expected {num_generations}"
            )
