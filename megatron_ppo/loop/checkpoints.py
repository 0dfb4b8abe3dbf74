"""Saves and restores a run: models, replay buffer and prompt position of one step boundary.

Driven by the training loop on every rank: `save` at a step boundary writes, or begins to write, everything beside its
final name; `publish`, called after the step's row of metrics is out, makes visible what is complete. With
`asynchronous` the models are copied in `save` and written while training goes on; the side files are written at once,
so that all parts of a checkpoint are of the same instant. Nothing outside this module knows in which mode it works.

Invariants: the replay snapshot and the weights of one folder belong to the same step boundary; no prompt is lost or
trained twice by a resume, whether the finished groups are restored or not; a save has ended before the next one
begins; a failed one is met on every rank together, and leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from megatron_ppo.loop.checkpoint_folder import (
    FORMAT_VERSION,
    INFO_FILE,
    REPLAY_FILE,
    CheckpointFolder,
    Retention,
    read_complete,
)
from megatron_ppo.loop.identity import Trait
from megatron_ppo.loop.ports import Metrics
from megatron_ppo.loop.validation import OnRankZero
from megatron_ppo.protocol.errors import CheckpointError
from megatron_ppo.protocol.ledger import Ledger
from megatron_ppo.replay.state import from_json, to_json

logger = logging.getLogger(__name__)

OnSaveError = Literal["stop", "warn"]


class BackgroundSave(Protocol):
    """Models that were copied and are being written. Both calls are collective over all ranks."""

    def is_written(self) -> bool:
        """Whether every rank's share has been written, or has failed; does not wait. The same on every rank."""
        ...

    def finish(self) -> None:
        """Wait for every rank's share and complete the files. Raises: CheckpointError on every rank."""
        ...


class ModelStore(Protocol):
    """Saves and loads policy and critic with their optimizers; collective over all ranks."""

    def save(self, folder: Path) -> None:
        """Write into the existing `folder`: on return every rank's files are complete.

        Raises: CheckpointError on every rank, with the cause, if a rank cannot write.
        """
        ...

    def begin_save(self, folder: Path) -> BackgroundSave:
        """As `save`, but return when everything is copied; later changes of the models do not reach the files."""
        ...

    def load(self, folder: Path) -> None:
        """Restore in place. Raises: CheckpointError."""
        ...


