"""A stage that lasts too long is noticed, also while the main thread sits in a C call or never gives up the lock."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_ppo.telemetry import watchdog
from megatron_ppo.telemetry.heartbeat import StageClock
from megatron_ppo.telemetry.watchdog import STOPPED_AFTER_S, Deadlines, Overdue, Watchdog

DEADLINES = Deadlines(
    otherwise=(1000.0, "watchdog.other_s"), of={"policy_training": (5.0, "watchdog.training_s")}
)


@pytest.fixture
def disarmed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """pytest has a use of its own for the interpreter's one timer."""
    armed: list[float] = []
    monkeypatch.setattr(Watchdog, "_arm", lambda self, timeout_s: armed.append(timeout_s))
    return armed


def watching(stages: StageClock) -> Watchdog:
    return Watchdog(stages=stages, deadlines=DEADLINES, on_overdue=lambda overdue: None)


def look(dog: Watchdog, stages: StageClock, *, after_s: float, late_s: float = 0.0) -> Overdue | None:
    """So long after the current stage was entered."""
    return dog.look(at_s=stages.now().since_monotonic_s + after_s, late_s=late_s)


def test_a_stage_is_overdue_after_its_own_deadline_and_not_before(disarmed: list[float]) -> None:
    stages = StageClock()
    dog = watching(stages)
    assert look(dog, stages, after_s=990.0) is None
    assert disarmed[-1] == pytest.approx(10.0 + watchdog.GRACE_S)
    stages.enter("policy_training", 7)
    assert look(dog, stages, after_s=4.9) is None
    overdue = look(dog, stages, after_s=5.1)
    assert overdue is not None and (overdue.stage, overdue.step) == ("policy_training", 7)
    assert (
        str(overdue) == "no progress for 5 s in stage 'policy_training' of step 7; watchdog.training_s is 5"
    )
    assert disarmed[-1] == watchdog.GRACE_S


def test_every_entry_into_a_stage_begins_a_new_wait(disarmed: list[float]) -> None:
    stages = StageClock()
    dog = watching(stages)
    for epoch in range(4):
        stages.enter("policy_training", epoch)
        assert look(dog, stages, after_s=4.0) is None
    stages.enter("weight_sync", 3)
    assert look(dog, stages, after_s=999.0) is None


def test_time_in_which_the_process_did_not_run_is_no_waiting(disarmed: list[float]) -> None:
    stages = StageClock()
    dog = watching(stages)
    stages.enter("policy_training", 1)
    assert look(dog, stages, after_s=1.0) is None
    stopped_s = STOPPED_AFTER_S + 1.0
    assert look(dog, stages, after_s=1.0 + stopped_s, late_s=stopped_s) is None
    assert look(dog, stages, after_s=4.5 + stopped_s) is None
    assert look(dog, stages, after_s=5.5 + stopped_s) is not None
    stages.enter("policy_training", 2)  # and not excused any more
    assert look(dog, stages, after_s=5.5) is not None


def test_an_overdue_stage_is_reported_once(monkeypatch: pytest.MonkeyPatch, disarmed: list[float]) -> None:
    monkeypatch.setattr(watchdog.faulthandler, "dump_traceback", lambda **_: None)
    stages = StageClock()
    reported: list[Overdue] = []
    soon = Deadlines(
        otherwise=(1000.0, "watchdog.other_s"), of={"policy_training": (0.05, "watchdog.training_s")}
    )
    dog = Watchdog(stages=stages, deadlines=soon, on_overdue=reported.append, poll_s=0.01)
    with dog.in_thread():
        stages.enter("policy_training", 3)
        deadline = time.monotonic() + 30
        while not reported and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
    assert [overdue.stage for overdue in reported] == ["policy_training"]


