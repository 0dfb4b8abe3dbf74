"""Records the groups that the learner trains on, for inspection and for the independent reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_ppo.loop.ports import GroupSource
from megatron_ppo.loop.validation import OnRankZero
from megatron_ppo.protocol.trajectory import PromptGroup, Trajectory


class RecordedGroups:
    """A group source that appends what it hands out to a JSON Lines file, one trajectory a line.

    Invariant: the file holds what the current weights were trained on. After a resume, the first `take` drops what
    an earlier process recorded for steps that are trained again. A failed write is raised on every rank.
    """

    def __init__(self, *, source: GroupSource, path: Path, on_rank_zero: OnRankZero[None]) -> None:
        self._source = source
        self._path = path
        self._on_rank_zero = on_rank_zero
        self._is_first = True

    def take(self, *, target_step: int) -> list[PromptGroup]:
        """As the wrapped source; rank 0 writes before the step begins, in the order of the batch."""
        groups = self._source.take(target_step=target_step)
        self._on_rank_zero(
            f"recording of the groups of step {target_step + 1}", lambda: self._write(target_step, groups)
        )
        return groups

    def _write(self, target_step: int, groups: Sequence[PromptGroup]) -> None:
        if self._is_first:
            self._drop_from(target_step + 1)
            self._is_first = False
        lines = [
            json.dumps(_record(target_step + 1, group, trajectory)) + "\n"
            for group in groups
            for trajectory in group.trajectories
        ]
        with self._path.open("a") as file:
            file.writelines(lines)

    def _drop_from(self, step: int) -> None:
        if not self._path.exists():
            return
        kept = []
        for line in self._path.read_text().splitlines(keepends=True):
            # A kill in the middle of a write leaves a torn last line, of a step that is trained again.
            if line.endswith("\n") and json.loads(line)["step"] < step:
                kept.append(line)
        draft = self._path.with_suffix(".tmp")
        draft.write_text("".join(kept))
        draft.replace(self._path)

    def open(self, *, step: int, frontier: int) -> None:
        """As the wrapped source."""
        self._source.open(step=step, frontier=frontier)


def _record(step: int, group: PromptGroup, trajectory: Trajectory) -> dict[str, object]:
    completion = trajectory.completion
    return {
        "step": step,
        "ordinal": group.ordinal,
        "opened_at_step": group.opened_at_step,
        "prompt": list(trajectory.prompt_token_ids),
        "response": list(completion.token_ids),
        "logprobs": list(completion.logprobs),
        "finish_reason": completion.finish_reason,
        "versions": [[span.version, span.start, span.end] for span in completion.spans],
        "reward": trajectory.reward,
        "started_at": group.started_at,
        "finished_at": group.finished_at,
    }
