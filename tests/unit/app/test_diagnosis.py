"""What a stuck run says of itself comes from its files, whatever state they are in."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ppo.app.diagnosis import MAX_PROMPTS, absent_ranks, diagnosis, explain, main_thread_stack
from megatron_ppo.protocol.errors import RefitError, WaitTimeoutError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.buffer import PromptGroupBuffer
from megatron_ppo.replay.journal import LedgerFile
from megatron_ppo.telemetry.heartbeat import Heartbeat, StageClock
from megatron_ppo.telemetry.run_dir import RunDirectory

PROMPTS = 4


def test_a_diagnosis_names_the_silent_process_and_the_open_prompts(tmp_path: Path) -> None:
    directory = RunDirectory(path=tmp_path)
    stages = StageClock()
    stages.enter("exposed_generation", 3)
    Heartbeat(directory.heartbeat_path("trainer_rank_0"), describe=stages.describe).beat()
    collector = directory.heartbeat_path("collector")
    Heartbeat(collector, describe=lambda: {"in_flight": 3, "loop_lag_s": 0.25}).beat()
    beat = json.loads(collector.read_text())
    collector.write_text(json.dumps({**beat, "beat_unix_s": beat["beat_unix_s"] - 100.0}))
    journal = LedgerFile(directory.ledger_path)
    buffer = PromptGroupBuffer(
        schedule=AsyncSchedule(max_num_steps=9, max_trajectory_age_steps=2),
        num_prompts_per_step=PROMPTS,
        num_generations_per_prompt=2,
        journal=journal,
    )
    journal.begin(buffer.ledger, step=0, reasons={})
    buffer.open(0, 2)
    first = buffer.reserve(3 * PROMPTS)[0]
    buffer.release(first, reason="generation failed: no answer in 120 s")
    journal.flush()

    text = diagnosis(directory)

    lines = text.splitlines()
    assert "stage exposed_generation, step 3" in next(line for line in lines if "trainer_rank_0" in line)
    silent = next(line for line in lines if "collector" in line)
    assert "last sign 0:01:4" in silent and "loop_lag_s 0.25" in silent and silent.endswith(" SILENT")
    assert "ordinal 0: " in text and "(generation failed: no answer in 120 s)" in text
    assert sum("ordinal " in line for line in lines) == MAX_PROMPTS
    assert f"and {3 * PROMPTS - MAX_PROMPTS} more: scripts/ledger.py {tmp_path} pending" in text


def absent_of(folder: Path, *ranks: tuple[str, int, bool, float]) -> str:
    """What rank 0 says in stage exposed_generation of step 3; per rank stage, step, in_meeting, age of its beat (s)."""
    directory = RunDirectory(path=folder)
    for rank, (stage, step, in_meeting, age_s) in enumerate(ranks):
        path = directory.heartbeat_path(f"trainer_rank_{rank}")
        detail = {"stage": stage, "step": step, "in_meeting": in_meeting}
        Heartbeat(path, describe=lambda detail=detail: detail).beat()
        beat = json.loads(path.read_text())
        path.write_text(json.dumps({**beat, "beat_unix_s": beat["beat_unix_s"] - age_s}))
    Heartbeat(directory.heartbeat_path("collector")).beat()
    return absent_ranks(directory, stage="exposed_generation", step=3)


ZERO = WAITING = ("exposed_generation", 3, True, 1.0)


def test_a_rank_that_gives_no_sign_of_life_is_named_alone(tmp_path: Path) -> None:
    elsewhere = ("between stages", 2, False, 1.0)  # as the silent one keeps it there
    stopped = ("exposed_generation", 3, True, 100.0)
    assert absent_of(tmp_path, ZERO, WAITING, stopped, elsewhere) == "no sign of life of trainer_rank_2"


@pytest.mark.parametrize(
    "stuck",
    [
        ("exposed_generation", 3, False, 1.0),  # between two meetings
        ("between stages", 2, False, 1.0),  # before them
        ("checkpointing", 2, True, 1.0),
    ],
)
def test_a_rank_that_has_not_come_is_named(tmp_path: Path, stuck: tuple[str, int, bool, float]) -> None:
    ahead = ("value_inference", 3, False, 1.0)  # it has the batch already
    text = absent_of(tmp_path, ZERO, stuck, WAITING, ahead, stuck)
    assert text == "the other ranks wait for trainer_rank_1, trainer_rank_4"


def test_where_every_rank_has_come_none_is_named(tmp_path: Path) -> None:
    assert "look at the network" in absent_of(tmp_path, ZERO, WAITING, WAITING)


def test_a_run_without_files_is_diagnosed_as_well(tmp_path: Path) -> None:
    assert "open prompts:" in diagnosis(RunDirectory(path=tmp_path))
    (tmp_path / "ledger.jsonl").mkdir()
    assert "the ledger cannot be read" in diagnosis(RunDirectory(path=tmp_path))


def test_the_stack_ends_where_the_main_thread_is() -> None:
    stack = main_thread_stack()
    assert stack.startswith("stack of the main thread:\n")
    assert "test_the_stack_ends_where_the_main_thread_is" in stack


def ask_the_engines() -> None:
    raise WaitTimeoutError("waited 60 s for the engines to pause")


def refit_that_times_out() -> None:
    try:
        ask_the_engines()
    except WaitTimeoutError as error:
        raise RefitError("refit to version 4 failed while pausing the engines") from error


def test_an_error_of_a_wait_gets_the_diagnosis_and_the_frames_down_to_the_wait_itself(tmp_path: Path) -> None:
    with pytest.raises(RefitError) as caught:
        refit_that_times_out()
    explain(caught.value, RunDirectory(path=tmp_path))
    [note] = caught.value.__notes__
    assert note.startswith("processes:\n") and "open prompts:" in note
    assert note.index("stack of the wait:") < note.index("in refit_that_times_out")
    assert note.rindex("in refit_that_times_out") < note.index("in ask_the_engines")


def test_an_error_stays_the_cause_when_its_diagnosis_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    error = WaitTimeoutError("waited 60 s for the window to open")
    directory = RunDirectory(path=tmp_path)
    path = directory.heartbeat_path("collector")
    Heartbeat(path, describe=dict).beat()
    path.write_text(json.dumps({**json.loads(path.read_text()), "beat_unix_s": "yesterday"}))
    explain(error, directory)
    assert not hasattr(error, "__notes__") and "no diagnosis of the wait" in caplog.text
