"""A run says once why it ended, and how to go on."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from megatron_ppo.app.outcome import Outcome
from megatron_ppo.loop.checkpoint_folder import (
    FORMAT_VERSION,
    INFO_FILE,
    INFO_KEYS,
    CheckpointFolder,
    Retention,
)
from megatron_ppo.protocol.errors import PartDiedError
from megatron_ppo.telemetry.run_dir import OpenRun, RunState, open_run


@pytest.fixture
def run(tmp_path: Path) -> OpenRun:
    return open_run(tmp_path, name="short", config={}, resume="never")


def outcome(run: OpenRun, *, rank: int = 0, resume: str = "auto") -> Outcome:
    return Outcome(
        name="short",
        resume=resume,
        rank=rank,
        directory=run.directory,
        opened=run if rank == 0 else None,
        terminal=io.StringIO(),
    )


def said(of: Outcome) -> str:
    assert isinstance(of.terminal, io.StringIO)
    return of.terminal.getvalue()


def lost_connection() -> RuntimeError:
    return RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31337")


def test_the_cause_is_told_by_rank_0_with_its_notes_and_kept_in_the_manifest(run: OpenRun) -> None:
    of = outcome(run)
    error = PartDiedError("the collector died")
    error.add_note("open prompts: none")
    of.report(error)
    lines = said(of).splitlines()
    assert lines[:2] == ["FAILED: PartDiedError: the collector died", "open prompts: none"]
    assert lines[2] == f"logs: {run.directory.logs_dir}"
    assert "it has no checkpoint yet: the same command, or run.resume=" in lines[3]
    manifest = run.directory.read_manifest()
    assert (manifest.state, manifest.reason) == (RunState.FAILED, "PartDiedError: the collector died")


def test_rank_0_that_lost_a_peer_leaves_the_cause_to_it(run: OpenRun) -> None:
    of = outcome(run)
    of.report(lost_connection())
    assert said(of).startswith("FAILED: another trainer rank ended; it says why. Seen here: RuntimeError")


def test_another_rank_tells_only_what_it_has_failed_of_alone(run: OpenRun) -> None:
    of = outcome(run, rank=1)
    of.report(PartDiedError("told by rank 0 as well"))
    of.report(lost_connection())
    of.say("starting")
    assert said(of) == ""
    of.report(ZeroDivisionError("mine alone"))
    assert (
        said(of)
        == f"FAILED on trainer rank 1: ZeroDivisionError: mine alone\nlogs: {run.directory.logs_dir}\n"
    )


@pytest.mark.parametrize(
    ("resume", "expected"),
    [
        ("auto", "stopped by SIGTERM; the same command, or run.resume={path}, continues from step 4\n"),
        ("never", "stopped by SIGTERM; adding run.resume={path} continues from step 4\n"),
    ],
)
def test_a_stop_says_from_which_step_the_run_goes_on(run: OpenRun, resume: str, expected: str) -> None:
    checkpoints = CheckpointFolder(run.directory.checkpoints_dir)
    checkpoints.begin(4)
    info = dict.fromkeys(INFO_KEYS) | {"format_version": FORMAT_VERSION, "identity": {}}
    (checkpoints.temporary(4) / INFO_FILE).write_text(json.dumps(info))
    checkpoints.seal(4)
    checkpoints.publish(4, Retention(keep=1, keep_best=0, metric=None, higher_is_better=True))
    of = outcome(run, resume=resume)
    of.stop("stopped by SIGTERM")
    assert said(of) == expected.format(path=run.directory.path)
    assert run.directory.read_manifest().state is RunState.STOPPED
