"""The replay snapshot as a record and as JSON text.

Token ids and log-probs become base64 of little-endian int32 and float32: exact, and a fifth of the digits.
JSON, not pickle, because a checkpoint may come from somewhere else.
"""

from __future__ import annotations

import base64
import json
import sys
from array import array
from dataclasses import dataclass, field
from typing import cast

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import LedgerState
from megatron_ppo.protocol.trajectory import (
    Completion,
    PromptGroup,
    Trajectory,
    VersionSpan,
    logprob_array,
    token_array,
)

FORMAT_VERSION = 1
JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferState:
    """Everything that a resume needs; what was only reserved is implied by the ledger.

    Attributes:
        lowest_unfinished: the learner's next step when the snapshot was taken.
        groups: finished groups that were not trained on, oldest commit first.
        failures: how many groups of an open prompt have failed, per ordinal; those without are left out.
    """

    num_prompts_per_step: int
    num_generations_per_prompt: int
    lowest_unfinished: int
    ledger: LedgerState
    groups: tuple[PromptGroup, ...] = field(default=())
    failures: dict[int, int] = field(default_factory=dict)


def to_json(state: BufferState) -> str:
    """`state` as JSON text."""
    return json.dumps(
        {
            "format_version": FORMAT_VERSION,
            "num_prompts_per_step": state.num_prompts_per_step,
            "num_generations_per_prompt": state.num_generations_per_prompt,
            "lowest_unfinished": state.lowest_unfinished,
            "next_ordinal": state.ledger.next_ordinal,
            "cut": state.ledger.cut,
            "trained": list(state.ledger.trained),
            "dropped": {str(q): reason for q, reason in state.ledger.dropped.items()},
            "failures": {str(q): count for q, count in state.failures.items()},
            "groups": [_group_to_json(group) for group in state.groups],
        },
        allow_nan=False,
    )


def from_json(text: str) -> BufferState:
    """The snapshot in `text`. Raises: CheckpointError for another format, a missing key, damaged content."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"the replay snapshot is not JSON: {error}") from error
    seen = data.get("format_version") if isinstance(data, dict) else None
    if seen != FORMAT_VERSION:
        raise CheckpointError(
            f"replay snapshot: format_version is {seen}, this version reads {FORMAT_VERSION}"
        )
    try:
        return BufferState(
            num_prompts_per_step=int(data["num_prompts_per_step"]),
            num_generations_per_prompt=int(data["num_generations_per_prompt"]),
            lowest_unfinished=int(data["lowest_unfinished"]),
            ledger=LedgerState(
                next_ordinal=int(data["next_ordinal"]),
                cut=int(data["cut"]),
                trained=tuple(int(q) for q in data["trained"]),
                dropped={int(q): str(reason) for q, reason in data["dropped"].items()},
            ),
            groups=tuple(_group_from_json(group) for group in data["groups"]),
            # Older snapshots have none.
            failures={int(q): int(count) for q, count in data.get("failures", {}).items()},
        )
    except KeyError as error:
        raise CheckpointError(f"replay snapshot: key {error} is missing") from error
    except (TypeError, ValueError, AttributeError, GroupMismatchError) as error:
        raise CheckpointError(f"replay snapshot: damaged content: {error}") from error


def _group_to_json(group: PromptGroup) -> JsonObject:
    return {
        "ordinal": group.ordinal,
        "target_step": group.target_step,
        "opened_at_step": group.opened_at_step,
        "started_at": group.started_at,
        "finished_at": group.finished_at,
        "prompt": _encode(array("i", group.trajectories[0].prompt_token_ids)),
        "trajectories": [_trajectory_to_json(trajectory) for trajectory in group.trajectories],
    }


def _trajectory_to_json(trajectory: Trajectory) -> JsonObject:
    completion, mask = trajectory.completion, trajectory.loss_mask
    return {
        "tokens": _encode(array("i", completion.token_ids)),
        "logprobs": _encode(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "spans": [[span.version, span.start, span.end] for span in completion.spans],
        "reward": trajectory.reward,
        "loss_mask": None if mask is None else base64.b64encode(mask).decode("ascii"),
    }


def _group_from_json(data: dict[str, object]) -> PromptGroup:
    prompt = token_array(_decode("i", data["prompt"]))
    rows = cast("list[dict[str, object]]", data["trajectories"])
    return PromptGroup(
        ordinal=int(cast("int", data["ordinal"])),
        target_step=int(cast("int", data["target_step"])),
        opened_at_step=int(cast("int", data["opened_at_step"])),
        started_at=float(cast("float", data["started_at"])),
        finished_at=float(cast("float", data["finished_at"])),
        trajectories=tuple(_trajectory_from_json(prompt, row) for row in rows),
    )


def _trajectory_from_json(prompt: array[int], data: dict[str, object]) -> Trajectory:
    spans = cast("list[tuple[int, int, int]]", data["spans"])
    finish_reason, mask = data["finish_reason"], data["loss_mask"]
    if finish_reason not in ("stop", "length"):
        raise ValueError(f"finish_reason must be stop or length, got {finish_reason!r}")
    return Trajectory(
        prompt_token_ids=prompt,
        completion=Completion(
            token_ids=token_array(_decode("i", data["tokens"])),
            logprobs=logprob_array(_decode("f", data["logprobs"])),
            finish_reason=finish_reason,
            spans=tuple(VersionSpan(version=v, start=start, end=end) for v, start, end in spans),
        ),
        reward=float(cast("float", data["reward"])),
        loss_mask=None if mask is None else base64.b64decode(str(mask), validate=True),
    )


def _encode(values: array[int] | array[float]) -> str:
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return base64.b64encode(values.tobytes()).decode("ascii")


def _decode(typecode: str, text: object) -> array[int] | array[float]:
    values: array[int] | array[float] = array(typecode)
    values.frombytes(base64.b64decode(str(text), validate=True))
    if sys.byteorder == "big":
        values.byteswap()
    return values
