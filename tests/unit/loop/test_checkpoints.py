"""Checkpoints as files: what a kill leaves, which ones stay, what a resume restores."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.loop.async_ppo import train
from megatron_ppo.loop.checkpoints import (
    INFO_FILE,
    LATEST_FILE,
    REPLAY_FILE,
    ModelStore,
    RunCheckpoints,
    without_groups,
)
from megatron_ppo.protocol.errors import CheckpointError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.state import BufferState, from_json, to_json
from megatron_ppo.testing.fakes import make_group
from tests.unit.loop.fake_run import WorkLog, fake_run, loop_settings, on_rank_zero
from tests.unit.loop.killed_save import FILE_OPERATIONS, Killed

SCHEDULE = AsyncSchedule(max_num_steps=8, max_trajectory_age_steps=1, policy_training_start_step=1)
METRIC = "validation/accuracy"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class CountingModels:
    """A `ModelStore` that holds the number of completed steps in one file."""

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def save(self, folder: Path) -> None:
        (folder / "models").mkdir()
        (folder / "models" / "weights").write_text(str(self.step))

    def load(self, folder: Path) -> None:
        self.step = int((folder / "models" / "weights").read_text())


class BufferSnapshots:
    """`ReplaySnapshots` over a real buffer that is ahead of the learner by one full step and a half."""

    def __init__(self, schedule: AsyncSchedule = SCHEDULE, *, generations: int = 2) -> None:
        self.buffer = PromptGroupBuffer(
            schedule=schedule, num_prompts_per_step=2, num_generations_per_prompt=generations
        )
        self.restored: list[tuple[str | None, int]] = []

    def train_to(self, step: int) -> None:
        """Train `step` steps; then ordinals up to 2 · step + 2 are ready and one more is in flight."""
        for now in range(step + 1):
            self.buffer.open(now, SCHEDULE.frontier(now))
            for slot in self.buffer.reserve(4):
                if slot.ordinal <= 2 * step + 2:
                    version = SCHEDULE.version_at(now)
                    self.buffer.commit(
                        make_group(
                            ordinal=slot.ordinal,
                            target_step=slot.target_step,
                            opened_at_step=now,
                            versions=(version,),
                        )
                    )
            if now < step:
                assert self.buffer.take(now) is not None

    def snapshot(self) -> str:
        return to_json(self.buffer.state())

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        self.restored.append((snapshot, resume_step))
        if snapshot is not None:
            self.buffer.restore(from_json(snapshot), resume_step=resume_step)


def checkpoints(
    folder: Path,
    *,
    models: ModelStore | None = None,
    replay: BufferSnapshots | None = None,
    **changes: Any,
) -> RunCheckpoints:
    settings: dict[str, Any] = {
        "resume": True,
        "keep": 2,
        "metric": METRIC,
        "higher_is_better": True,
        "identity": {"run.seed": "42", "data": "sort3_5"},
        "load_replay_buffer": True,
        "version_at": SCHEDULE.version_at,
        "on_rank_zero": on_rank_zero,
    }
    return RunCheckpoints(
        folder=folder,
        models=models or CountingModels(),
        replay=replay or BufferSnapshots(),
        **{**settings, **changes},
    )


def save(folder: Path, step: int, accuracy: float | None = None, **changes: Any) -> None:
    replay = BufferSnapshots()
    replay.train_to(step)
    metrics = {} if accuracy is None else {METRIC: accuracy}
    checkpoints(folder, models=CountingModels(step), replay=replay, **changes).save(
        step=step, metrics=metrics
    )


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_weights_groups_and_facts_of_one_step(tmp_path: Path) -> None:
    save(tmp_path, 4, 0.5)
    assert names_in(tmp_path) == [LATEST_FILE, "step_4"]
    assert (tmp_path / LATEST_FILE).read_text() == "step_4"
    assert names_in(tmp_path / "step_4") == ["models", REPLAY_FILE, INFO_FILE]
    info = json.loads((tmp_path / "step_4" / INFO_FILE).read_text())
    assert (info["step"], info["weight_version"], info["metric_value"]) == (4, 3, 0.5)
    assert info["identity"] == {"run.seed": "42", "data": "sort3_5"}


def test_a_resume_restores_models_groups_and_step(tmp_path: Path) -> None:
    save(tmp_path, 2)
    save(tmp_path, 3)
    models, replay = CountingModels(), BufferSnapshots()
    assert checkpoints(tmp_path, models=models, replay=replay).restore() == 3
    assert models.step == 3
    # Ordinals 0 to 5 are trained, 6 to 8 ready for steps 3 and 4, and 9 was in flight.
    assert [group.ordinal for group in replay.buffer.groups()] == [6, 7, 8]
    assert sorted(replay.buffer.status().pending) == [9]


def test_a_copy_that_someone_made_beside_the_checkpoints_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, 2)
    shutil.copytree(tmp_path / "step_2", tmp_path / "step_2_backup")
    for step in (3, 4):
        save(tmp_path, step, keep=1)
    assert names_in(tmp_path) == [LATEST_FILE, "step_2_backup", "step_4"]
    assert checkpoints(tmp_path).restore() == 4


@pytest.mark.parametrize("resume", [True, False])
def test_a_new_run_starts_at_step_zero_with_an_empty_buffer(tmp_path: Path, resume: bool) -> None:
    if not resume:
        save(tmp_path, 2)
    models, replay = CountingModels(), BufferSnapshots()
    assert checkpoints(tmp_path, models=models, replay=replay, resume=resume).restore() == 0
    assert (models.step, replay.restored) == (0, [(None, 0)])


# Kills


class ArmedCheckpoints:
    """Real checkpoints; the save of `step` is killed at a file operation, or right after it."""

    def __init__(self, real: Any, *, step: int, at: int | None) -> None:
        self._real = real
        self._step = step
        self._at = at

    def restore(self) -> int:
        restored: int = self._real.restore()
        return restored

    def save(self, *, step: int, metrics: Mapping[str, float]) -> None:
        armed = step == self._step and self._at is not None
        with FILE_OPERATIONS.killing_at(self._at or 0) if armed else nullcontext():
            self._real.save(step=step, metrics=metrics)
        if step == self._step and self._at is None:
            raise Killed


def live(folder: Path, work: WorkLog, *, die_at_step: int | None = None, at: int | None = None) -> bool:
    """One process over the whole schedule, saving every 2 steps and keeping 2; whether it got to the end."""
    run = fake_run(SCHEDULE, work=work, folder=folder, keep=2, first_step=max(steps_in(folder), default=0))
    if die_at_step is not None:
        run = run.but(checkpoints=ArmedCheckpoints(run.parts.checkpoints, step=die_at_step, at=at))
    try:
        train(loop_settings(SCHEDULE, checkpoint_period=2), SCHEDULE, run.parts)
    except Killed:
        return False
    finally:
        run.collection.close()
    return True


def assert_complete(folder: Path) -> None:
    """The four files are there, whole, and of the folder's own step."""
    step = int(folder.name.removeprefix("step_"))
    trained = max(0, step - 1)
    assert json.loads((folder / INFO_FILE).read_text())["step"] == step
    assert from_json((folder / REPLAY_FILE).read_text()).lowest_unfinished == step
    # Two minibatches a step; the first step is frozen.
    assert json.loads((folder / "critic.json").read_text()) == 2 * step
    assert json.loads((folder / "policy.json").read_text()) == 2 * trained


