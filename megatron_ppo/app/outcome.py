"""What a job says on the terminal and leaves in `run.json`: how it begins, how it ended, and how to go on.

Driven by `app.job` on every rank. Invariant: a cause is told once, by rank 0, or by the rank that failed alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from megatron_ppo.app.diagnosis import explain
from megatron_ppo.app.launcher import restart_count
from megatron_ppo.app.termination import is_own_cause, lost_a_peer
from megatron_ppo.loop.checkpoint_folder import CheckpointFolder
from megatron_ppo.protocol.errors import CheckpointError, MegatronPPOError
from megatron_ppo.telemetry.gate_check import print_results, survived_faults
from megatron_ppo.telemetry.gates import Gate, all_passed, evaluate, results_as_json
from megatron_ppo.telemetry.run_dir import OpenRun, RunDirectory, write_json_atomically
from megatron_ppo.telemetry.sinks import read_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The terminal and the manifest of a run.

    Attributes:
        resume: `run.resume` as configured.   opened: the run's manifest, on rank 0 only.
    """

    name: str
    resume: str
    rank: int
    directory: RunDirectory
    opened: OpenRun | None
    terminal: TextIO

    def announce(self, warnings: Sequence[str]) -> None:
        """That the run begins or goes on, and what the configuration warns of."""
        verb = "continuing" if self.opened is not None and self.opened.resumed else "starting"
        again = f" (restart {restart_count()} of its launcher)" if restart_count() else ""
        self.say(f"{verb} {self.name} in {self.directory.path}{again}")
        if self.opened is not None and self.opened.passed_over is not None:
            self.say(f"warning: {self.opened.passed_over}")
        for warning in warnings:
            self.say(f"warning: {warning}")

    def say(self, text: str) -> None:
        """On rank 0."""
        if self.rank == 0:
            self.write(text)

    def write(self, text: str) -> None:
        """On this rank, whichever it is."""
        self.terminal.write(text + "\n")
        self.terminal.flush()

    def judge(self, gates: Sequence[Gate]) -> bool:
        """Evaluate the gates, print them, keep them beside the metrics; whether all passed."""
        rows = read_rows(self.directory.metrics_path)
        results = evaluate(gates, rows)
        write_json_atomically(self.directory.gates_path, results_as_json(results))
        if results:
            print_results(results, self.terminal)
        if faults := survived_faults(rows):
            self.say("survived faults: " + ", ".join(f"{kind} {count}" for kind, count in faults.items()))
        passed = all_passed(results)
        self.say(
            f"finished; {'all' if passed else 'NOT all'} of {len(results)} gates passed: {self.directory.path}"
        )
        return passed

    def finish(self) -> None:
        """The run came to its end, whatever its gates say."""
        if self.opened is not None:
            self.opened.finish()

    def stop(self, reason: str) -> None:
        """Every rank is here together, and the state of the last step boundary is saved."""
        if self.opened is not None:
            self.opened.stop(reason)
            self.write(f"{reason}; {self._how_to_go_on()}")

    def fail(self, reason: str, details: str = "") -> None:
        """The run has failed; told by rank 0."""
        if self.rank == 0:
            lines = [f"FAILED: {reason}", details, f"logs: {self.directory.logs_dir}", self._how_to_go_on()]
            self.write("\n".join(line for line in lines if line))
        if self.opened is not None:
            self.opened.fail(reason)

    def fail_here(self, reason: str) -> None:
        """This rank has failed, whatever the others do."""
        self.write(f"FAILED on trainer rank {self.rank}: {reason}\nlogs: {self.directory.logs_dir}")

    def explain(self, error: MegatronPPOError) -> None:
        """Add the diagnosis of this moment to an error that ended a wait, on the rank that will tell it."""
        if self.rank == 0:
            explain(error, self.directory)

    def report(self, error: Exception) -> None:
        """The cause, once: by rank 0, or by the rank that failed alone."""
        text = f"{type(error).__name__}: {error}"
        if self.rank == 0:
            self.fail(
                f"another trainer rank ended; it says why. Seen here: {text}" if lost_a_peer(error) else text,
                "\n".join(getattr(error, "__notes__", ())),
            )
        elif is_own_cause(error):
            self.fail_here(text)

    def _how_to_go_on(self) -> str:
        """What continues this run, from where."""
        where = f"run.resume={self.directory.path}"
        again = f"the same command, or {where}," if self.resume == "auto" else f"adding {where}"
        try:
            found = CheckpointFolder(self.directory.checkpoints_dir).choose({})
        except (CheckpointError, OSError) as error:
            return f"its checkpoints cannot be read: {error}"
        if found.newest is not None:
            return f"{again} continues from step {found.newest.removeprefix('step_')}"
        if found.torn:
            return "its checkpoints are torn: run.resume=never starts a new run"
        return f"it has no checkpoint yet: {again} starts over"
