"""The ledger's file: moves, kills, resumes, and what `scripts/ledger.py` says about them."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import pytest

from megatron_ppo.protocol.errors import CheckpointError, GroupMismatchError
from megatron_ppo.protocol.ledger import LedgerCounts
from megatron_ppo.protocol.moves import Move, Stage
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Reservation
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.history import LedgerHistory, read_entries, read_history
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.replay.service import ReplayService
from megatron_ppo.testing.fakes import make_group
from tests.unit.disk_events import Flushed, record_disk_events
from tests.unit.script_runs import run_script, run_script_here

SCHEDULE = AsyncSchedule(max_num_steps=10, max_trajectory_age_steps=1)


class Life:
    """One process's life of a buffer with N = 2 whose ledger is `path`."""

    def __init__(self, path: Path) -> None:
        self.journal = LedgerFile(path)
        self.buffer = PromptGroupBuffer(
            schedule=SCHEDULE, num_prompts_per_step=2, num_generations_per_prompt=1, journal=self.journal
        )
        self.service = ReplayService(self.buffer, journal=self.journal)

    def restore(self, snapshot: str | None, step: int) -> None:
        asyncio.run(self.service.restore(snapshot, resume_step=step))
        self.buffer.open(step, SCHEDULE.frontier(step))

    def fill(self, count: int) -> list[Reservation]:
        reservations = self.buffer.reserve(count)
        for slot in reservations:
            self.finish(slot)
        return reservations

    def finish(self, slot: Reservation) -> None:
        for stage in (Stage.GENERATED, Stage.SCORED):
            assert self.buffer.note(slot, stage)
        group = make_group(
            ordinal=slot.ordinal,
            target_step=slot.target_step,
            opened_at_step=slot.opened_at_step,
            versions=(slot.opened_at_step,),
            num_generations=1,
        )
        self.buffer.commit(group)

    def train(self, step: int) -> str:
        """Train `step`, open the next window, and snapshot."""
        asyncio.run(self.service.take(target_step=step, timeout_s=0.0))
        self.buffer.open(step + 1, SCHEDULE.frontier(step + 1))
        return asyncio.run(self.service.snapshot())

    def kill(self) -> None:
        """What was not flushed is gone."""
        os.close(self.journal._descriptor)


def _stages(path: Path, ordinal: int) -> list[tuple[int, str]]:
    return [(e.attempt, str(e.move.stage)) for e in read_entries(path, ordinal=ordinal) if e.move is not None]


