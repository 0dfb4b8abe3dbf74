"""Run directories: which run continues, who owns it, and what a crash leaves behind."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_dir import (
    OpenRun,
    RunDirectory,
    RunLockedError,
    RunState,
    config_digest,
    find_resumable,
    is_locked,
    new_run_id,
    open_run,
    write_json_atomically,
)
from tests.unit.disk_events import Flushed, Renamed, record_disk_events

CONFIG: dict[str, object] = {
    "run": {"name": "sort", "seed": 42, "dir": "outputs/sort", "resume": "auto"},
    "loss": {"ratio_clip_min": 0.2},
    "telemetry": {"tensorboard": True},
}


def open_sort(base: Path, *, config: dict[str, object] = CONFIG, resume: str = "auto") -> OpenRun:
    return open_run(base, name="sort", config=config, resume=resume)


def with_value(section: str, key: str, value: object) -> dict[str, object]:
    changed = json.loads(json.dumps(CONFIG))
    changed[section][key] = value
    return changed


def test_what_the_models_run_on_is_recorded_and_outlives_the_state(tmp_path: Path) -> None:
    kernels = {
        "policy": {"layers": "local (there is no CUDA device)"},
        "critic": {"layers": "local (asked for)"},
    }
    with open_sort(tmp_path) as run:
        assert run.directory.read_manifest().kernels == {}
        run.record_kernels(kernels)
        run.finish()
    manifest = run.directory.read_manifest()
    assert (manifest.kernels, manifest.state) == (kernels, RunState.FINISHED)


def test_new_run_has_the_whole_layout(tmp_path: Path) -> None:
    with open_sort(tmp_path / "outputs" / "sort") as run:
        directory = run.directory
        assert not run.resumed
        assert re.fullmatch(r"\d{8}T\d{6}Z-[0-9a-f]{6}", directory.path.name)
        for folder in (directory.events_dir, directory.logs_dir, directory.checkpoints_dir):
            assert folder.is_dir()
        assert yaml.safe_load(directory.config_path.read_text()) == CONFIG
        manifest = directory.read_manifest()
        assert (manifest.name, manifest.state, manifest.run_id) == (
            "sort",
            RunState.RUNNING,
            directory.path.name,
        )
        assert manifest.config_digest == config_digest(CONFIG)
    assert directory.log_path("trainer_rank_0") == directory.path / "logs" / "trainer_rank_0.log"
    assert [p.name for p in (tmp_path / "outputs" / "sort").iterdir()] == [directory.path.name]


def test_run_ids_sort_by_time_and_differ_within_a_second() -> None:
    early = new_run_id(now_unix_s=0.0, salt=b"a")
    assert early.startswith("19700101T000000Z-")
    assert new_run_id(now_unix_s=0.0, salt=b"b") != early
    assert new_run_id(now_unix_s=1.0, salt=b"a") > early


def test_digest_ignores_only_where_and_how_the_run_is_stored_and_shown() -> None:
    digest = config_digest(CONFIG)
    assert config_digest(with_value("run", "resume", "never")) == digest
    assert config_digest(with_value("run", "dir", "elsewhere")) == digest
    assert config_digest(with_value("telemetry", "tensorboard", False)) == digest
    assert config_digest(dict(reversed(list(CONFIG.items())))) == digest
    assert config_digest(with_value("run", "seed", 43)) != digest
    assert config_digest(with_value("loss", "ratio_clip_min", 0.1)) != digest
    # Only the run's own `dir`: the same word elsewhere counts.
    assert config_digest(with_value("loss", "dir", "x")) != digest


def test_auto_continues_the_newest_unfinished_run_with_this_configuration(tmp_path: Path) -> None:
    with open_sort(tmp_path) as first:
        pass
    with open_sort(tmp_path, resume="never") as second:
        pass
    with open_sort(tmp_path, config=with_value("run", "seed", 7)) as other:
        assert not other.resumed
    with open_sort(tmp_path) as run:
        assert run.resumed
        assert run.directory == second.directory
        run.finish()
    with open_sort(tmp_path) as run:
        assert run.directory == first.directory
        run.finish()
    with open_sort(tmp_path) as run:
        assert not run.resumed
    assert len({p.name for p in tmp_path.iterdir()}) == 4


def test_an_unfinished_run_with_another_configuration_is_named_when_a_new_one_begins(tmp_path: Path) -> None:
    """No silent reset: a longer run, or one with another learning rate, is another run to `auto`."""
    with open_sort(tmp_path) as first:
        assert first.passed_over is None
    with open_sort(tmp_path, config=with_value("run", "max_num_steps", 80)) as second:
        assert second.passed_over is None  # the first has nothing to continue from
    (first.directory.checkpoints_dir / "step_4").mkdir()
    changed = with_value("loss", "ratio_clip_min", 0.1)
    changed["run"] = {**CONFIG["run"], "max_num_steps": 80}  # type: ignore[dict-item]
    changed["telemetry"] = {"tensorboard": False}  # makes no other run
    with open_sort(tmp_path, config=changed) as third:
        assert not third.resumed and third.passed_over is not None
        assert str(third.passed_over) == (
            f"{first.directory.path} is unfinished and is not continued, because its configuration differs "
            f"(loss.ratio_clip_min, run.max_num_steps); run.resume={first.directory.path} continues it in "
            "spite of that"
        )
        third.finish()
    with open_sort(tmp_path, config=changed, resume="never") as asked_for:
        assert asked_for.passed_over is None
    with (
        open_sort(tmp_path, resume=str(first.directory.path)) as continued,
        open_sort(tmp_path, config=with_value("run", "seed", 7)) as beside_a_live_one,
    ):
        assert (continued.passed_over, beside_a_live_one.passed_over) == (None, None)
        continued.finish()
    with open_sort(tmp_path, config=with_value("run", "seed", 8)) as last:
        assert last.passed_over is None


def test_many_changed_keys_are_not_all_named_nor_any_of_a_configuration_that_cannot_be_read(
    tmp_path: Path,
) -> None:
    with open_sort(tmp_path) as first:
        (first.directory.checkpoints_dir / "step_4").mkdir()
    changed = {**CONFIG, "a": {"b": 1, "c": [2], "d": {"e": 3}}, "z": 4}
    with open_sort(tmp_path, config=changed) as second:
        assert "differs (a.b, a.c, a.d.e, …); run.resume=" in str(second.passed_over)
    first.directory.config_path.write_text("{")
    with open_sort(tmp_path, config=with_value("run", "seed", 7)) as third:
        assert "its configuration differs; run.resume=" in str(third.passed_over)


def test_a_failed_run_is_continued_and_says_why_it_failed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), open_sort(tmp_path) as run:
        raise RuntimeError("engine died")
    manifest = run.directory.read_manifest()
    assert (manifest.state, manifest.reason) == (RunState.FAILED, "RuntimeError: engine died")
    with open_sort(tmp_path) as again:
        assert again.resumed
        assert again.directory.read_manifest().state is RunState.RUNNING
        assert again.directory.read_manifest().reason == ""


def test_never_starts_a_new_run(tmp_path: Path) -> None:
    with open_sort(tmp_path) as first:
        pass
    with open_sort(tmp_path, resume="never") as second:
        assert not second.resumed
        assert second.directory != first.directory


def test_a_path_continues_that_run_also_with_another_configuration(tmp_path: Path) -> None:
    with open_sort(tmp_path) as first:
        pass
    with open_sort(tmp_path, resume="never"):
        pass
    longer = with_value("run", "max_num_steps", 80)
    with open_sort(tmp_path, config=longer, resume=str(first.directory.path)) as run:
        assert run.resumed
        assert run.directory == first.directory
        assert run.directory.read_manifest().config_digest == config_digest(longer)
        assert yaml.safe_load(run.directory.config_path.read_text()) == longer
    (old,) = first.directory.path.glob("config.until_*.yaml")
    assert yaml.safe_load(old.read_text()) == CONFIG


def test_a_path_that_is_no_run_of_this_experiment_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent is no run directory: it has no run\.json"):
        open_sort(tmp_path, resume=str(tmp_path / "absent"))
    with open_run(tmp_path / "other", name="other", config=CONFIG, resume="auto") as other:
        pass
    with pytest.raises(ConfigError, match=r"is a run of experiment 'other', but run\.name='sort'"):
        open_sort(tmp_path, resume=str(other.directory.path))
    other.directory.manifest_path.write_text('{"run_id": ')
    with pytest.raises(ConfigError, match="cannot be read as a run manifest"):
        open_sort(tmp_path, resume=str(other.directory.path))


def test_a_directory_of_another_experiment_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, name="other", config=CONFIG, resume="auto"):
        pass
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ConfigError, match=r"holds run .* of experiment 'other', but run\.name='sort'"):
        open_sort(tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_directory_with_unrelated_content_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("hello")
    with pytest.raises(ConfigError, match=r"is not empty and holds no run .*thesis\.tex"):
        open_sort(tmp_path)
    with pytest.raises(ConfigError, match="is a file"):
        open_sort(tmp_path / "thesis.tex")


def test_notes_beside_own_runs_are_allowed(tmp_path: Path) -> None:
    with open_sort(tmp_path) as first:
        pass
    (tmp_path / "notes.md").write_text("good seeds")
    with open_sort(tmp_path) as run:
        assert run.directory == first.directory


def test_a_live_run_is_never_shared(tmp_path: Path) -> None:
    with open_sort(tmp_path) as owner:
        assert is_locked(owner.directory)
        with pytest.raises(RunLockedError, match=rf"in use by a live process \(pid {os.getpid()}\)"):
            open_sort(tmp_path, resume=str(owner.directory.path))
        assert find_resumable(tmp_path, config_digest(CONFIG)) is None
        with open_sort(tmp_path) as second:
            assert second.directory != owner.directory
    assert not is_locked(owner.directory)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the number of the system call is that of x86-64")
def test_an_owner_that_is_dying_is_waited_for(tmp_path: Path) -> None:
    """A killed process keeps its lock until its last thread is gone; a new run must not begin beside the old one."""
    code = (
        "import ctypes, sys, threading, time\n"
        "from pathlib import Path\n"
        "from megatron_ppo.telemetry.run_dir import open_run\n"
        "import json\n"
        "run = open_run(Path(sys.argv[1]), name='sort', config=json.loads(sys.argv[2]), resume='auto')\n"
        "threading.Thread(target=lambda: time.sleep(1)).start()\n"
        "print(run.directory.path, flush=True)\n"
        "ctypes.CDLL(None).syscall(ctypes.c_long(60), 0)\n"  # exit of this thread alone
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(CONFIG)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        first = owner.stdout.readline().strip()
        while Path(f"/proc/{owner.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)
        with open_sort(tmp_path) as run:
            assert run.resumed and str(run.directory.path) == first
    finally:
        owner.kill()
        owner.wait()


def test_a_killed_run_leaves_no_lock_and_is_continued(tmp_path: Path) -> None:
    code = (
        "import json, sys, time; from pathlib import Path\n"
        "from megatron_ppo.telemetry.run_dir import open_run\n"
        "run = open_run(Path(sys.argv[1]), name='sort', config=json.loads(sys.argv[2]), resume='auto')\n"
        "print(run.directory.path, flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), json.dumps(CONFIG)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert owner.stdout is not None
        directory = RunDirectory(path=Path(owner.stdout.readline().strip()))
        assert is_locked(directory)
        with pytest.raises(RunLockedError, match=rf"pid {owner.pid}"):
            open_sort(tmp_path, resume=str(directory.path))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.communicate(timeout=30)
    assert directory.read_manifest().state is RunState.RUNNING
    with open_sort(tmp_path) as run:
        assert run.resumed
        assert run.directory == directory


def test_an_interrupted_creation_leaves_nothing_that_looks_like_a_run(tmp_path: Path) -> None:
    (tmp_path / ".20260101T000000Z-abcdef.new").mkdir()
    with open_sort(tmp_path) as run:
        assert not run.resumed
    with pytest.raises(TypeError):
        open_run(tmp_path / "x", name="sort", config={"bad": object()}, resume="never")
    assert list((tmp_path / "x").iterdir()) == []


def test_json_files_are_replaced_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "status.json"
    events = record_disk_events(monkeypatch)
    write_json_atomically(path, {"step": 1})
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    assert events == [Flushed(path=draft, held=path.read_bytes()), Renamed(old=draft, new=path)]
    with pytest.raises(TypeError):
        write_json_atomically(path, {"step": object()})
    assert json.loads(path.read_text()) == {"step": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["status.json"]


def test_a_stopped_run_is_continued_and_says_what_stopped_it(tmp_path: Path) -> None:
    with open_sort(tmp_path) as run:
        run.stop("stopped by SIGUSR1")
    manifest = run.directory.read_manifest()
    assert (manifest.state, manifest.reason) == (RunState.STOPPED, "stopped by SIGUSR1")
    with open_sort(tmp_path) as again:
        assert again.directory == run.directory and again.resumed
        assert (again.directory.read_manifest().state, again.directory.read_manifest().reason) == (
            RunState.RUNNING,
            "",
        )


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_restarted_workers_continue_the_run_of_their_launcher(tmp_path: Path, resume: str) -> None:
    def start(launcher: str, *, restarted: bool = False, config: dict[str, object] = CONFIG) -> OpenRun:
        return open_run(
            tmp_path, name="sort", config=config, resume=resume, launcher=launcher, restarted=restarted
        )

    with start("host/1/10") as mine:
        mine.fail("a trainer rank died")
    with start("host/2/20", config=with_value("run", "seed", 7)) as theirs:
        pass
    with start("host/1/10", restarted=True) as again:
        assert (again.directory, again.resumed, again.finished) == (mine.directory, True, False)
    with start("host/2/20", restarted=True) as other:  # the next job of a sweep, which had not begun
        assert other.directory != theirs.directory


def test_restarted_workers_leave_what_their_launcher_has_finished(tmp_path: Path) -> None:
    with open_run(tmp_path, name="sort", config=CONFIG, resume="auto", launcher="host/1/10") as run:
        run.finish()
    for resume in ("auto", "never", str(run.directory.path)):
        with open_run(
            tmp_path, name="sort", config=CONFIG, resume=resume, launcher="host/1/10", restarted=True
        ) as again:
            assert (again.directory, again.finished) == (run.directory, True)
            assert again.directory.read_manifest().state is RunState.FINISHED
    with open_run(tmp_path, name="sort", config=CONFIG, resume="auto", launcher="host/2/20") as new:
        assert new.directory != run.directory and not new.finished
