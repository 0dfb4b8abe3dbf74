"""A worker knows its launcher by more than a process id, and does not outlive it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from megatron_ppo.app.launcher import launcher_identity, restart_count


def test_without_a_launcher_there_is_no_identity_and_no_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert (launcher_identity(), restart_count()) == ("", 0)


def test_workers_of_one_launcher_share_its_identity_and_those_of_another_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    ask = [sys.executable, "-c", "from megatron_ppo.app.launcher import *; print(launcher_identity())"]
    first, second = (subprocess.run(ask, capture_output=True, text=True, timeout=60).stdout for _ in range(2))
    assert first == second != launcher_identity() + "\n"
    assert f"/{os.getpid()}/" in first
    assert restart_count() == 2


def test_a_worker_is_told_when_its_launcher_is_killed() -> None:
    worker = """
        import os, signal, sys
        from megatron_ppo.app.launcher import end_with_launcher
        signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), os._exit(0)))
        end_with_launcher()
        print(os.getpid(), flush=True)
        signal.pause()
    """
    launcher = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {textwrap.dedent(worker)!r}])"
    process = subprocess.Popen(
        [sys.executable, "-c", launcher],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TORCHELASTIC_RUN_ID": "none"},
    )
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert process.stdout.readline() == "told\n"
    deadline = time.monotonic() + 30
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.05)
    process.stdout.close()
