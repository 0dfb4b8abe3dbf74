"""Checkpoints as files: what a kill leaves, which ones stay, what a resume restores."""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ppo.loop.async_ppo import train
from megatron_ppo.loop.checkpoint_folder import (
    FILES_FILE,
    INFO_FILE,
    LATEST_FILE,
    REPLAY_FILE,
    Retention,
    find_checkpoint,
    read_complete,
)
from megatron_ppo.loop.checkpoints import BackgroundSave, ModelStore, RunCheckpoints, without_groups
from megatron_ppo.loop.identity import Trait
from megatron_ppo.protocol.errors import CheckpointError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.state import BufferState, from_json, to_json
from megatron_ppo.testing.fakes import make_group
from tests.unit.disk_events import Flushed, Renamed, record_disk_events, what_is_in
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

    def begin_save(self, folder: Path) -> BackgroundSave:
        raise AssertionError("these tests save synchronously")

    def load(self, folder: Path) -> None:
        self.step = int((folder / "models" / "weights").read_text())


class BufferSnapshots:
    """`ReplaySnapshots` over a real buffer that is ahead of the learner by one full step and a half."""

    def __init__(self, schedule: AsyncSchedule = SCHEDULE, *, generations: int = 2) -> None:
        self.buffer = PromptGroupBuffer(
            schedule=schedule, num_prompts_per_step=2, num_generations_per_prompt=generations
        )
        self.restored: list[tuple[str | None, int]] = []

    def train_to(self, step: int, *, start: int = 0) -> None:
        """Train until `step` steps are complete, from `start`.

        Then ordinals up to 2 · step + 2 are ready and one more is in flight.
        """
        for now in range(start, step + 1):
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


def traits(values: dict[str, str], *, refused: bool = True) -> dict[str, Trait]:
    return {
        name: Trait(value=value, because=f"{name} matters", refused=refused) for name, value in values.items()
    }


