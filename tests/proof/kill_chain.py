"""Kills one real run again and again, each time at another point, resumes it with the same command, and lets it finish.

A run that survives a kill goes on to the next one; a run that ends is started again. What the run was trained on in
the end is compared with what a run without kills is trained on. Driven by `run_proof.py --only kills` and by one
functional test.
Invariant: a kill counts as proven only if the run that it struck came to its end and passed every check.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
from kill_checks import after_a_death, at_the_end, is_finished, left_over, newest_step, script_problems
from kill_plan import ChainSettings, Kill, Victim, epoch_rows
from kill_watch import Point, StageWatch, Trigger

from tests.functional.run.launcher import Launched

POLL_S = 0.002
LOOK_EVERY_S = 1.0
REACH_LIMIT_S = 300.0
"""From the start of a life to its kill, on a machine that does other things as well."""
END_LIMIT_S = 120.0
"""From a kill to the end of the run, or to steps that show that it goes on."""
FINISH_LIMIT_S = 400.0
GONE_WITHIN_S = 30.0
SURVIVED_AFTER_S = 15.0
"""A run that has noticed nothing by then, and makes steps, goes on to the next kill; one that still ends by itself
within END_LIMIT_S of the last one (Ray takes half a minute to notice that its raylet is gone) has ended of that."""


class ChainError(Exception):
    """What must not happen, happened; the message says what."""


# Whatever goes wrong with one kill, the vanishing of its victim too, must not end the whole proof.
FAILURES = (ChainError, AssertionError, psutil.Error, OSError, ValueError)


@dataclass(kw_only=True)
class Death:
    """One kill as it was carried out.

    Attributes:
        row: completed steps once the struck step is done.   stage: as the trainer's heartbeat last had it.
        outcome: ended or survived.   cause: the line in which the run says why it ended.
        ended_after_s: from the kill to the end of torchrun, None if it survived.
        left: what an interrupted save left behind.   resumed_from: completed steps of the next life's checkpoint.
    """

    kill: str
    victim: str
    when: str
    row: int | None
    stage: str
    num_ranks: int
    outcome: str = ""
    cause: str = ""
    exit_code: int | None = None
    ended_after_s: float | None = None
    left: list[str] = field(default_factory=list)
    resumed_from: int | None = None


@dataclass(kw_only=True)
class ChainResult:
    """A run with its kills.

    Attributes:
        failed: what went wrong with a kill itself, by its id; the run is resumed to its end in spite of it.
        problems: what is wrong at the end of the run, to which any of its kills may have led.
    """

    settings: ChainSettings
    deaths: list[Death] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    lives: int = 0
    wall_s: float = 0.0
    run_dir: Path | None = None


class Chain:
    """One run through its kills.

    Args:
        base: `run.dir` of the run.   kills: in the order in which they are to happen.
        may_strike: asked before each kill; once it says no, the run is left to finish.
    """

    def __init__(
        self,
        settings: ChainSettings,
        kills: Sequence[Kill],
        base: Path,
        *,
        may_strike: Callable[[], bool] = lambda: True,
    ) -> None:
        self._settings = settings
        self._pending = list(kills)
        self._base = base
        self._may_strike = may_strike
        # Everything that the run starts inherits it, so that what is left of it can be found; short, because Ray's
        # sockets lie below it.
        self._temp = Path(tempfile.mkdtemp(prefix="kp-"))
        self._job: Launched | None = None
        self._started = 0.0
        self._ranks = 0
        self._killed_at = 0.0
        self.result = ChainResult(settings=settings)

    def run(self) -> ChainResult:
        """Kill until no kill is left, then let it finish and check it. Raises nothing but what ends this process."""
        began = time.monotonic()
        try:
            self._strike_all()
            self._finish()
        except FAILURES as error:
            self.result.problems.append(str(error))
        finally:
            self._kill_everything()
            shutil.rmtree(self._temp, ignore_errors=True)
        self.result.wall_s = time.monotonic() - began
        return self.result

    def _strike_all(self) -> None:
        """Every kill, until one fails, the run comes to its end before, or no more are wanted."""
        while self._pending and self._may_strike():
            kill = self._pending.pop(0)
            try:
                if self._job is None:
                    self._start(kill.num_ranks)
                if not self._strike(kill):
                    return
            except FAILURES as error:
                self.result.failed[kill.id] = f"{type(error).__name__}: {error}"
                self._end_on_purpose()  # and let it finish, for the sake of the kills before
                return

    def _start(self, num_ranks: int) -> None:
        self._started = time.time()
        self._ranks = num_ranks
        self._job = Launched(
            self._base, self._settings.words, nproc=num_ranks, env={"TMPDIR": str(self._temp)}
        )
        self.result.lives += 1

    def _strike(self, kill: Kill) -> bool:
        """Wait for the kill's point and kill; False if the run finished before."""
        if self._ranks < kill.num_ranks:
            # It survived the kill before, with one rank: it has to come back with two.
            self._end_on_purpose()
            self._start(kill.num_ranks)
        job = self._running()
        point = self._wait_for(kill)
        if point is None:
            return False
        death = Death(
            kill=kill.id, victim=str(kill.victim), when=kill.when, row=point.row, stage=point.stage,
            num_ranks=kill.num_ranks,
        )  # fmt: skip
        self._killed_at = time.monotonic()
        self._kill_victim(kill)
        self.result.run_dir = job.run_dir
        self.result.deaths.append(death)
        self._watch_the_end(death)
        if death.outcome == "ended":
            self._examine(death)
            self._job = None
        return True

    def _wait_for(self, kill: Kill) -> Point | None:
        """The point at which the kill's trigger fired and its delay is over; None if the run finished before."""
        job = self._running()
        watch: StageWatch | None = None
        trigger: Trigger | None = None
        looked = entered = time.monotonic()
        while True:
            code, now = job.process.poll(), time.monotonic()
            if code == 0:
                return None
            if watch is None or trigger is None:
                for run_dir in self._runs()[-1:]:
                    watch = StageWatch(run_dir / "heartbeats" / "trainer_rank_0.json", self._started)
                    trigger = Trigger(
                        kill, epochs=epoch_rows(self._settings.steps), checkpoints=run_dir / "checkpoints"
                    )
            elif trigger.fires(watch.look()):
                time.sleep(trigger.delay_s(job.rows()))
                return watch.look()
            if code is not None and self._ended_late(code):
                self._start(kill.num_ranks)
                job, watch, trigger, entered = self._running(), None, None, time.monotonic()
                continue
            if code is not None:
                raise ChainError(f"ended by itself while waiting for {kill.when}: {self._evidence()}")
            if now - entered > REACH_LIMIT_S:
                where = "no run directory" if watch is None else watch.point
                raise ChainError(f"{kill.when} was not reached in {REACH_LIMIT_S:.0f} s, at {where}")
            if now - looked > LOOK_EVERY_S:
                job.look()
                looked = time.monotonic()
            time.sleep(POLL_S)

    def _runs(self) -> list[Path]:
        """Run folders, oldest first; one that is being made has a hidden name and does not count yet."""
        found = [path.parent for path in self._base.glob("*/run.json")]
        return sorted(folder for folder in found if not folder.name.startswith("."))

    def _kill_victim(self, kill: Kill) -> None:
        if kill.victim is Victim.TREE:
            self._kill_everything()
            return
        process = self._victim(kill)
        process.send_signal(signal.SIGKILL)

    def _victim(self, kill: Kill) -> psutil.Process:
        match kill.victim:
            case Victim.TRAINER:
                return self._process(f"trainer_rank_{kill.rank}")
            case Victim.ENGINE:
                return self._process("engine_0")
            case Victim.COLLECTOR:
                return self._process("collector")
            case Victim.BUFFER:
                return self._process("replay_buffer")
            case Victim.ENGINE_CORE:
                return self._child("VLLM::EngineCore", of=self._process("engine_0"))
            case _:
                return self._child("raylet/raylet ", of=self._running().tree)

    def _process(self, name: str) -> psutil.Process:
        path = self._running().run_dir / "heartbeats" / f"{name}.json"
        return psutil.Process(int(json.loads(path.read_text())["pid"]))

    def _child(self, needle: str, *, of: psutil.Process) -> psutil.Process:
        found = []
        for process in of.children(recursive=True):
            with suppress(psutil.Error):
                if needle in " ".join(process.cmdline()):
                    found.append(process)
        if len(found) != 1:
            raise ChainError(f"{len(found)} processes match {needle!r}:\n{self._running().describe()}")
        return found[0]

    def _watch_the_end(self, death: Death) -> None:
        """Wait until the run has ended, or has shown that it goes on."""
        job, killed = self._running(), time.monotonic()
        rows = job.rows()
        seen = int(rows[-1]["step"]) if rows else 0
        while True:
            job.look()
            code, passed_s = job.process.poll(), time.monotonic() - killed
            if code is not None:
                death.exit_code, death.ended_after_s = code, round(passed_s, 1)
                # At its last step: it had no use for the process any more, or replaced it.
                finished = code == 0 and is_finished(job.run_dir)
                death.outcome = "survived" if finished else "ended"
                death.cause = "" if finished else self._cause(death.victim)
                return
            # More rows than the buffer can have held at the kill.
            rows = job.rows()
            went_on = bool(rows) and int(rows[-1]["step"]) >= seen + self._settings.age + 3
            if went_on and passed_s > SURVIVED_AFTER_S:
                death.outcome = "survived"
                return
            if passed_s > END_LIMIT_S:
                raise ChainError(
                    f"{END_LIMIT_S:.0f} s after the kill of {death.victim} {death.when} the run has neither ended nor "
                    f"gone on: {self._evidence()}"
                )
            time.sleep(0.2)

    def _cause(self, victim: str) -> str:
        """The line of the terminal that says why the run ended."""
        if victim == Victim.TREE:
            return "(killed whole)"
        output = self._running().output
        lines = [line.strip() for line in output.splitlines()]
        # Of a rank torchrun says it; the other ranks see a lost peer, or the signal by which torchrun ends them.
        of_torchrun = "exitcode  : -9"
        marks = (of_torchrun, "FAILED") if victim == Victim.TRAINER else ("FAILED", of_torchrun)
        for mark in marks:
            for line in lines:
                if mark in line:
                    return line[:300]
        return ""

    def _ended_late(self, code: int) -> bool:
        """Whether the run that seemed to survive the last kill has ended of it after all; if so, it is examined."""
        deaths = self.result.deaths
        passed_s = time.monotonic() - self._killed_at
        if not deaths or deaths[-1].outcome != "survived" or passed_s > END_LIMIT_S:
            return False
        death = deaths[-1]
        death.outcome, death.exit_code, death.ended_after_s = "ended", code, round(passed_s, 1)
        death.cause = self._cause(death.victim)
        self._examine(death)
        self._job = None
        return True

    def _examine(self, death: Death) -> None:
        """What the dead run has left: no process, nothing half-written, a cause."""
        if left := self._left_alive(within_s=GONE_WITHIN_S):
            raise ChainError(f"{GONE_WITHIN_S:.0f} s after the end there still are: {'; '.join(left)}")
        run_dir = self._running().run_dir
        death.left = left_over(run_dir)
        death.resumed_from = newest_step(run_dir)
        if problems := after_a_death(run_dir):
            raise ChainError(f"after the kill of {death.victim} {death.when}: {'; '.join(problems)}")
        if not death.cause:
            raise ChainError(f"the run ended without a cause: {self._evidence()}")

    def _finish(self) -> None:
        """The last life, to the end of the run, and what must hold then."""
        if self._job is None:
            self._start(1)
        code = self._running().wait(timeout_s=FINISH_LIMIT_S)
        if code != 0 and self._ended_late(code):
            self._start(1)
            code = self._running().wait(timeout_s=FINISH_LIMIT_S)
        job = self._running()
        self.result.run_dir = job.run_dir
        if code != 0:
            raise ChainError(f"the resumed run ended with {code}: {self._evidence()}")
        if left := self._left_alive(within_s=GONE_WITHIN_S):
            raise ChainError(f"{GONE_WITHIN_S:.0f} s after the end there still are: {'; '.join(left)}")
        if len(runs := self._runs()) != 1:
            self.result.problems.append(f"a resume began a new run: {[run.name for run in runs]}")
        self.result.problems += at_the_end(job.run_dir, self._settings) + script_problems(job.run_dir)

    def _end_on_purpose(self) -> None:
        if self._job is None:
            return
        self._kill_everything()
        self._left_alive(within_s=GONE_WITHIN_S)
        self._job = None

    def _running(self) -> Launched:
        assert self._job is not None, "no life of the run has begun"
        return self._job

    def _kill_everything(self) -> None:
        """SIGKILL for every process of the run, as a power cut; again for those that were being started."""
        if self._job is None:
            return
        for _ in range(3):
            processes = self._alive()
            if not processes:
                break
            for process in processes:
                with suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            time.sleep(0.05)
        with suppress(Exception):
            self._job.process.wait(timeout=30)

    def _left_alive(self, *, within_s: float) -> list[str]:
        deadline = time.monotonic() + within_s
        while alive := self._alive():
            if time.monotonic() > deadline:
                return [_named(process) for process in alive]
            time.sleep(0.2)
        return []

    def _alive(self) -> list[psutil.Process]:
        """Processes of the run: of its tree, seen before, or with its folder for temporary files."""
        job = self._running()
        job.look()
        found = dict(job.seen)
        mark = f"TMPDIR={self._temp}".encode()
        for entry in os.listdir("/proc"):
            if entry.isdigit() and int(entry) != os.getpid() and int(entry) not in found:
                with suppress(OSError, psutil.NoSuchProcess):
                    if mark in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                        found[int(entry)] = psutil.Process(int(entry))
        return [process for process in found.values() if is_alive(process)]

    def _evidence(self) -> str:
        job = self._running()
        return f"{job.output[-3000:]}{job.log_tails()[-6000:]}"


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or is dying: it is listed as a zombie while its other threads still hold files and locks."""
    try:
        if not process.is_running():
            return False
        return process.status() != psutil.STATUS_ZOMBIE or len(os.listdir(f"/proc/{process.pid}/task")) > 1
    except (psutil.NoSuchProcess, OSError):
        return False


def _named(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:120]}"
    except psutil.Error as error:
        return f"{process.pid} {error}"