class Scene:
    """A main thread and its watchdog, in a time of their own; the dog looks every POLL_S."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stages = StageClock(monotonic_s=lambda: self.now_s)
        self.found: Overdue | None = None
        self._dog = Watchdog(
            stages=self.stages,
            deadlines=Deadlines(
                otherwise=(1000.0, "watchdog.other_s"),
                of={"exposed_generation": (5000.0, "the sum")},
                meetings={"exposed_generation": (90.0, "the limit of a meeting")},
            ),
            on_overdue=lambda overdue: None,
        )

    def passes(self, seconds: float) -> None:
        until_s = self.now_s + seconds
        while self.now_s < until_s:
            self.now_s = min(until_s, self.now_s + watchdog.POLL_S)
            self._look(late_s=0.0)

    def stands_still(self, seconds: float) -> None:
        """The process, with its watchdog."""
        self.now_s += watchdog.POLL_S + seconds
        self._look(late_s=seconds)

    def _look(self, *, late_s: float) -> None:
        self.found = self.found or self._dog.look(at_s=self.now_s, late_s=late_s)


def test_slow_generation_is_no_missing_rank(disarmed: list[float]) -> None:
    scene = Scene()
    scene.stages.enter("exposed_generation", 3)
    for poll_s in (2.0, 32.0, 2000.0):  # also when rank 0 hears nothing for much longer than a poll lasts
        scene.passes(poll_s)
        with scene.stages.meeting():
            scene.passes(80.0)
    assert scene.found is None
    scene.passes(5000.0)
    assert scene.found is not None and not scene.found.in_meeting


def test_a_rank_that_misses_one_meeting_is_found_within_its_limit(disarmed: list[float]) -> None:
    scene = Scene()
    scene.stages.enter("exposed_generation", 3)
    scene.passes(600.0)
    with scene.stages.meeting():
        scene.passes(90.0)
        assert scene.found is None
        scene.passes(1.0)
    assert scene.found is not None and scene.found.in_meeting
    assert str(scene.found) == (
        "no progress for 91 s in stage 'exposed_generation' of step 3; the limit of a meeting is 90"
    )
    assert disarmed[-1] == watchdog.GRACE_S


def test_meetings_of_other_stages_have_the_limit_of_their_stage(disarmed: list[float]) -> None:
    scene = Scene()
    scene.stages.enter("checkpointing", 3)  # rank 0 may be the first one to have written its part
    with scene.stages.meeting():
        scene.passes(900.0)
    assert scene.found is None


@pytest.mark.parametrize("met_before_s", [0.5, 5.0])
def test_a_rank_zero_that_stood_still_itself_blames_nobody(
    disarmed: list[float], met_before_s: float
) -> None:
    scene = Scene()
    scene.stages.enter("exposed_generation", 3)
    scene.passes(10.0)
    with scene.stages.meeting():
        if met_before_s > watchdog.POLL_S:  # else the dog does not know of this meeting when everything stops
            scene.passes(met_before_s)
        scene.stands_still(3600.0)
        scene.passes(80.0)
        assert scene.found is None
        scene.passes(20.0)
    assert scene.found is not None and scene.found.in_meeting


def test_a_stage_that_began_just_before_everything_stood_still_has_not_lasted_so_long(
    disarmed: list[float],
) -> None:
    scene = Scene()
    scene.stages.enter("weight_sync", 3)
    scene.stands_still(3600.0)
    assert scene.found is None


def stuck(body: str) -> subprocess.CompletedProcess[str]:
    program = """
        import ctypes, os, sys
        from megatron_ppo.telemetry import watchdog
        from megatron_ppo.telemetry.heartbeat import StageClock
        from megatron_ppo.telemetry.watchdog import Deadlines, Watchdog

        def end(overdue):
            print(overdue, flush=True)
            os._exit(1)

        watchdog.GRACE_S = 1.0
        stages = StageClock()
        deadlines = Deadlines(otherwise=(0.3, "watchdog.other_s"))

        def sit_in_a_collective(library):
            barrier = (ctypes.c_char * 64)()
            library.pthread_barrier_init(barrier, None, 2)
            library.pthread_barrier_wait(barrier)

        with Watchdog(stages=stages, deadlines=deadlines, on_overdue=end, poll_s=0.1).in_thread():
            stages.enter("weight_sync", 5)
    """
    source = textwrap.dedent(program) + textwrap.indent(body, "    ")
    return subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )


def test_a_main_thread_inside_a_c_call_is_noticed_and_its_stack_written() -> None:
    result = stuck("sit_in_a_collective(ctypes.CDLL(None))")
    assert result.returncode == 1
    assert re.match(
        r"no progress for \d s in stage 'weight_sync' of step 5; watchdog.other_s is 0.3", result.stdout
    )
    assert "in sit_in_a_collective" in result.stderr


def test_a_process_whose_lock_is_never_given_up_ends_all_the_same() -> None:
    # PyDLL keeps the interpreter lock during the call.
    result = stuck("import time; time.sleep(0.2); sit_in_a_collective(ctypes.PyDLL(None))")
    assert result.returncode == 1
    assert result.stdout == ""
    assert "Timeout" in result.stderr and "in sit_in_a_collective" in result.stderr