def checkpoints(
    folder: Path,
    *,
    models: ModelStore | None = None,
    replay: BufferSnapshots | None = None,
    **changes: Any,
) -> RunCheckpoints:
    retention = {"keep": 2, "keep_best": 1, "metric": METRIC, "higher_is_better": True}
    retention |= {name: changes.pop(name) for name in list(changes) if name in retention}
    settings: dict[str, Any] = {
        "resume": True,
        "retention": Retention(**retention),  # type: ignore[arg-type]
        "identity": traits({"run.seed": "42", "data": "sort3_5"}),
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
    saving = checkpoints(folder, models=CountingModels(step), replay=replay, **changes)
    assert saving.save(step=step, metrics=metrics) == {}
    saving.publish()


def steps_in(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_checkpoint_holds_weights_groups_and_facts_of_one_step(tmp_path: Path) -> None:
    save(tmp_path, 4, 0.5)
    assert names_in(tmp_path) == [LATEST_FILE, "step_4"]
    assert (tmp_path / LATEST_FILE).read_text() == "step_4"
    assert names_in(tmp_path / "step_4") == [FILES_FILE, "models", REPLAY_FILE, INFO_FILE]
    info = json.loads((tmp_path / "step_4" / INFO_FILE).read_text())
    assert (info["step"], info["weight_version"], info["metric_value"]) == (4, 3, 0.5)
    assert info["identity"] == {"run.seed": "42", "data": "sort3_5"}


def test_a_checkpoint_that_is_carried_elsewhere_says_what_it_is(tmp_path: Path) -> None:
    """Configuration, tokenizer, and how far the prompts have come; all of it is part of what must be complete."""
    companions = {"config.yaml": b"run: {}", "hf/policy/tokenizer.json": b"{}"}
    for step in (2, 4):
        save(tmp_path, step, companions=companions, prompts_per_epoch=3)
    for name, content in companions.items():
        assert (tmp_path / "step_4" / name).read_bytes() == content
    facts = [json.loads((tmp_path / f"step_{step}" / INFO_FILE).read_text()) for step in (2, 4)]
    # Two prompts a step: the fifth is the second of the second epoch, the ninth the third of the third.
    assert [(info["consumed_samples"], info["current_epoch"]) for info in facts] == [(4, 1), (8, 2)]
    (tmp_path / "step_4" / "hf" / "policy" / "tokenizer.json").unlink()
    assert checkpoints(tmp_path).restore() == 2


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
    """Real checkpoints; the save of `step` is killed at a file operation, or as soon as it has appeared."""

    def __init__(self, real: Any, *, step: int, at: int | None) -> None:
        self._real = real
        self._step = step
        self._at = at
        self._armed = ExitStack()
        self._saving = False

    @property
    def overdue(self) -> bool:
        overdue: bool = self._real.overdue
        return overdue

    def restore(self) -> int:
        restored: int = self._real.restore()
        return restored

    def save(self, *, step: int, metrics: Mapping[str, float]) -> Mapping[str, float]:
        if step == self._step:
            self._saving = True
            if self._at is not None:
                self._armed.enter_context(FILE_OPERATIONS.killing_at(self._at))
        saved: Mapping[str, float] = self._real.save(step=step, metrics=metrics)
        return saved

    def publish(self, *, wait: bool = False) -> None:
        self._real.publish(wait=wait)
        if self._saving and self._real._checkpoints._current is None:
            self._saving = False
            self._armed.close()
            if self._at is None:
                raise Killed


def live(
    folder: Path,
    work: WorkLog,
    *,
    die_at_step: int | None = None,
    at: int | None = None,
    asynchronous: bool = False,
) -> bool:
    """One process over the whole schedule, saving every 2 steps and keeping 2; whether it got to the end."""
    first_step = max(steps_in(folder), default=0)
    run = fake_run(
        SCHEDULE, work=work, folder=folder, keep=2, first_step=first_step, asynchronous=asynchronous
    )
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
    """The files are there, whole, and of the folder's own step."""
    read_complete(folder)
    step = int(folder.name.removeprefix("step_"))
    trained = max(0, step - 1)
    assert json.loads((folder / INFO_FILE).read_text())["step"] == step
    assert from_json((folder / REPLAY_FILE).read_text()).lowest_unfinished == step
    # Two minibatches a step; the first step is frozen.
    assert json.loads((folder / "critic.json").read_text()) == 2 * step
    assert json.loads((folder / "policy.json").read_text()) == 2 * trained


@pytest.mark.parametrize("asynchronous", [False, True], ids=["synchronous", "asynchronous"])
def test_a_kill_at_any_file_operation_of_a_save_leaves_complete_checkpoints_only(
    tmp_path: Path, asynchronous: bool
) -> None:
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
        if live(folder, work, die_at_step=6, at=index, asynchronous=asynchronous):
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


def test_a_checkpoint_is_on_the_disk_before_its_name_and_its_name_before_the_old_one_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a loss of power at any moment leaves is a whole checkpoint, the old one or the new one."""
    save(tmp_path, 2, keep=1)
    events = record_disk_events(monkeypatch)
    save(tmp_path, 3, keep=1)
    temporary, final = tmp_path / "tmp_step_3", tmp_path / "step_3"
    renames = [event for event in events if isinstance(event, Renamed)]
    assert renames == [
        Renamed(old=temporary, new=final),
        Renamed(old=tmp_path / f"{LATEST_FILE}.tmp", new=tmp_path / LATEST_FILE),
        Renamed(old=tmp_path / "step_2", new=tmp_path / "old_step_2"),
    ]
    appears, latest, goes = (events.index(rename) for rename in renames)
    # As they are now: nothing was written after it was flushed.
    for path in (final, *final.rglob("*")):
        flushed = Flushed(path=temporary / path.relative_to(final), held=what_is_in(path))
        assert flushed in events[:appears], path
    assert Flushed(path=renames[1].old, held=b"step_3") in events[:latest]
    names = frozenset({LATEST_FILE, "step_2", "step_3"})
    assert Flushed(path=tmp_path, held=names) in events[latest:goes]


def test_a_save_whose_models_fail_publishes_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    save(tmp_path, 2)
    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints(tmp_path, models=FullDisk()).save(step=3, metrics={})
    assert names_in(tmp_path) == [LATEST_FILE, "step_2"]
    assert (tmp_path / LATEST_FILE).read_text() == "step_2"
    save(tmp_path, 4)
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_4"]


class FullDisk(CountingModels):
    """Fails after some bytes, as long as `full`."""

    full = True

    def save(self, folder: Path) -> None:
        super().save(folder)
        if self.full:
            raise CheckpointError("rank 1: No space left on device")


def test_a_run_that_warns_of_failed_saves_goes_on_and_tries_again(tmp_path: Path) -> None:
    save(tmp_path, 2)
    told: list[str] = []
    models, replay = FullDisk(), BufferSnapshots()
    saving = checkpoints(tmp_path, models=models, replay=replay, on_error="warn", notify=told.append)
    replay.train_to(3)
    for count in (1.0, 2.0):
        assert saving.save(step=3, metrics={}) == {"checkpoint/failed_saves": count}
        assert saving.overdue
        saving.publish()
        assert names_in(tmp_path) == [LATEST_FILE, "step_2"]
    assert len(told) == 2 and "rank 1: No space left" in told[0] and "tries again" in told[0]
    models.full = False
    models.step = 3
    saving.save(step=3, metrics={})
    saving.publish()
    assert not saving.overdue
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_3"]


class MountedDisk:
    """A file system of 256 KiB."""

    full = "No space left on device"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def fill(self, room: int) -> None:
        """Leave `room` bytes."""
        with pytest.raises(OSError, match=self.full), self._filler.open("wb") as file:
            while True:
                file.write(b"x" * 4096)
                file.flush()
        with self._filler.open("r+b") as file:
            file.truncate(self._filler.stat().st_size - room)

    def make_room(self) -> None:
        """Free everything."""
        self._filler.unlink()


class LimitedFiles:
    """Any file system, where the kernel cuts this process's files at a length: needs no right to mount."""

    full = "File too large"

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill(self, room: int) -> None:
        """No file gets longer than `room` bytes."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, self._limits[1]))

    def make_room(self) -> None:
        """Lift the limit."""
        resource.setrlimit(resource.RLIMIT_FSIZE, self._limits)


@pytest.fixture(params=["mounted", "limited"])
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[MountedDisk | LimitedFiles]:
    """A disk that can be filled up; errors and half-written files are the kernel's own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if request.param == "limited":
        limited = LimitedFiles(folder)
        yield limited
        limited.make_room()
        return
    mount = shutil.which("mount")
    command = [str(mount), "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)]
    if mount is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        pytest.skip("a small file system needs the right to mount one")
    yield MountedDisk(folder)
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.parametrize(("what", "room"), [("side files", 0), ("models", 32 * 1024)])
def test_a_full_disk_leaves_the_previous_checkpoint_and_the_next_one_succeeds_when_there_is_room(
    small_disk: MountedDisk | LimitedFiles, what: str, room: int
) -> None:
    """In a file of rank 0, or while the models are written."""

    class Large(CountingModels):
        def save(self, folder: Path) -> None:
            super().save(folder)
            try:
                (folder / "models" / "more").write_bytes(b"x" * 64 * 1024)
            except OSError as error:
                raise CheckpointError(f"rank 0: {error}") from error

    folder = small_disk.folder / "checkpoints"
    models, replay = Large(2), BufferSnapshots()
    replay.train_to(2)
    told: list[str] = []
    saving = checkpoints(folder, models=models, replay=replay, on_error="warn", notify=told.append)
    saving.save(step=2, metrics={})
    saving.publish()
    small_disk.fill(room)
    models.step = 3
    assert saving.save(step=3, metrics={}) == {"checkpoint/failed_saves": 1.0}
    assert small_disk.full in told[0] and (what in told[0] or room)
    assert names_in(folder) == [LATEST_FILE, "step_2"]
    read_complete(folder / "step_2")
    with pytest.raises(CheckpointError, match=small_disk.full):
        checkpoints(folder, models=Large(3), replay=replay).save(step=3, metrics={})
    small_disk.make_room()
    saving.save(step=4, metrics={})
    saving.publish()
    assert names_in(folder) == [LATEST_FILE, "step_2", "step_4"]


# Saves in the background


class BackgroundModels(CountingModels):
    """Saves in the background, of which the test says when they end, and how; notes what is called."""

    def __init__(self, step: int = 0) -> None:
        super().__init__(step)
        self.calls: list[str] = []
        self.written = False
        self.error: str | None = None

    def begin_save(self, folder: Path) -> BackgroundSave:
        self.calls.append(f"begin {folder.name}")
        store, step = self, self.step
        self.written = False

        class Save:
            def is_written(self) -> bool:
                return store.written

            def finish(self) -> None:
                store.calls.append(f"finish {folder.name}")
                if store.error is not None:
                    raise CheckpointError(store.error)
                CountingModels(step).save(folder)

        return Save()


def background(folder: Path, **changes: Any) -> tuple[RunCheckpoints, BackgroundModels, BufferSnapshots]:
    models, replay = BackgroundModels(), BufferSnapshots()
    return checkpoints(folder, models=models, replay=replay, asynchronous=True, **changes), models, replay


def test_a_save_in_the_background_appears_at_the_boundary_after_its_end(tmp_path: Path) -> None:
    saving, models, replay = background(tmp_path)
    replay.train_to(2)
    models.step = 2
    saving.save(step=2, metrics={METRIC: 0.5})
    saving.publish()
    assert names_in(tmp_path) == ["tmp_step_2"]
    # Training goes on: neither the models nor the buffer of the checkpoint may follow.
    models.step = 3
    replay.train_to(3, start=2)
    models.written = True
    saving.publish()
    assert names_in(tmp_path) == [LATEST_FILE, "step_2"]
    resumed, of_step_2 = CountingModels(), BufferSnapshots()
    assert checkpoints(tmp_path, models=resumed, replay=of_step_2).restore() == 2
    assert resumed.step == 2
    assert [group.ordinal for group in of_step_2.buffer.groups()] == [4, 5, 6]
    saving.publish(wait=True)  # nothing is left to do
    assert models.calls == ["begin tmp_step_2", "finish tmp_step_2"]


def test_a_save_ends_before_the_next_begins_and_before_the_run_does(tmp_path: Path) -> None:
    saving, models, _ = background(tmp_path)
    for step in (1, 2):
        models.step = step
        saving.save(step=step, metrics={})
        saving.publish()
    assert models.calls == ["begin tmp_step_1", "finish tmp_step_1", "begin tmp_step_2"]
    assert names_in(tmp_path) == [LATEST_FILE, "step_1", "tmp_step_2"]
    saving.publish(wait=True)
    assert names_in(tmp_path) == [LATEST_FILE, "step_1", "step_2"]


@pytest.mark.parametrize("when", ["next boundary", "next save", "end"])
def test_a_write_that_failed_in_the_background_is_met_at_the_next_call(tmp_path: Path, when: str) -> None:
    save(tmp_path, 1)
    saving, models, _ = background(tmp_path)
    saving.save(step=2, metrics={})
    models.error = "rank 1: Input/output error"
    models.written = when == "next boundary"
    with pytest.raises(CheckpointError, match="rank 1: Input/output error"):
        if when == "next save":
            saving.save(step=3, metrics={})
        else:
            saving.publish(wait=when == "end")
    assert names_in(tmp_path) == [LATEST_FILE, "step_1"]
    saving.publish(wait=True)  # a failure is raised once; the run ends with it


def test_a_background_write_that_failed_is_made_up_for_by_the_next_step(tmp_path: Path) -> None:
    saving, models, _ = background(tmp_path, on_error="warn", notify=lambda text: None)
    saving.save(step=2, metrics={})
    models.error, models.written = "rank 0: No space left on device", True
    assert not saving.overdue
    saving.publish()
    assert saving.overdue and names_in(tmp_path) == []
    models.error = None
    assert saving.save(step=3, metrics={}) == {"checkpoint/failed_saves": 1.0}
    assert not saving.overdue
    saving.publish(wait=True)
    assert names_in(tmp_path) == [LATEST_FILE, "step_3"]


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


def lose_models(folder: Path) -> None:
    (folder / "models" / "weights").unlink()


def cut_models(folder: Path) -> None:
    (folder / "models" / "weights").write_text("")


def lose_list(folder: Path) -> None:
    (folder / FILES_FILE).unlink()


def cut_replay(folder: Path) -> None:
    (folder / REPLAY_FILE).write_text("{")


DAMAGES = {
    damage_info: INFO_FILE,
    cut_info: "Expecting",
    empty_info: "not an object",
    shorten_info: "lacks ['prompts']",
    lose_models: "models/weights is missing",
    cut_models: "models/weights has 0 bytes, it had 1 when it was saved",
    lose_list: FILES_FILE,
    cut_replay: f"{REPLAY_FILE} has 1 bytes",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_torn_checkpoint_is_skipped_with_a_warning_and_replaced_later(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    for step in (2, 4):
        save(tmp_path, step)
    damage(tmp_path / "step_4")
    models = CountingModels()
    told: list[str] = []
    with caplog.at_level(logging.WARNING):
        assert checkpoints(tmp_path, models=models, notify=told.append).restore() == 2
    assert models.step == 2
    for seen in (caplog.text, *told):  # the log file, and the terminal
        assert "skipping torn checkpoint" in seen and "step_4" in seen
        assert DAMAGES[damage] in seen
    assert len(told) == 1
    with pytest.raises(CheckpointError, match="step_4 is not a complete checkpoint"):
        find_checkpoint(tmp_path / "step_4")
    assert find_checkpoint(tmp_path) == tmp_path / "step_2"
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


def test_a_run_whose_checkpoints_are_all_torn_is_not_started_over_in_silence(tmp_path: Path) -> None:
    """`run.resume=auto` too: the folder holds trained steps, which would be overwritten."""
    for step in (2, 3):
        save(tmp_path, step)
        lose_models(tmp_path / f"step_{step}")
    told: list[str] = []
    models, replay = CountingModels(), BufferSnapshots()
    resuming = checkpoints(tmp_path, models=models, replay=replay, required=False, notify=told.append)
    with pytest.raises(
        CheckpointError, match=r"this run is to be continued, but.*step_3: .*step_2: .*run\.resume=never"
    ):
        resuming.restore()
    assert len(told) == 2
    assert (models.step, replay.restored, steps_in(tmp_path)) == (0, [], [2, 3])


def test_a_run_that_was_named_to_be_continued_and_has_no_checkpoint_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"run\.resume names this run.*no complete checkpoint; run"):
        checkpoints(tmp_path, required=True).restore()
    save(tmp_path, 2)
    lose_models(tmp_path / "step_2")
    with pytest.raises(CheckpointError, match=r"torn: .*step_2: models/weights is missing"):
        checkpoints(tmp_path, required=True).restore()
    save(tmp_path, 1)
    assert checkpoints(tmp_path, required=True).restore() == 1


def test_a_checkpoint_is_found_by_its_run_its_folder_or_itself(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    folder.mkdir(parents=True)
    with pytest.raises(CheckpointError, match="run holds no complete checkpoint"):
        find_checkpoint(tmp_path / "run")
    for step in (1, 2):
        save(folder, step)
    for path in (tmp_path / "run", folder, folder / "step_2"):
        assert find_checkpoint(path) == folder / "step_2"
    assert find_checkpoint(folder / "step_1") == folder / "step_1"
    with pytest.raises(CheckpointError, match="step_7 is not a complete checkpoint"):
        find_checkpoint(folder / "step_7")


@pytest.mark.parametrize(
    ("identity", "message"),
    [
        (
            {"run.seed": "43", "data": "sort3_5"},
            "step_2: run.seed was 42 when it was saved, the run has 43; run.seed matters",
        ),
        (
            {"run.seed": "42", "data": "chain_sum"},
            "data was sort3_5 when it was saved, the run has chain_sum; data matters",
        ),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, identity: dict[str, str], message: str
) -> None:
    save(tmp_path, 2)
    models, replay = CountingModels(), BufferSnapshots()
    with pytest.raises(CheckpointError, match=message):
        checkpoints(tmp_path, identity=traits(identity), models=models, replay=replay).restore()
    assert (models.step, replay.restored) == (0, [])


def test_a_harmless_difference_and_one_that_was_not_recorded_are_told(tmp_path: Path) -> None:
    save(tmp_path, 2)
    told: list[str] = []
    harmless = traits({"data": "other files", "tokenizer": "0a1b"}, refused=False)
    assert checkpoints(tmp_path, identity=harmless, notify=told.append).restore() == 2
    assert [line.partition("step_2: ")[2] for line in told] == [
        "data was sort3_5 when it was saved, the run has other files; the run goes on, data matters",
        "tokenizer was not recorded when it was saved, so it is not compared",
    ]


def test_a_checkpoint_of_another_format_is_refused(tmp_path: Path) -> None:
    save(tmp_path, 2)
    (tmp_path / "step_2" / INFO_FILE).write_text('{"format_version": 99}')
    with pytest.raises(CheckpointError, match=r"format_version is 99, this version reads 2"):
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
        ([0.4, 0.7, 0.6, 0.5, 0.1], {"keep": 1, "keep_best": 2}, [2, 3, 5]),
        ([0.7, 0.7, 0.7, 0.5, 0.1], {"keep": 1, "keep_best": 2}, [2, 3, 5]),
        ([0.4, 0.3, 0.2, 0.1], {"keep": 1, "keep_best": 0}, [4]),
        ([0.1, 0.2, 0.3, 0.4], {"keep": 2, "keep_best": 3}, [2, 3, 4]),
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
        saving = checkpoints(tmp_path, metric="train/reward", replay=replay)
        saving.save(step=step, metrics={"train/reward": 0.5 - step / 10})
        saving.publish()
    assert steps_in(tmp_path) == [3, 4, 5]


def test_a_missing_ranking_metric_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """P8."""
    with caplog.at_level(logging.WARNING):
        save(tmp_path, 2, 0.5)
        assert not caplog.records
        save(tmp_path, 3)
    assert f"checkpoint 3 is not ranked: its step has no metric {METRIC}" in caplog.text


# The replay buffer


@pytest.mark.parametrize("why", ["file is missing", "not wanted", "versions are counted differently"])
def test_a_window_that_is_not_restored_is_generated_again_and_no_prompt_is_lost(
    tmp_path: Path, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """R13."""
    save(tmp_path, 3)
    if why == "file is missing":
        (tmp_path / "step_3" / REPLAY_FILE).unlink()
    replay = BufferSnapshots()
    changes = {"version_at": lambda step: step + 7} if why.startswith("versions") else {}
    with caplog.at_level(logging.WARNING, logger="megatron_ppo.loop"):
        wanted = why != "not wanted"
        resumed = checkpoints(tmp_path, replay=replay, load_replay_buffer=wanted, **changes)
        assert resumed.restore() == 3
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
        retention=Retention(keep=1, keep_best=1, metric=None, higher_is_better=True),
        identity=traits({"run.seed": "another"}),
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
    other.publish()
    assert names_in(tmp_path) == [LATEST_FILE, "step_2", "step_3", "tmp_step_4"]
    assert names_in(tmp_path / "tmp_step_4") == ["models"]
    assert rank_zero.asked == [
        "choice of checkpoint",
        "restore of the replay buffer",
        "snapshot of checkpoint 4",
        "start of checkpoint 4",
        "side files of checkpoint 4",
        "seal of checkpoint 4",
        "publication of checkpoint 4",
    ]


def test_every_rank_meets_a_failure_of_rank_zero_as_the_same_error(tmp_path: Path) -> None:
    """So that all of them stop, or all of them go on."""
    message = "checkpoint 4 could not be written (seal): [Errno 28] No space left on device"
    other = checkpoints(tmp_path, on_rank_zero=OtherRank({"seal of checkpoint 4": message}))
    (tmp_path / "tmp_step_4").mkdir()
    with pytest.raises(CheckpointError, match="No space left"):
        other.save(step=4, metrics={})

    def failing(what: str, function: Callable[[], object]) -> object:
        return message if what.startswith("seal") else function()

    with pytest.raises(CheckpointError, match="No space left"):
        checkpoints(tmp_path, on_rank_zero=failing).save(step=4, metrics={})


def test_the_snapshot_is_taken_before_the_models_are_saved_and_published_after(tmp_path: Path) -> None:
    order: list[str] = []

    class Models(CountingModels):
        def save(self, folder: Path) -> None:
            order.append("models")
            super().save(folder)

    def noting(what: str, function: Callable[[], object]) -> object:
        order.append(what.split()[0])
        return function()

    saving = checkpoints(tmp_path, models=Models(), on_rank_zero=noting)
    saving.save(step=1, metrics={})
    saving.publish()
    assert order == ["snapshot", "start", "side", "models", "seal", "publication"]
