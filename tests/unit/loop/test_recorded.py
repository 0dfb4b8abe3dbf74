"""The record of trained groups: what a line says, and that a resume leaves no step twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ppo.loop.recorded import RecordedGroups
from megatron_ppo.protocol.trajectory import PromptGroup
from megatron_ppo.testing.fakes import make_group
from tests.unit.loop.fake_run import on_rank_zero


class Groups:
    """A `GroupSource` of two groups a step; ordinals say in which life they were handed out."""

    def __init__(self, life: int = 0) -> None:
        self.life = life
        self.opened: list[tuple[int, int]] = []

    def take(self, *, target_step: int) -> list[PromptGroup]:
        return [
            make_group(
                ordinal=1000 * self.life + 2 * target_step + i,
                target_step=target_step,
                opened_at_step=max(0, target_step - 1),
                versions=(target_step, target_step + 1),
                reward=0.5,
            )
            for i in range(2)
        ]

    def open(self, *, step: int, frontier: int) -> None:
        self.opened.append((step, frontier))


def recording(source: Groups, path: Path) -> RecordedGroups:
    return RecordedGroups(source=source, path=path, on_rank_zero=on_rank_zero)


def records(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[object]:
    return [record["step"] for record in records(path)]


def test_a_line_holds_everything_that_a_loss_needs(tmp_path: Path) -> None:
    path = tmp_path / "trajectories.jsonl"
    recorded = recording(Groups(), path)
    groups = recorded.take(target_step=3)
    assert [group.ordinal for group in groups] == [6, 7]
    first, *rest = records(path)
    assert first == {
        "step": 4,  # completed steps, as in metrics.jsonl
        "ordinal": 6,
        "opened_at_step": 2,
        "prompt": [1, 9],
        "response": [3, 4],
        "logprobs": [-0.25, -0.375],
        "finish_reason": "length",
        "versions": [[3, 0, 1], [4, 1, 2]],
        "reward": 0.5,
        "started_at": 1000.0,
        "finished_at": 1001.0,
    }
    assert [record["ordinal"] for record in rest] == [6, 7, 7]


def test_openings_are_passed_on(tmp_path: Path) -> None:
    source = Groups()
    recording(source, tmp_path / "t.jsonl").open(step=2, frontier=5)
    assert source.opened == [(2, 5)]


@pytest.mark.parametrize("resume_step", [0, 2, 3])
def test_a_resume_drops_the_steps_that_are_trained_again(tmp_path: Path, resume_step: int) -> None:
    path = tmp_path / "t.jsonl"
    first = recording(Groups(), path)
    for step in range(3):
        first.take(target_step=step)
    second = recording(Groups(life=1), path)
    assert steps(path) == [1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3]  # until something is taken, nothing is dropped
    for step in range(resume_step, 4):
        second.take(target_step=step)
    assert steps(path) == [step for step in range(1, 5) for _ in range(4)]
    lives = [int(str(record["ordinal"])) // 1000 for record in records(path)]
    assert lives == [0] * 4 * resume_step + [1] * 4 * (4 - resume_step)
    assert [file.name for file in tmp_path.iterdir()] == ["t.jsonl"]


@pytest.mark.parametrize("torn_bytes", [1, 20, 150])
def test_a_line_torn_by_a_kill_is_dropped(tmp_path: Path, torn_bytes: int) -> None:
    path = tmp_path / "t.jsonl"
    first = recording(Groups(), path)
    for step in range(3):
        first.take(target_step=step)
    path.write_text(path.read_text()[:-torn_bytes])
    recording(Groups(life=1), path).take(target_step=2)
    assert steps(path) == [1] * 4 + [2] * 4 + [3] * 4


def test_only_rank_zero_writes_and_a_failed_write_reaches_every_rank(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "t.jsonl"
    asked: list[str] = []

    def another_rank(what: str, function: Callable[[], object]) -> None:
        asked.append(what)  # the function runs elsewhere

    RecordedGroups(source=Groups(), path=path, on_rank_zero=another_rank).take(target_step=1)
    assert asked == ["recording of the groups of step 2"]
    assert not path.parent.exists()
    with pytest.raises(FileNotFoundError):
        recording(Groups(), path).take(target_step=1)