def test_a_kill_at_any_file_operation_of_a_save_leaves_complete_checkpoints_only(tmp_path: Path) -> None:
    """The save of step 6 publishes it, moves `latest` and lets step 2 go."""
    whole = WorkLog()
    assert live(tmp_path / "whole", whole)
    before = tmp_path / "before"
    first_life = WorkLog()
    assert not live(before, first_life, die_at_step=4)
    assert steps_in(before) == [2, 4]

    seen = set()
    index = 0
    while True:
        folder = tmp_path / f"killed_{index}"
        shutil.copytree(before, folder)
        work = WorkLog()
        work.steps.update(first_life.steps)
        if live(folder, work, die_at_step=6, at=index):
            break
        left = tuple(steps_in(folder))
        seen.add(left)
        for path in folder.glob("step_*"):
            assert_complete(path)
        latest = (folder / LATEST_FILE).read_text()
        assert latest in ("step_4", "step_6") and (folder / latest).is_dir()
        assert live(folder, work), f"the resume failed after a kill at: {FILE_OPERATIONS.last}"
        assert work.steps == whole.steps
        assert names_in(folder) == [LATEST_FILE, "step_6", "step_8"]
        index += 1
    assert seen == {(2, 4), (2, 4, 6), (4, 6)}
    assert index > 20, "the save has more file operations than that; the kills did not happen"


