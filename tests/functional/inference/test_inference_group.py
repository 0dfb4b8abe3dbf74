"""The inference group in Ray with spawned engine cores: what it serves, and what is left when parts are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.functional.inference.hf_oracle import TOLERANCE_NATS

if TYPE_CHECKING:
    from tests.functional.inference.conftest import GroupDriver

# Two spawned replicas import vLLM four times, tens of CPU seconds each.
pytestmark = [pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def driver(group_driver: GroupDriver) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """The driver process, asleep at its end, and everything that it has reported."""
    return group_driver.process, _reports(group_driver.process, group_driver.log)


def _reports(process: subprocess.Popen[str], log: Path) -> dict[str, Any]:
    reports: dict[str, Any] = {}
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            reports |= json.loads(line)
        if "done" in reports:
            return reports
    raise AssertionError(
        f"the driver ended early after reporting {sorted(reports)}:\n{log.read_text()[-3000:]}"
    )


def test_an_engine_serves_nothing_before_its_first_refit(driver: Any):
    assert "GenerationError" in driver[1]["before_first_refit"]
    assert "closed by a refit" in driver[1]["before_first_refit"]
    assert "no engine replica serves" in driver[1]["before_first_refit_in_all"]
    assert "0 STALE, 1 STALE" in driver[1]["before_first_refit_in_all"]


def test_a_slow_engine_skips_versions_without_delaying_them_and_is_given_the_last_one(driver: Any):
    reports = driver[1]
    assert reports["slow_stragglers"] == [1.0, 1.0]
    assert reports["slow_push_s"] < 30, "the patience is 1 s, the limit of a refit 60 s"
    assert reports["slow_states"] == "0 HEALTHY v3, 1 STALE v1 slow"
    assert "EngineAsideError: engine replica 1" in reports["slow_refuses"]
    assert reports["slow_others_difference"] < TOLERANCE_NATS, "the other one serves the version meanwhile"
    assert reports["paused_states"] == "0 HEALTHY v3, 1 STALE v1" and reports["paused_lacks_weights"]
    assert reports["caught_up_states"] == "0 HEALTHY v3, 1 HEALTHY v3"
    assert reports["caught_up_difference"] < TOLERANCE_NATS


def test_the_requests_of_a_slow_engine_finish_under_the_version_that_they_started_with(driver: Any):
    reports = driver[1]
    assert reports["slow_versions"] == [1] and reports["slow_lengths"] == [400] * 4
    assert reports["slow_difference"] < TOLERANCE_NATS


def test_one_refit_reaches_every_replica(driver: Any):
    assert driver[1]["versions"] == [4, 4]
    assert max(driver[1]["score_differences"]) < TOLERANCE_NATS
    assert driver[1]["generation_difference"] < TOLERANCE_NATS
    assert driver[1]["refit"]["refit/bytes"] > 0


def test_cancelling_a_client_call_aborts_the_requests_in_the_engine(driver: Any):
    assert driver[1]["running_after_cancel"] == 0


def test_an_engine_that_stands_still_in_a_transfer_fails_the_refit_in_time_and_is_named(driver: Any):
    reports = driver[1]
    assert (
        "engine replica 1 received" in reports["stopped_error"]
        and "replica 0" not in reports["stopped_error"]
    )
    assert reports["stopped_s"] < 10 + 6, "the limit, a look for the cause, and a busy machine"
    assert "closed by a refit" in reports["stopped_other_refuses"]
    assert "closed by a refit" in reports["continued_refuses"]
    assert reports["continued_states"] == "0 STALE v4, 1 STALE v4", (
        "both answer after the failure: none is ended"
    )


def test_the_next_refit_repairs_both_engines(driver: Any):
    assert driver[1]["repaired_difference"] < TOLERANCE_NATS


def test_an_engine_that_dies_in_a_transfer_fails_the_refit_at_once_and_the_other_stays_paused(driver: Any):
    reports = driver[1]
    assert "EngineDeadError: engine replica 1" in reports["killed_error"]
    assert reports["killed_s"] < 15, "the limit is 60 s"
    assert "closed by a refit" in reports["killed_other_refuses"]


def test_a_killed_engine_core_is_noticed_within_seconds_and_named(driver: Any):
    reports = driver[1]
    assert reports["processes_per_replica"] == [2, 2], "each replica is an actor and a spawned engine core"
    assert reports["deaths_while_alive"] == [None, None]
    assert reports["killed"].startswith("EngineDeadError: engine replica 1: the vLLM engine core died")
    assert reports["noticed_s"] < 5
    assert reports["error"].startswith("EngineDeadError: engine replica 1")


def test_the_next_refit_goes_to_the_replica_that_is_left_and_requests_fail_over_to_it(driver: Any):
    reports = driver[1]
    assert reports["failover_s"] < 10, "it did not wait for the dead one"
    assert reports["failover_states"] == "0 HEALTHY v8, 1 DEAD (died 1x)"
    assert reports["failover_difference"] < TOLERANCE_NATS


def test_a_dead_core_is_rebuilt_in_a_new_process_and_serves_only_with_the_present_weights(driver: Any):
    reports = driver[1]
    assert reports["rebuilt"] and reports["rebuilt_elsewhere"]
    assert reports["rebuilt_states"] == "0 HEALTHY v8, 1 STALE (died 1x)"
    assert "closed by a refit" in reports["rebuilt_refuses"] and reports["rebuilt_serves"] is False
    assert reports["back_states"] == "0 HEALTHY v8, 1 HEALTHY v8 (died 1x)" and reports["back_serves"] is True
    assert max(reports["back_differences"]) < TOLERANCE_NATS


def test_a_core_that_stands_still_is_killed_with_its_actor_and_the_other_serves_its_requests(driver: Any):
    reports = driver[1]
    assert len(reports["processes_per_replica"]) == 2 and reports["left_of_the_silent"] == []
    assert reports["fallen_over_difference"] < TOLERANCE_NATS
    assert reports["fallen_over_states"] == "0 HEALTHY v8, 1 DEAD (died 2x)"
    assert "given_up" not in reports


def test_nothing_outlives_a_killed_driver(driver: Any):
    process, reports = driver
    assert len(reports["processes"]) > 6
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=10)
    started = time.monotonic()
    while left := [pid for pid in reports["processes"] if _is_running(pid)]:
        assert time.monotonic() - started < 15, f"still running: {[_command(pid) for pid in left]}"
        time.sleep(0.2)


def _is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"  # a zombie only waits for a parent that collects its exit code


def _command(pid: int) -> str:
    try:
        return f"{pid} {Path(f'/proc/{pid}/cmdline').read_text()[:80]}"
    except OSError:
        return f"{pid} (gone by now)"