class ReplaySnapshots(Protocol):
    """The replay buffer as rank 0 sees it."""

    def snapshot(self) -> str:
        """One atomic snapshot of buffer, targets, ledger and prompt position, as JSON text."""
        ...

    def restore(self, snapshot: str | None, *, resume_step: int) -> None:
        """Continue from a snapshot, or from an empty buffer, at `resume_step` completed steps."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Snapshot:
    """JSON texts: the whole replay buffer, and the same without finished groups; and how far the prompts have come."""

    everything: str
    position: str
    num_trained: int
    lowest_open: int


@dataclass(frozen=True, slots=True)
class _Save:
    """One that is not visible yet; `writing` is None when its files are complete."""

    step: int
    writing: BackgroundSave | None


class RunCheckpoints:
    """The run's checkpoints (loop port Checkpoints).

    Args:
        folder: `<run dir>/checkpoints`.   resume: whether to continue from its newest complete checkpoint.
        required: whether it is an error if there is none, because the run was named to be continued.
        retention: which ones stay, and by which metric they are ranked.
        identity: what the run and its checkpoint have in common (seed, data, tokenizer, models); compared on restore.
        load_replay_buffer: False regenerates the whole window instead of restoring finished groups; so does a
            missing file of groups. The position in the prompt stream is restored in any case.
        asynchronous: write the models while training goes on.
        on_error: what a save that fails does: `stop` ends the run, `warn` goes on and saves again after the next
            step, until it succeeds.
        notify: shows a warning to the person at the terminal; called on every rank.
        companions: contents of files that every checkpoint holds, by their path in it, so that one that is carried
            elsewhere says what it is; on rank 0.
        prompts_per_epoch: of the prompt stream; None leaves the epoch out.
    """

    def __init__(
        self,
        *,
        folder: Path,
        resume: bool,
        retention: Retention,
        identity: Mapping[str, Trait],
        load_replay_buffer: bool,
        models: ModelStore,
        replay: ReplaySnapshots | None,
        version_at: Callable[[int], int],
        on_rank_zero: OnRankZero[object],
        required: bool = False,
        asynchronous: bool = False,
        on_error: OnSaveError = "stop",
        notify: Callable[[str], None] = logger.warning,
        companions: Mapping[str, bytes] | None = None,
        prompts_per_epoch: int | None = None,
    ) -> None:
        self._files = CheckpointFolder(folder)
        self._resume = resume
        self._required = required
        self._retention = retention
        self._identity = identity
        self._load_replay_buffer = load_replay_buffer
        self._models = models
        self._replay = replay
        self._version_at = version_at
        self._on_rank_zero = on_rank_zero
        self._asynchronous = asynchronous
        self._on_error = on_error
        self._notify = notify
        self._companions = companions or {}
        self._prompts_per_epoch = prompts_per_epoch
        self._current: _Save | None = None
        self._failed_saves = 0
        self._overdue = False

    @property
    def overdue(self) -> bool:
        """Whether the last save failed, so that the next step boundary should try again. The same on every rank."""
        return self._overdue

    def restore(self) -> int:
        """Continue from the newest complete checkpoint, if resuming and there is one.

        Raises: CheckpointError if it is of another run, if there is none and one is required, or if all are torn.
        """
        newest = self._on_rank_zero("choice of checkpoint", self._newest_complete)
        if newest is None:
            self._on_rank_zero("start of the replay buffer", lambda: self._restore_replay(None, 0))
            return 0
        step = int(str(newest).removeprefix("step_"))
        logger.info("resuming from %s", self._files.path / str(newest))
        self._models.load(self._files.path / str(newest))
        self._on_rank_zero("restore of the replay buffer", lambda: self._restore_replay(str(newest), step))
        return step

    def save(self, *, step: int, metrics: Metrics) -> Metrics:
        """Write, or begin to write, the state after `step` completed steps. `publish` makes it visible.

        Waits for the end of the save before. Returns: once a save has failed, how many have.
        Raises: CheckpointError on every rank if it failed and `on_error` is stop.
        """
        self.publish(wait=True)
        # The learner is here, so nothing is trained between the snapshot and the weights; groups that land
        # meanwhile are pending in the snapshot and are generated again after a restore.
        snapshot: list[_Snapshot] = []  # stays on rank 0, it may be large
        self._on_rank_zero(f"snapshot of checkpoint {step}", lambda: snapshot.append(self._snapshot(step)))
        temporary = self._files.temporary(step)
        try:
            self._write(step, "start", lambda: self._files.begin(step))
            self._write(step, "side files", lambda: self._write_side_files(step, snapshot[0], metrics))
            if self._asynchronous:
                self._current = _Save(step, self._models.begin_save(temporary))
            else:
                self._models.save(temporary)
                self._write(step, "seal", lambda: self._files.seal(step))
                self._current = _Save(step, None)
            self._overdue = False
        except CheckpointError as error:
            self._fail(step, error)
        return {"checkpoint/failed_saves": float(self._failed_saves)} if self._failed_saves else {}

    def publish(self, *, wait: bool = False) -> None:
        """Make the last save visible if it is complete. Collective; called at every step boundary.

        Args:
            wait: for a write in the background; else one that is still going on is left alone.
        Raises: CheckpointError on every rank if it failed and `on_error` is stop.
        """
        current = self._current
        if current is None or (current.writing is not None and not wait and not current.writing.is_written()):
            return
        self._current = None
        step = current.step
        try:
            if current.writing is not None:
                current.writing.finish()
                self._write(step, "seal", lambda: self._files.seal(step))
            self._write(step, "publication", lambda: self._files.publish(step, self._retention))
        except CheckpointError as error:
            self._fail(step, error)
        else:
            logger.info("saved %s", self._files.final(step))

    def _write(self, step: int, what: str, action: Callable[[], None]) -> None:
        """A file operation of rank 0, whose failure every rank meets as the same CheckpointError."""

        def attempt() -> str | None:
            try:
                action()
            except OSError as error:
                return f"checkpoint {step} could not be written ({what}): {error}"
            return None

        message = self._on_rank_zero(f"{what} of checkpoint {step}", attempt)
        if message is not None:
            raise CheckpointError(str(message))

    def _fail(self, step: int, error: CheckpointError) -> None:
        self._failed_saves += 1
        self._current = None
        # The space that it took may be what the next one lacks.
        self._on_rank_zero(f"removal of checkpoint {step}", self._files.sweep)
        if self._on_error == "stop":
            raise error
        self._overdue = True
        logger.warning("%s", error, exc_info=error)
        self._notify(
            f"checkpoint {step} failed, the run goes on and tries again after the next step: {error}"
        )

    def _newest_complete(self) -> str | None:
        if not self._resume:
            return None
        choice = self._files.choose(self._identity)
        for what in (*(f"skipping torn checkpoint {torn}" for torn in choice.torn), *choice.told):
            logger.warning("%s", what)
            self._notify(f"warning: {what}")
        if choice.newest is None and (self._required or choice.torn):
            # A torn one was complete when it appeared: a start at step 0 would throw away trained steps.
            torn = f"; torn: {'; '.join(choice.torn)}" if choice.torn else ""
            why = "run.resume names this run" if self._required else "this run is to be continued"
            raise CheckpointError(
                f"{why}, but {self._files.path} holds no complete checkpoint{torn}; "
                "run.resume=never starts a new run"
            )
        if choice.newest is not None:
            self._files.finish_killed_publication(choice.newest)
        return choice.newest

    def _snapshot(self, step: int) -> _Snapshot:
        assert self._replay is not None, "only rank 0 holds the replay buffer"
        text = self._replay.snapshot()
        state = from_json(text)
        if state.lowest_unfinished > step:
            raise CheckpointError(
                f"checkpoint {step} would lose prompts: the replay buffer has handed out the groups of "
                f"{state.lowest_unfinished} steps, the weights were trained on those of {step}"
            )
        ledger = Ledger(state.ledger)
        return _Snapshot(
            everything=text,
            position=to_json(dataclasses.replace(state, groups=())),
            num_trained=ledger.counts().trained,
            lowest_open=ledger.cut,
        )

    def _restore_replay(self, checkpoint: str | None, step: int) -> None:
        assert self._replay is not None, "only rank 0 holds the replay buffer"
        snapshot = None if checkpoint is None else self._snapshot_of(self._files.path / checkpoint)
        self._replay.restore(snapshot, resume_step=step)

    def _snapshot_of(self, folder: Path) -> str:
        path, info = folder / REPLAY_FILE, read_complete(folder)
        saved, version = info["weight_version"], self._version_at(int(str(info["step"])))
        if not self._load_replay_buffer:
            pass
        elif saved != version:
            logger.warning(
                "%s: its weights were version %s when it was saved and are version %d now, because "
                "schedule.policy_training_start_step has changed; ages of its groups cannot be compared, they are "
                "generated again",
                path,
                saved,
                version,
            )
        elif not path.exists():
            logger.warning("%s is missing; the groups that it held are generated again", path)
        else:
            return path.read_text()
        return json.dumps(info["prompts"])

    def _write_side_files(self, step: int, snapshot: _Snapshot, metrics: Metrics) -> None:
        folder, metric = self._files.temporary(step), self._retention.metric
        (folder / REPLAY_FILE).write_text(snapshot.everything)
        for name, content in self._companions.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)
        ranking = metrics.get(metric) if metric else None
        if metric is not None and ranking is None:
            logger.warning("checkpoint %d is not ranked: its step has no metric %s", step, metric)
        info = {
            "format_version": FORMAT_VERSION,
            "step": step,
            "weight_version": self._version_at(step),
            "identity": {name: trait.value for name, trait in self._identity.items()},
            "metric": metric,
            "metric_value": ranking,
            # For people: nothing reads these.
            "consumed_samples": snapshot.num_trained,
            "current_epoch": None
            if self._prompts_per_epoch is None
            else snapshot.lowest_open // self._prompts_per_epoch,
            "prompts": json.loads(snapshot.position),
        }
        (folder / INFO_FILE).write_text(json.dumps(info, indent=1))


def without_groups(snapshot: str) -> str:
    """The snapshot with its finished groups dropped; their ordinals become pending on restore."""
    return to_json(dataclasses.replace(from_json(snapshot), groups=()))
