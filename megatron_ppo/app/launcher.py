"""What this process knows of the torchrun that started it: which one it is, how often it restarted, whether it lives.

Read by `app.job` at the start of a job. Without torchrun there is no launcher and no restart.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

from megatron_ppo.telemetry.processes import start_time

_PR_SET_PDEATHSIG = 1


def end_with_launcher() -> None:
    """Let the kernel send SIGTERM to this process when torchrun is gone, however it went: no rank is orphaned."""
    if sys.platform == "linux" and _is_under_torchrun():
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def launcher_identity() -> str:
    """Equal for all workers that one torchrun starts on this host, restarts included; empty without torchrun."""
    if not _is_under_torchrun():
        return ""
    return f"{socket.gethostname()}/{os.getppid()}/{start_time(os.getppid()) or 'unknown'}"


def restart_count() -> int:
    """How often torchrun has restarted its workers (`--max-restarts`)."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def _is_under_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ
