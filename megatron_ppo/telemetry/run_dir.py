"""Owns the layout of run directories and the decision which run to continue.

    <base dir>/<run id>/{config.yaml, metrics.jsonl, events/, logs/, checkpoints/, heartbeats/, gates.json,
                         status.json, run.json, .lock}

The entry point drives it on rank 0 only and tells the other ranks the path. `run.json` holds name,
configuration digest and state of the run; every file but the metrics is replaced atomically.

Invariants: a directory with a run id always holds a valid `run.json`; at most one live process owns a run.
The lock is the kernel's (`flock`), so a crash, also SIGKILL, never leaves it behind.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import Self

import yaml  # type: ignore[import-untyped]

from megatron_ppo.protocol.errors import ConfigError, MegatronPPOError

logger = logging.getLogger(__name__)

MANIFEST_NAME = "run.json"
LOCK_NAME = ".lock"
NAMED_KEYS = 3
DYING_OWNER_S = 20.0
"""How long a killed owner may take to end, on a machine that is busy."""

# Where a run is stored, whether it is continued, how it is shown and watched do not make it another run.
DIGEST_IGNORED = frozenset({"run.resume", "run.dir", "telemetry", "watchdog"})


class RunState(StrEnum):
    """`RUNNING` also describes a run whose process was killed; whether it lives is what the lock says.

    `STOPPED`: it was asked to end, by a signal, and can be continued like one that failed.
    """

    RUNNING = "running"
    STOPPED = "stopped"
    FINISHED = "finished"
    FAILED = "failed"


class RunLockedError(MegatronPPOError):
    """Another live process owns the run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunManifest:
    """Content of `run.json`.

    Attributes:
        created_unix_s, updated_unix_s: seconds since the epoch.
        reason: why the run failed, or what stopped it; empty otherwise.
        kernels: what each model runs on and why, by part; of the newest start.
        launcher: which launcher started it last; a restart of its workers continues this run.
    """

    run_id: str
    name: str
    config_digest: str
    state: RunState
    created_unix_s: float
    updated_unix_s: float
    reason: str = ""
    kernels: dict[str, dict[str, str]] = field(default_factory=dict)
    launcher: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDirectory:
    """Names of the files of one run. Holds no resources and may be sent to other processes."""

    path: Path

    @property
    def config_path(self) -> Path:
        """The resolved configuration."""
        return self.path / "config.yaml"

    @property
    def metrics_path(self) -> Path:
        """One JSON object per completed step."""
        return self.path / "metrics.jsonl"

    @property
    def ledger_path(self) -> Path:
        """History of every prompt, one move a line; read by `scripts/ledger.py`."""
        return self.path / "ledger.jsonl"

    @property
    def events_dir(self) -> Path:
        """TensorBoard event files."""
        return self.path / "events"

    @property
    def logs_dir(self) -> Path:
        """One log file per process."""
        return self.path / "logs"

    @property
    def checkpoints_dir(self) -> Path:
        """Checkpoints, one folder each."""
        return self.path / "checkpoints"

    @property
    def heartbeats_dir(self) -> Path:
        """One file per process, replaced every few seconds."""
        return self.path / "heartbeats"

    @property
    def gates_path(self) -> Path:
        """Results of the gates at the end of the run."""
        return self.path / "gates.json"

    @property
    def model_digests_path(self) -> Path:
        """Digests of the initial models' weights, and the state of the files that they were read from."""
        return self.path / "model_digests.json"

    @property
    def faults_path(self) -> Path:
        """Faults that the run injected into itself, one a line; absent without `chaos`."""
        return self.path / "faults.jsonl"

    @property
    def status_path(self) -> Path:
        """Progress of the run, replaced after each step."""
        return self.path / "status.json"

    @property
    def manifest_path(self) -> Path:
        """Identity and state of the run."""
        return self.path / MANIFEST_NAME

    @property
    def lock_path(self) -> Path:
        """The file that the live owner of the run holds locked."""
        return self.path / LOCK_NAME

    def heartbeat_path(self, process_name: str) -> Path:
        """Signs of life of the process with that name, which is also that of its log file."""
        return self.heartbeats_dir / f"{process_name}.json"

    def log_path(self, process_name: str) -> Path:
        """Log file of the process with that name, for example `trainer_rank_0`."""
        return self.logs_dir / f"{process_name}.log"

    def read_manifest(self) -> RunManifest:
        """Parse `run.json`. Raises: ConfigError when it is missing or not one of ours."""
        try:
            fields = json.loads(self.manifest_path.read_text(encoding="utf-8"))
            return RunManifest(**{**fields, "state": RunState(fields["state"])})
        except FileNotFoundError:
            raise ConfigError(f"{self.path} is no run directory: it has no {MANIFEST_NAME}") from None
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{self.manifest_path} cannot be read as a run manifest: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class PassedOver:
    """A run that `run.resume=auto` would continue if its configuration were the same.

    Attributes:
        changed: dotted keys whose values differ.
    """

    path: Path
    changed: tuple[str, ...]

    def __str__(self) -> str:
        keys = [*self.changed[:NAMED_KEYS], *(["…"] if len(self.changed) > NAMED_KEYS else [])]
        named = f" ({', '.join(keys)})" if keys else ""
        return (
            f"{self.path} is unfinished and is not continued, because its configuration differs{named}; "
            f"run.resume={self.path} continues it in spite of that"
        )


class OpenRun:
    """A run that this process owns: directory, lock and state.

    Use as a context manager: an exception marks the run failed, `finish` marks it finished, and leaving in
    any other way keeps it unfinished, so that `run.resume=auto` continues it.

    Attributes:
        directory: names of its files.   resumed: whether it existed before.
        finished: it reached its last step before the launcher restarted; nothing is left to do.
        passed_over: an unfinished run with checkpoints and another configuration, beside which this one begins anew.
    """

    def __init__(
        self,
        *,
        directory: RunDirectory,
        resumed: bool,
        lock: RunLock,
        finished: bool = False,
        passed_over: PassedOver | None = None,
    ) -> None:
        self.directory = directory
        self.resumed = resumed
        self.finished = finished
        self.passed_over = passed_over
        self._lock = lock

    def record_kernels(self, kernels: Mapping[str, Mapping[str, str]]) -> None:
        """Record what the models run on."""
        manifest = self.directory.read_manifest()
        plain = {model: dict(parts) for model, parts in kernels.items()}
        _write_manifest(self.directory, replace(manifest, kernels=plain, updated_unix_s=time.time()))

    def finish(self) -> None:
        """Record that the run reached its last step."""
        self._set_state(RunState.FINISHED, reason="")

    def stop(self, reason: str) -> None:
        """Record that the run ended early because it was asked to."""
        self._set_state(RunState.STOPPED, reason=reason)

    def fail(self, reason: str) -> None:
        """Record why the run ended early."""
        self._set_state(RunState.FAILED, reason=reason)

    def close(self) -> None:
        """Give the lock up. Harmless when repeated."""
        self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is not None:
                self.fail(f"{kind.__name__}: {error}")
        finally:
            self.close()

    def _set_state(self, state: RunState, *, reason: str) -> None:
        manifest = self.directory.read_manifest()
        _write_manifest(
            self.directory, replace(manifest, state=state, reason=reason, updated_unix_s=time.time())
        )


class RunLock:
    """An exclusive kernel lock on the run's lock file, held until `release` or the end of the process.

    A killed process keeps it for a moment, until the last of its threads is gone: an owner that is dying is waited for.
    """

    def __init__(self, path: Path) -> None:
        """Take the lock. Raises: RunLockedError when a live process holds it."""
        self._descriptor: int | None = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        deadline = time.monotonic() + DYING_OWNER_S
        while not _locks(self._descriptor):
            owner = os.pread(self._descriptor, 64, 0).decode(errors="replace").strip() or "unknown"
            if _is_dying(owner) and time.monotonic() < deadline:
                time.sleep(0.05)
                continue
            os.close(self._descriptor)
            self._descriptor = None
            raise RunLockedError(f"{path.parent} is in use by a live process (pid {owner})")
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Unlock, also for children that were forked while the lock was held. Harmless when repeated."""
        if self._descriptor is not None:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = None


def _locks(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_dying(owner: str) -> bool:
    """Whether the process has ended, or is listed as a zombie while other threads of it still run down."""
    try:
        # After the name, in parentheses, which may contain anything, comes the state.
        state = Path(f"/proc/{int(owner)}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return Path("/proc/self/stat").exists()  # elsewhere than on Linux nothing is known
    except (OSError, ValueError, IndexError):
        return False
    return state in "ZX"


def config_digest(config: Mapping[str, object]) -> str:
    """SHA-256 of a resolved configuration, without the keys in DIGEST_IGNORED; equal for equal runs.

    Args:
        config: nested mapping of JSON values; the order of keys does not matter.
    """
    kept = _without_ignored(config, prefix="")
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()


def find_resumable(base_dir: Path, config_digest: str) -> RunDirectory | None:
    """The newest run under `base_dir` with this digest that is unfinished and owned by no live process."""
    for directory, manifest in reversed(_runs_in(base_dir)):
        if manifest.config_digest != config_digest or manifest.state is RunState.FINISHED:
            continue
        if is_locked(directory):
            logger.warning("run %s has the same configuration but is in use; not continued", directory.path)
            continue
        return directory
    return None


def find_passed_over(base_dir: Path, config: Mapping[str, object]) -> PassedOver | None:
    """The newest unfinished run under `base_dir` with another configuration that has something to continue from."""
    for directory, manifest in reversed(_runs_in(base_dir)):
        if manifest.state is RunState.FINISHED or not any(directory.checkpoints_dir.glob("step_*")):
            continue
        if not is_locked(directory):
            return PassedOver(path=directory.path, changed=_changed_keys(directory, config))
    return None


def is_locked(directory: RunDirectory) -> bool:
    """Whether a live process owns the run."""
    try:
        RunLock(directory.lock_path).release()
    except RunLockedError:
        return True
    return False


def lock_owner(directory: RunDirectory) -> int | None:
    """Id of the process that owns the run, None if there is none; changes nothing in the run directory.

    Raises: ConfigError when the lock file cannot be read.
    """
    try:
        descriptor = os.open(directory.lock_path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{directory.lock_path} cannot be read: {error.strerror}") from error
    try:
        # Shared, so that two observers do not see each other; held for an instant.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return None
    except BlockingIOError:
        text = os.pread(descriptor, 64, 0).decode(errors="replace").strip()
        return int(text) if text.isdecimal() else 0  # 0: taken an instant ago, its number is not written yet
    finally:
        os.close(descriptor)


def check_base_dir(base_dir: Path, *, name: str) -> None:
    """Refuse a directory that already belongs to something else; a missing or empty one is fine.

    Raises: ConfigError when it holds a run of another name, or content but no run.
    """
    if base_dir.exists() and not base_dir.is_dir():
        raise ConfigError(f"run.dir={base_dir} is a file; give a directory")
    runs = _runs_in(base_dir)
    for directory, manifest in runs:
        if manifest.name != name:
            raise ConfigError(
                f"run.dir={base_dir} holds run {directory.path.name} of experiment {manifest.name!r}, "
                f"but run.name={name!r}; give another run.dir or run.name"
            )
    content = [entry.name for entry in _entries(base_dir) if not entry.name.startswith(".")]
    if content and not runs:
        raise ConfigError(
            f"run.dir={base_dir} is not empty and holds no run of this experiment "
            f"(found {', '.join(sorted(content)[:3])}); give an empty or new directory"
        )


def check_continued_run(path: Path, *, name: str) -> RunManifest:
    """The manifest of the run directory `path`, which `run.resume` names.

    Raises: ConfigError when it is no run directory, or a run of another experiment.
    """
    try:
        manifest = RunDirectory(path=path).read_manifest()
    except ConfigError as error:
        raise ConfigError(
            f"run.resume={path}: {error}; give the folder that holds {MANIFEST_NAME}"
        ) from error
    if manifest.name != name:
        raise ConfigError(
            f"run.resume={path} is a run of experiment {manifest.name!r}, but run.name={name!r}"
        )
    return manifest


def open_run(
    base_dir: Path,
    *,
    name: str,
    config: Mapping[str, object],
    resume: str,
    launcher: str = "",
    restarted: bool = False,
) -> OpenRun:
    """Create a run, or continue one, and lock it.

    Args:
        base_dir: `run.dir`, the parent of the run directories.
        config: the resolved configuration, JSON values only; written to `config.yaml`.
        resume: `auto` continues the newest unfinished run with the same configuration, else starts a new one;
            `never` always starts a new one; anything else is the path of the run directory to continue.
        launcher: which launcher this process belongs to.
        restarted: it has restarted its workers: they continue the run that they had, whatever `resume` says, also if
            that was finished.

    Raises: ConfigError for a directory of another experiment or a path that is no run; RunLockedError when
        the given run is in use.
    """
    if resume not in ("auto", "never"):
        given = RunDirectory(path=Path(resume))
        return _continue_run(given, name=name, config=config, launcher=launcher, restarted=restarted)
    check_base_dir(base_dir, name=name)
    if restarted:
        own = _newest_of_launcher(base_dir, launcher, config_digest(config))
        if own is not None:
            return _continue_run(own, name=name, config=config, launcher=launcher, restarted=True)
    if resume == "auto":
        found = find_resumable(base_dir, config_digest(config))
        if found is not None:
            try:
                return _continue_run(found, name=name, config=config, launcher=launcher)
            except RunLockedError as error:  # another launch was faster
                logger.warning("%s; starting a new run", error)
    passed_over = find_passed_over(base_dir, config) if resume == "auto" else None
    return _create_run(base_dir, name=name, config=config, launcher=launcher, passed_over=passed_over)


def write_json_atomically(path: Path, value: object) -> None:
    """Replace `path` by `value` as JSON; a reader sees the old or the new content, never a part."""
    _write_text_atomically(path, json.dumps(value, indent=2) + "\n")


def new_run_id(*, now_unix_s: float, salt: bytes) -> str:
    """UTC time stamp, which sorts by age, and six hex digits that keep runs of one second apart."""
    stamp = datetime.fromtimestamp(now_unix_s, tz=UTC).strftime("%Y%m%dT%H%M%SZ")
    return f"{stamp}-{hashlib.sha256(salt).hexdigest()[:6]}"


def _newest_of_launcher(base_dir: Path, launcher: str, config_digest: str) -> RunDirectory | None:
    for directory, manifest in reversed(_runs_in(base_dir)):
        if manifest.launcher == launcher and manifest.config_digest == config_digest:
            return directory
    return None


def _create_run(
    base_dir: Path,
    *,
    name: str,
    config: Mapping[str, object],
    launcher: str,
    passed_over: PassedOver | None,
) -> OpenRun:
    base_dir.mkdir(parents=True, exist_ok=True)
    now_s = time.time()
    run_id = new_run_id(now_unix_s=now_s, salt=os.urandom(16))
    # Filled under a hidden name first: a crash in here must not leave a run without its manifest.
    draft = RunDirectory(path=base_dir / f".{run_id}.new")
    draft.path.mkdir()
    try:
        for folder in (draft.events_dir, draft.logs_dir, draft.checkpoints_dir):
            folder.mkdir()
        _write_config(draft, config)
        manifest = RunManifest(
            run_id=run_id,
            name=name,
            config_digest=config_digest(config),
            state=RunState.RUNNING,
            created_unix_s=now_s,
            updated_unix_s=now_s,
            launcher=launcher,
        )
        _write_manifest(draft, manifest)
        lock = RunLock(draft.lock_path)
        directory = RunDirectory(path=base_dir / run_id)
        draft.path.rename(directory.path)
    except BaseException:
        shutil.rmtree(draft.path, ignore_errors=True)
        raise
    return OpenRun(directory=directory, resumed=False, lock=lock, passed_over=passed_over)


def _continue_run(
    directory: RunDirectory,
    *,
    name: str,
    config: Mapping[str, object],
    launcher: str,
    restarted: bool = False,
) -> OpenRun:
    manifest = check_continued_run(directory.path, name=name)
    lock = RunLock(directory.lock_path)
    if restarted and manifest.launcher == launcher and manifest.state is RunState.FINISHED:
        return OpenRun(directory=directory, resumed=True, lock=lock, finished=True)
    try:
        now_s = time.time()
        digest = config_digest(config)
        if digest != manifest.config_digest:
            logger.warning("run %s continues with another configuration", directory.path)
            os.replace(directory.config_path, directory.path / f"config.until_{int(now_s)}.yaml")
            _write_config(directory, config)
        for folder in (directory.events_dir, directory.logs_dir, directory.checkpoints_dir):
            folder.mkdir(exist_ok=True)
        _write_manifest(
            directory,
            replace(
                manifest,
                config_digest=digest,
                state=RunState.RUNNING,
                reason="",
                updated_unix_s=now_s,
                launcher=launcher,
            ),
        )
    except BaseException:
        lock.release()
        raise
    return OpenRun(directory=directory, resumed=True, lock=lock)


def _runs_in(base_dir: Path) -> list[tuple[RunDirectory, RunManifest]]:
    """Every run under `base_dir`, oldest first. An unreadable manifest is an error, not a missing run."""
    runs = []
    for entry in _entries(base_dir):
        directory = RunDirectory(path=entry)
        if not entry.name.startswith(".") and directory.manifest_path.is_file():
            runs.append((directory, directory.read_manifest()))
    return sorted(runs, key=lambda run: (run[1].created_unix_s, run[1].run_id))


def _entries(base_dir: Path) -> list[Path]:
    return list(base_dir.iterdir()) if base_dir.is_dir() else []


def _without_ignored(config: Mapping[str, object], *, prefix: str) -> dict[str, object]:
    kept: dict[str, object] = {}
    for key, value in config.items():
        path = f"{prefix}{key}"
        if path in DIGEST_IGNORED:
            continue
        kept[str(key)] = _without_ignored(value, prefix=f"{path}.") if isinstance(value, Mapping) else value
    return kept


def _changed_keys(directory: RunDirectory, config: Mapping[str, object]) -> tuple[str, ...]:
    """Keys that make `config` another one than the run's, as its file has it; none if that cannot be read."""
    try:
        saved = yaml.safe_load(directory.config_path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError):
        return ()
    old = _leaves(_without_ignored(saved, prefix="")) if isinstance(saved, Mapping) else {}
    new = _leaves(_without_ignored(json.loads(json.dumps(config)), prefix=""))
    return tuple(key for key in sorted(old.keys() | new.keys()) if old.get(key) != new.get(key))


def _leaves(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    leaves: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            leaves |= _leaves(value, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    return leaves


def _write_config(directory: RunDirectory, config: Mapping[str, object]) -> None:
    # Through JSON, so that tuples and enums become plain YAML that any loader reads.
    plain = json.loads(json.dumps(config))
    _write_text_atomically(directory.config_path, yaml.safe_dump(plain, sort_keys=False, allow_unicode=True))


def _write_manifest(directory: RunDirectory, manifest: RunManifest) -> None:
    write_json_atomically(directory.manifest_path, asdict(manifest))


def _write_text_atomically(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(draft, path)