def test_a_save_whose_models_fail_publishes_nothing_and_the_next_one_tidies_up(tmp_path: Path) -> None:
    class Full(CountingModels):
        def save(self, folder: Path) -> None:
            super().save(folder)
            raise OSError(28, "No space left on device")

    save(tmp_path, 2)
    with pytest.raises(OSError, match="No space left"):
        checkpoints(tmp_path, models=Full()).save(step=3, metrics={})
    assert steps_in(tmp_path) == [2]
    assert (tmp_path / LATEST_FILE).read_text() == "step_2"
    save(tmp_path, 4)
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_4"]


# Torn and foreign checkpoints


def damage_info(folder: Path) -> None:
    (folder / INFO_FILE).unlink()


def cut_info(folder: Path) -> None:
    path = folder / INFO_FILE
    path.write_text(path.read_text()[:-20])


def empty_info(folder: Path) -> None:
    (folder / INFO_FILE).write_text("null")


def shorten_info(folder: Path) -> None:
    path = folder / INFO_FILE
    info = json.loads(path.read_text())
    del info["prompts"]
    path.write_text(json.dumps(info))


@pytest.mark.parametrize("damage", [damage_info, cut_info, empty_info, shorten_info])
def test_a_torn_checkpoint_is_skipped_with_a_warning_and_replaced_later(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    damage(tmp_path / "step_4")
    models = CountingModels()
    with caplog.at_level(logging.WARNING):
        assert checkpoints(tmp_path, models=models).restore() == 2
    assert models.step == 2
    assert "skipping torn checkpoint" in caplog.text and "step_4" in caplog.text
    save(tmp_path, 4)
    assert checkpoints(tmp_path, models=models).restore() == 4
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_4"]


def test_torn_checkpoints_do_not_push_out_good_ones(tmp_path: Path) -> None:
    for step in (2, 3, 4, 5):
        save(tmp_path, step, keep=4)
    for step in (4, 5):
        damage_info(tmp_path / f"step_{step}")
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [3, 4, 5]
    assert checkpoints(tmp_path).restore() == 4


def test_a_checkpoint_without_its_models_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert live(folder, WorkLog())
    (folder / "step_8" / "critic.json").unlink()
    run = fake_run(SCHEDULE, folder=folder)
    with pytest.raises(CheckpointError, match=r"step_8: the critic cannot be loaded"):
        run.parts.checkpoints.restore()


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        ({"run.seed": "43", "data": "sort3_5"}, "step_2: run.seed was 42 when it was saved, the run has 43"),
        (
            {"run.seed": "42", "data": "chain_sum"},
            "data was sort3_5 when it was saved, the run has chain_sum",
        ),
        ({"policy.model": "GPT"}, "policy.model was None when it was saved, the run has GPT"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, identity: dict[str, str], message: str
) -> None:
    save(tmp_path, 2)
    models, replay = CountingModels(), BufferSnapshots()
    with pytest.raises(CheckpointError, match=message):
        checkpoints(tmp_path, identity=identity, models=models, replay=replay).restore()
    assert (models.step, replay.restored) == (0, [])


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2" / INFO_FILE).write_text('{"format_version": 99}')
    with pytest.raises(CheckpointError, match=r"format_version is 99, this version reads 1"):
        checkpoints(tmp_path).restore()


# Retention


@pytest.mark.parametrize(
    ("accuracies", "changes", "kept"),
    [
        ([0.1, 0.9, 0.5, 0.6], {}, [2, 3, 4]),
        ([0.1, 0.9, 0.9, 0.6, 0.7], {}, [3, 4, 5]),
        ([0.5, 0.1, 0.1, 0.6, 0.7], {"higher_is_better": False}, [3, 4, 5]),
        ([0.9, 0.1, 0.5, 0.6], {"higher_is_better": False}, [2, 3, 4]),
        ([0.9, None, None, None], {}, [1, 3, 4]),
        ([float("nan"), 0.4, 0.3, 0.2], {}, [2, 3, 4]),
        ([None, None, None, None], {}, [3, 4]),
        ([0.9, 0.8, 0.7, 0.6], {"metric": None}, [3, 4]),
        ([0.1, 0.2, 0.3, 0.4], {"keep": 1}, [4]),
        ([0.4, 0.3, 0.2, 0.1], {"keep": 1}, [1, 4]),
        ([0.4, 0.3, 0.2, 0.1], {"keep": 0, "metric": None}, [4]),
    ],
)
def test_the_newest_and_the_best_stay(
    tmp_path: Path, accuracies: list[float | None], changes: dict[str, Any], kept: list[int]
) -> None:
    for step, accuracy in enumerate(accuracies, start=1):
        save(tmp_path, step, accuracy, **changes)
    assert steps_in(tmp_path) == kept
    assert names_in(tmp_path) == sorted([LATEST_FILE, *(f"step_{step}" for step in kept)])


def test_values_of_another_metric_are_not_compared(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step, 0.9)
    for step in (3, 4, 5):
        replay = BufferSnapshots()
        replay.train_to(step)
        checkpoints(tmp_path, metric="train/reward", replay=replay).save(
            step=step, metrics={"train/reward": 0.5 - step / 10}
        )
    assert steps_in(tmp_path) == [3, 4, 5]


def test_a_missing_ranking_metric_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P8."""
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 2, 0.5)
        assert not caplog.records
        save(tmp_path, 3)
    assert f"checkpoint 3 is not ranked: its step has no metric {METRIC}" in caplog.text


# The replay buffer


@pytest.mark.parametrize("why", ["file is missing", "not wanted"])
def test_a_window_that_is_not_restored_is_generated_again_and_no_prompt_is_lost(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R13."""
    save(tmp_path, 3)
    if why == "file is missing":
        (tmp_path / "step_3" / REPLAY_FILE).unlink()
    replay = BufferSnapshots()
    with caplog.at_level(logging.WARNING, logger="megatron_ppo.loop"):
        wanted = why == "file is missing"
        assert checkpoints(tmp_path, replay=replay, load_replay_buffer=wanted).restore() == 3
    assert (REPLAY_FILE in caplog.text) is wanted
    assert len(replay.buffer) == 0
    assert replay.buffer.trained_ordinals() == tuple(range(6))
    replay.buffer.open(3, SCHEDULE.frontier(3))
    assert [(slot.ordinal, slot.target_step) for slot in replay.buffer.reserve(100)] == [
        (6, 3),
        (7, 3),
        (8, 4),
        (9, 4),
    ]


def test_groups_of_another_size_can_be_generated_again(tmp_path: Path) -> None:
    save(tmp_path, 3)
    with pytest.raises(CheckpointError, match="load_replay_buffer=false"):
        checkpoints(tmp_path, replay=BufferSnapshots(generations=5)).restore()
    replay = BufferSnapshots(generations=5)
    checkpoints(tmp_path, replay=replay, load_replay_buffer=False).restore()
    assert sorted(replay.buffer.status().pending) == [6, 7, 8, 9]


def test_dropping_the_groups_of_a_snapshot_keeps_everything_else() -> None:
    replay = BufferSnapshots()
    replay.train_to(3)
    state = replay.buffer.state()
    assert state.groups
    assert from_json(without_groups(to_json(state))) == BufferState(
        num_prompts_per_step=2,
        num_generations_per_prompt=2,
        lowest_unfinished=3,
        ledger=state.ledger,
        groups=(),
    )


# Several ranks


class OtherRank:
    """What rank 0 found, told to a rank on which the functions must not run."""

    def __init__(self, answers: Mapping[str, object]) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(self, what: str, function: Callable[[], object]) -> object:
        self.asked.append(what)
        return self.answers.get(what)


def test_other_ranks_load_what_rank_zero_chose_and_write_only_models(tmp_path: Path) -> None:
    for step in (2, 3):
        save(tmp_path, step)
    rank_zero = OtherRank({"choice of checkpoint": "step_2"})
    models = CountingModels()
    other = RunCheckpoints(
        folder=tmp_path,
        resume=True,
        keep=1,
        metric=None,
        higher_is_better=True,
        identity={"run.seed": "another"},
        load_replay_buffer=True,
        models=models,
        replay=None,
        version_at=SCHEDULE.version_at,
        on_rank_zero=rank_zero,
    )
    assert other.restore() == 2
    assert models.step == 2
    (tmp_path / "tmp_step_4").mkdir()  # by rank 0, before it lets this rank save
    models.step = 4
    other.save(step=4, metrics={})
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_3", "tmp_step_4"]
    assert names_in(tmp_path / "tmp_step_4") == ["models"]
    assert rank_zero.asked == [
        "choice of checkpoint",
        "restore of the replay buffer",
        "start of checkpoint 4",
        "snapshot of checkpoint 4",
        "publication of checkpoint 4",
    ]


def test_the_snapshot_is_taken_before_the_models_are_saved_and_published_after(tmp_path: Path) -> None:
    order: list[str] = []

    class Models(CountingModels):
        def save(self, folder: Path) -> None:
            order.append("models")
            super().save(folder)

    def noting(what: str, function: Callable[[], object]) -> object:
        order.append(what.split()[0])
        return function()

    checkpoints(tmp_path, models=Models(), on_rank_zero=noting).save(step=1, metrics={})
    assert order == ["start", "snapshot", "models", "publication"]
