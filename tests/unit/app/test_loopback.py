"""On one host gloo listens on the loopback interface only; where the run may reach over hosts nothing is changed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ppo.app.loopback import VARIABLE, keep_to_loopback
from megatron_ppo.config.compose import load
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.transport.tcp_stores import is_loopback

LISTENERS = """
import os
import torch.distributed as dist
from megatron_ppo.app.loopback import keep_to_loopback
from megatron_ppo.config.compose import load
keep_to_loopback(load(["+experiment=cpu_smoke"]))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
own = set()
for descriptor in os.listdir("/proc/self/fd"):
    try:
        own.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    except FileNotFoundError:  # that of the listing
        pass
for table in ("tcp", "tcp6"):
    for line in open(f"/proc/self/net/{table}").read().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            print(fields[1].split(":")[0])
"""
LOOPBACK = {"0100007F", "0" * 24 + "01000000"}


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "")  # so that it is put back
    monkeypatch.delenv(VARIABLE)
    monkeypatch.delenv("MASTER_ADDR", raising=False)


def config(*overrides: str) -> RunConfig:
    return load(["+experiment=cpu_smoke", *overrides])


def test_gloo_listens_on_loopback_only() -> None:
    """Where the host's name resolves to loopback, gloo would do so unasked; the variable is tested below."""
    environment = {key: value for key, value in os.environ.items() if key != VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", LISTENERS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env=environment,
        cwd=Path(__file__).resolve().parents[3],
    )
    listening = set(done.stdout.split())
    assert listening and listening <= LOOPBACK


@pytest.mark.parametrize("master", [None, "127.0.0.1", "localhost", "::1"])
def test_one_host_is_kept_to_loopback(master: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if master is not None:
        monkeypatch.setenv("MASTER_ADDR", master)
    keep_to_loopback(config())
    assert os.environ[VARIABLE] == "lo"


def test_what_may_reach_over_hosts_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_to_loopback(config("cluster.node_ip_address=10.0.0.1"))
    keep_to_loopback(config("cluster.ray_address=10.0.0.1:6379"))
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    keep_to_loopback(config())
    assert VARIABLE not in os.environ


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "eth7")
    keep_to_loopback(config())
    assert os.environ[VARIABLE] == "eth7"


@pytest.mark.parametrize(
    ("host", "expected"), [("127.0.0.2", True), ("::1", True), ("10.0.0.1", False), ("node-7", False)]
)
def test_loopback_is_told_without_a_name_server(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
