"""A run seen from outside: alive, silent, dead, finished; in which stage; with which files only."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.heartbeat import (
    PERIOD_S,
    SILENT_AFTER_S,
    Heartbeat,
    StageClock,
    clear_beats,
    read_beats,
)
from megatron_ppo.telemetry.metrics import BETWEEN_STAGES, NullTelemetry, Telemetry
from megatron_ppo.telemetry.run_dir import OpenRun, RunDirectory, lock_owner, open_run
from megatron_ppo.telemetry.run_status import Life, format_status, read_status
from megatron_ppo.telemetry.sinks import build_telemetry
from tests.unit.script_runs import run_script, run_script_here

LIMIT_S = 60.0  # far above what a test takes, also on a loaded machine


def new_run(base: Path) -> OpenRun:
    return open_run(base, name="demo", config={"run": {"name": "demo"}}, resume="never")


def status_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_script_here("status", *arguments)


def test_a_live_run_shows_step_stage_buffer_and_the_time_to_go(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        directory, stages = run.directory, StageClock()
        telemetry = build_telemetry(
            directory, max_num_steps=12, num_trainer_ranks=1, tensorboard=False, on_stage=stages.enter
        )
        for step in range(2):
            log = telemetry.step(step)
            log.add({"train/reward": 0.25 * (step + 1), "age/max_versions": 1})
            log.flush()
        Heartbeat(
            directory.heartbeat_path("replay_buffer"), describe=lambda: {"window": "2..3", "pending": 1}
        ).beat()
        with telemetry.step(2).timed("exposed_generation"):
            Heartbeat(directory.heartbeat_path("trainer_rank_0"), describe=stages.describe).beat()
            with stages.meeting():
                Heartbeat(directory.heartbeat_path("trainer_rank_1"), describe=stages.describe).beat()
        status = read_status(directory.path, now_unix_s=time.time() + 1.0)
        assert status.life is Life.RUNNING and status.owner == os.getpid()
        assert (status.step, status.max_num_steps) == (2, 12)
        assert status.eta_s is not None and 0 < status.eta_s < LIMIT_S
        assert status.row["train/reward"] == 0.5
        assert not any(key.startswith("clock/") for key in status.row)
        assert status.silent == ()
        text = format_status(status)
        assert f"running, process {os.getpid()}\n" in text
        assert "step       2 of 12, " in text
        assert "train/reward 0.5, age/max_versions 1" in text
        assert "stage exposed_generation, step 3, for 0." in text
        zero, one = [line for line in text.splitlines() if "trainer_rank_" in line]
        assert "waits for other ranks" in one and "waits for" not in zero and "in_meeting" not in text
        assert "window 2..3, pending 1" in text
        telemetry.close()


def test_a_stopped_run_is_no_failure(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.stop("stopped by SIGTERM")
    status = read_status(run.directory.path, now_unix_s=time.time())
    assert status.life is Life.STOPPED
    assert "stopped by SIGTERM; run.resume=auto continues it" in format_status(status)
    assert status_script(str(run.directory.path)).returncode == 0


def test_the_stage_is_the_innermost_timer_on_every_rank() -> None:
    for make in (Telemetry, NullTelemetry):
        seen: list[tuple[str, int]] = []
        log = make(on_stage=lambda stage, step, seen=seen: seen.append((stage, step))).step(4)
        with log.timed("update"):
            with log.timed("value_training"):
                pass
            with pytest.raises(KeyError), log.timed("policy_training"):
                raise KeyError
        assert [stage for stage, _ in seen] == [
            *("update", "value_training", "update", "policy_training", "update", BETWEEN_STAGES)
        ]
        assert {step for _, step in seen} == {5}


def test_looking_at_a_lock_changes_nothing(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        lock = run.directory.lock_path
        before = (lock.read_bytes(), lock.stat().st_mtime_ns)
        assert [lock_owner(run.directory) for _ in range(3)] == [os.getpid()] * 3
        assert (lock.read_bytes(), lock.stat().st_mtime_ns) == before
    assert lock_owner(run.directory) is None
    assert lock_owner(RunDirectory(path=tmp_path / "nowhere")) is None


def test_a_killed_run_is_told_from_a_live_one(tmp_path: Path) -> None:
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from megatron_ppo.telemetry.heartbeat import Heartbeat\n"
        "from megatron_ppo.telemetry.run_dir import open_run\n"
        "run = open_run(Path(sys.argv[1]), name='demo', config={}, resume='never')\n"
        "with Heartbeat(run.directory.heartbeat_path('trainer_rank_0')).in_thread():\n"
        "    while not run.directory.heartbeat_path('trainer_rank_0').exists():\n"
        "        time.sleep(0.01)\n"
        "    print(run.directory.path, flush=True)\n"
        "    time.sleep(1000)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        path = owner.stdout.readline().strip()
        live = run_script("status", path, "--json")
        assert live.returncode == 0, live.stderr
        told = json.loads(live.stdout)
        assert (told["life"], told["pid"], told["silent"]) == ("running", owner.pid, [])
        assert told["processes"]["trainer_rank_0"]["pid"] == owner.pid
        assert told["step"] is None  # it has not said so yet
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    dead = status_script(path)
    assert dead.returncode == 1
    assert "DIED without a word" in dead.stdout and "last sign" in dead.stdout


def test_a_process_without_sign_of_life_is_named(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        Heartbeat(run.directory.heartbeat_path("collector")).beat()
        now = time.time()
        assert read_status(run.directory.path, now_unix_s=now).silent == ()
        later = read_status(run.directory.path, now_unix_s=now + SILENT_AFTER_S + 1)
        assert later.silent == ("collector",)
        assert "NO SIGN OF LIFE from collector" in format_status(later)


def test_a_process_that_has_ended_is_silent_at_once(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with new_run(tmp_path) as run:
        path = run.directory.heartbeat_path("engine_0")
        Heartbeat(path).beat()
        path.write_text(json.dumps({**json.loads(path.read_text()), "pid": gone.pid}), encoding="utf-8")
        status = read_status(run.directory.path, now_unix_s=time.time())
        assert status.silent == ("engine_0",)
        assert f"process {gone.pid} (gone)" in format_status(status)


def test_failed_and_finished_runs_say_so(tmp_path: Path) -> None:
    with new_run(tmp_path) as run:
        run.fail("WaitTimeoutError: waited 600 s for groups")
    assert "FAILED: WaitTimeoutError: waited" in format_status(
        read_status(run.directory.path, now_unix_s=time.time())
    )
    assert status_script(str(run.directory.path)).returncode == 1
    with new_run(tmp_path) as run:
        run.finish()
    done = status_script(str(run.directory.path))
    assert done.returncode == 0 and "state      finished" in done.stdout


def test_what_is_no_run_is_bad_input(tmp_path: Path) -> None:
    nothing = status_script(str(tmp_path))
    assert nothing.returncode == 2
    assert "is no run directory" in nothing.stderr
    with new_run(tmp_path) as run:
        run.directory.status_path.write_text("[1]", encoding="utf-8")
        with pytest.raises(ConfigError, match="must hold an object, got list"):
            read_status(run.directory.path, now_unix_s=time.time())


def test_a_blocked_event_loop_does_not_beat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_ppo.telemetry.heartbeat.PERIOD_S", 0.01)
    beats = 0

    def count() -> dict[str, object]:
        nonlocal beats
        beats += 1
        return {}

    async def scenario() -> None:
        async with Heartbeat(tmp_path / "beats" / "x.json", describe=count).running():
            while beats < 3:
                await asyncio.sleep(0.001)
            before = beats
            time.sleep(0.1)
            assert beats == before

    asyncio.run(asyncio.wait_for(scenario(), LIMIT_S))


@pytest.mark.parametrize("fault", ["disk", "describe"])
def test_a_heartbeat_that_fails_hurts_nobody(
    fault: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def describe() -> dict[str, object]:
        raise KeyError("gone")

    folder = tmp_path / "file"
    folder.touch()
    path = folder / "x.json" if fault == "disk" else tmp_path / "x.json"
    heartbeat = Heartbeat(path) if fault == "disk" else Heartbeat(path, describe=describe)
    heartbeat.beat()
    heartbeat.beat()
    assert caplog.text.count("heartbeats cannot be written") == 1
    assert read_beats(tmp_path) == []


def test_the_beats_of_an_earlier_start_are_forgotten(tmp_path: Path) -> None:
    Heartbeat(tmp_path / "engine_7.json").beat()
    (tmp_path / "torn.json").write_text("{", encoding="utf-8")
    assert [beat.process for beat in read_beats(tmp_path)] == ["engine_7"]
    clear_beats(tmp_path)
    assert read_beats(tmp_path) == []
    clear_beats(tmp_path / "nowhere")


def test_a_change_of_stage_is_on_disk_long_before_the_next_regular_beat(tmp_path: Path) -> None:
    path, stages = tmp_path / "beats" / "trainer_rank_0.json", StageClock()
    heartbeat = Heartbeat(path, describe=stages.describe)
    stages.on_change = heartbeat.wake
    with heartbeat.in_thread():
        for step in range(20):
            entered = time.monotonic()
            stages.enter("weight_sync", step)
            while not path.exists() or json.loads(path.read_text())["detail"]["step"] != step:
                assert time.monotonic() < entered + LIMIT_S, "the change was never written"
                time.sleep(0.001)
        assert time.monotonic() - entered < PERIOD_S / 2  # the last one; a lost wake-up would take a period