def _script(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script_here("ledger", str(run_dir), *arguments)


def test_a_prompt_moves_through_every_stage_and_each_has_its_line(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.jsonl")
    life.restore(None, 0)
    life.fill(2)
    life.train(0)
    assert _stages(tmp_path / "ledger.jsonl", 1) == [
        (1, stage) for stage in ("dispatched", "generated", "scored", "committed", "trained")
    ]
    trained = [e.move for e in read_entries(tmp_path / "ledger.jsonl", ordinal=1) if e.move is not None][-1]
    assert (trained.step, trained.target_step, trained.min_version, trained.max_version) == (0, 0, 0, 0)


def test_the_ledger_is_on_the_disk_before_the_snapshot_that_relies_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Moves are cheap to lose, except those that a checkpoint is written from."""
    path = tmp_path / "ledger.jsonl"
    life = Life(path)
    life.restore(None, 0)
    life.fill(2)
    events = record_disk_events(monkeypatch)
    asyncio.run(life.service.take(target_step=0, timeout_s=0.0))
    assert events == []
    asyncio.run(life.service.snapshot())
    assert events == [Flushed(path=path, held=path.read_bytes())]
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1]


def test_a_training_beyond_the_restored_checkpoint_is_rolled_back(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(4)
    snapshot = first.train(0)
    first.fill(2)
    first.train(1)  # saved nowhere
    first.kill()

    second = Life(path)
    second.restore(snapshot, 1)
    # Groups 2 and 3 were finished when the checkpoint was written: they come back committed.
    assert _stages(path, 2)[-2:] == [(2, "rolled_back"), (2, "committed")]
    # Ordinals 4 and 5 came later than the checkpoint: it does not know them.
    assert _stages(path, 4)[-1] == (2, "rolled_back")
    assert _stages(path, 0)[-1] == (1, "trained")
    second.train(1)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1, 2, 3]
    second.fill(2)
    second.train(2)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1, 2, 3, 4, 5]


def test_moves_that_a_kill_lost_are_taken_over_from_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(4)
    snapshot = first.train(0)
    first.kill()
    path.write_bytes(path.read_bytes()[:300])  # in the middle of a line

    second = Life(path)
    second.restore(snapshot, 1)
    second.train(1)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1, 2, 3]
    assert read_history(path).attempt == 2


@pytest.mark.parametrize("size", range(0, 700, 7))
def test_a_file_that_is_cut_anywhere_is_continued(tmp_path: Path, size: int) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(3)
    snapshot = first.train(0)
    first.kill()
    path.write_bytes(path.read_bytes()[:size])
    second = Life(path)
    second.restore(snapshot, 1)
    second.fill(1)
    second.train(1)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1, 2, 3]


def test_a_line_that_lacks_only_its_end_counts_neither_at_the_restart_nor_later(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(2)
    first.train(0)
    first.kill()
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert read_history(path).ordinals(Stage.TRAINED) == [0]
    second = Life(path)
    second.restore(None, 0)
    second.fill(2)
    second.train(0)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1]


def test_lines_of_a_process_that_outlived_its_attempt_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(2)
    first.journal.flush()
    second = Life(path)
    second.restore(None, 0)
    first.train(0)
    second.fill(2)
    second.train(0)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1]
    assert _stages(path, 0).count((1, "trained")) == 0


def test_released_and_dropped_prompts_keep_their_reasons(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    life = Life(path)
    life.restore(None, 0)
    slot, other = life.buffer.reserve(2)
    life.buffer.release(slot, reason="the engine died")
    life.buffer.drop(other, reason="failed 3 times")
    life.journal.flush()
    reasons = {e.move.stage: e.move.reason for e in read_entries(path) if e.move is not None}
    assert reasons[Stage.DROPPED] == "failed 3 times"
    assert "the engine died" in path.read_text()
    assert read_history(path).ordinals(Stage.DROPPED) == [1]
    assert not life.buffer.note(slot, Stage.GENERATED)


def test_a_cut_below_the_trained_frontier_is_logged_at_save_and_restore(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = Life(tmp_path / "ledger.jsonl")
    first.restore(None, 0)
    slots = first.buffer.reserve(4)
    first.finish(slots[0])
    first.buffer.drop(slots[1], reason="failed for good")
    assert [slot.target_step for slot in first.fill(1)] == [0]  # a later prompt, ordinal 4, takes the place
    snapshot = first.train(0)
    message = "a resume starts at ordinal 2, below the trained frontier 5: ordinals [2, 3] are open"
    assert caplog.text.count(message) == 1
    second = Life(tmp_path / "ledger.jsonl")
    second.restore(snapshot, 1)
    assert caplog.text.count(message) == 2
    second.fill(2)
    second.train(1)
    assert read_history(tmp_path / "ledger.jsonl").ordinals(Stage.TRAINED) == [0, 2, 3, 4]
    assert caplog.text.count("below the trained frontier") == 2


def test_a_history_that_differs_from_the_buffer_ends_the_step(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.jsonl")
    life.restore(None, 0)
    life.fill(2)
    life.buffer.ledger.reserve_next()  # behind the buffer's back
    with pytest.raises(GroupMismatchError, match="out of balance"):
        life.train(0)


@pytest.mark.parametrize("lost", [2, 3], ids=["below all open ones", "above an open one"])
def test_a_pending_prompt_that_gets_lost_ends_the_step(tmp_path: Path, lost: int) -> None:
    """The history does not compare pending ones; the ledger's own sum has to."""
    life = Life(tmp_path / "ledger.jsonl")
    life.restore(None, 0)
    life.fill(2)
    for slot in life.buffer.reserve(2):  # ordinals 2 and 3
        life.buffer.release(slot, reason="the engine died")
    del life.buffer.ledger._active[lost]
    with pytest.raises(
        GroupMismatchError, match=r"out of balance: .*trained=2.* add up to 3, but 4 ordinals"
    ):
        life.train(0)


def test_a_drop_beyond_the_restored_checkpoint_is_rolled_back_and_its_prompt_comes_again(
    tmp_path: Path,
) -> None:
    """What the checkpoint has open, in one case not even handed out, is dropped in the file."""
    path = tmp_path / "ledger.jsonl"
    first = Life(path)
    first.restore(None, 0)
    first.fill(2)
    in_flight = first.buffer.reserve(1)
    snapshot = first.train(0)
    first.buffer.drop(in_flight[0], reason="failed 3 times")
    (_, fresh) = first.buffer.reserve(2)
    first.buffer.drop(fresh, reason="failed 4 times")
    assert (in_flight[0].ordinal, fresh.ordinal) == (2, 4)
    first.journal.flush()
    assert read_history(path).ordinals(Stage.DROPPED) == [2, 4]
    first.kill()

    second = Life(path)
    second.restore(snapshot, 1)
    assert _stages(path, 2)[-2:] == [(1, "dropped"), (2, "rolled_back")]
    assert _stages(path, 4)[-2:] == [(1, "dropped"), (2, "rolled_back")]
    assert [slot.ordinal for slot in second.fill(4)] == [2, 3, 4, 5]
    second.train(1)
    second.train(2)
    assert read_history(path).ordinals(Stage.TRAINED) == [0, 1, 2, 3, 4, 5]
    assert read_history(path).ordinals(Stage.DROPPED) == []


def test_impossible_moves_are_refused() -> None:
    history = LedgerHistory()
    history.apply(Move(ordinal=3, stage=Stage.DISPATCHED))
    with pytest.raises(GroupMismatchError, match="ordinal 3 cannot become trained, it is dispatched"):
        history.apply(Move(ordinal=3, stage=Stage.TRAINED))
    with pytest.raises(GroupMismatchError, match="ordinal 2 cannot become committed, it is unseen"):
        history.apply(Move(ordinal=2, stage=Stage.COMMITTED))
    history.apply(Move(ordinal=3, stage=Stage.COMMITTED))
    history.apply(Move(ordinal=3, stage=Stage.TRAINED))
    with pytest.raises(GroupMismatchError, match="ordinal 3 cannot become trained, it is trained"):
        history.apply(Move(ordinal=3, stage=Stage.TRAINED, restored=True))
    history.check(LedgerCounts(pending=3, reserved=0, ready=0, trained=1, dropped=0))
    with pytest.raises(GroupMismatchError, match="trained"):
        history.check(LedgerCounts(pending=3, reserved=0, ready=0, trained=2, dropped=0))


def test_a_file_that_contradicts_itself_or_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"ordinal":0,"stage":"trained","attempt":1,"time":1.0}\n')
    with pytest.raises(CheckpointError, match="contradicts itself"):
        LedgerFile(path)
    path.write_text('{"ordinal":0,"stage":"eaten","attempt":1,"time":1.0}\n')
    with pytest.raises(CheckpointError, match="line 1 is not a ledger entry"):
        LedgerFile(path)


def test_a_full_disk_loses_no_move(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    life = Life(tmp_path / "ledger.jsonl")
    life.restore(None, 0)
    write = os.write
    with monkeypatch.context() as full:

        def write_half(descriptor: int, data: bytes) -> int:
            if len(data) < 100:
                raise OSError(28, "No space left on device")
            return write(descriptor, bytes(data[: len(data) // 2]))

        full.setattr(os, "write", write_half)
        life.fill(2)
        life.train(0)
    life.journal.close()
    assert read_history(tmp_path / "ledger.jsonl").ordinals(Stage.TRAINED) == [0, 1]


def test_keeping_the_history_of_a_step_takes_milliseconds(tmp_path: Path) -> None:
    """1024 prompts in 5 moves each. Steps of that size take minutes; 0.5 s leaves room for a busy machine."""
    journal = LedgerFile(tmp_path / "ledger.jsonl")
    stages = (Stage.DISPATCHED, Stage.GENERATED, Stage.SCORED, Stage.COMMITTED, Stage.TRAINED)
    start = time.process_time()
    for ordinal in range(1024):
        for stage in stages:
            journal.record(Move(ordinal=ordinal, stage=stage, step=1, target_step=2))
    journal.flush()
    assert time.process_time() - start < 0.5


def test_the_script_explains_sums_up_and_lists_what_is_open(tmp_path: Path) -> None:
    life = Life(tmp_path / "ledger.jsonl")
    life.restore(None, 0)
    life.fill(3)
    life.train(0)
    life.buffer.reserve(1)
    life.journal.flush()
    explained = run_script("ledger", str(tmp_path), "explain", "1")
    assert explained.returncode == 0, explained.stderr
    assert "trained  at step 0  for step 0  versions 0" in explained.stdout
    assert explained.stdout.splitlines()[-1].startswith("ordinal 1: trained")
    summed = _script(tmp_path, "summary").stdout
    assert "trained      2" in summed and "attempt 1 started" in summed
    waiting = _script(tmp_path, "pending").stdout.splitlines()
    assert [line.split(":")[0] for line in waiting] == ["ordinal 2", "ordinal 3"]
    assert "committed" in waiting[0] and "dispatched" in waiting[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "99"], "ordinal 99 never moved"),
        (["explain", "-1"], "count from 0"),
        (["explain", "seven"], "invalid int"),
        (["eat"], "invalid choice"),
    ],
)
def test_the_script_refuses_bad_input_with_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    LedgerFile(tmp_path / "ledger.jsonl").close()
    answer = _script(tmp_path, *arguments)
    assert (answer.returncode, answer.stdout) == (2, "")
    assert message in answer.stderr


def test_the_script_names_what_is_not_a_run(tmp_path: Path) -> None:
    assert "does not exist" in _script(tmp_path / "none", "summary").stderr
    assert _script(tmp_path, "summary").returncode == 2
