"""A run whose engines are in a Ray cluster that stands already, as on several hosts; here its one node is this host."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from launcher import ROOT, Launched, free_port

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.ray_actors.cluster import join_cluster

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(600),
]


@pytest.fixture
def standing_cluster(tmp_path: Path) -> Iterator[str]:
    """Address of a head node in processes of its own."""
    port = free_port()
    # Not below tmp_path: Ray's sockets must fit into 107 characters.
    with tempfile.TemporaryDirectory(prefix="mppo-head-", ignore_cleanup_errors=True) as folder:
        command = [
            str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", f"--port={port}",
            "--node-ip-address=127.0.0.1", "--num-cpus=1", "--include-dashboard=false",
            f"--object-store-memory={128 * 2**20}", f"--temp-dir={folder}", "--disable-usage-stats",
        ]  # fmt: skip
        with (tmp_path / "head.out").open("wb") as output:
            head = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, start_new_session=True,
            )  # fmt: skip
        tree = psutil.Process(head.pid)
        try:
            deadline = time.monotonic() + 90
            while "Ray runtime started" not in (tmp_path / "head.out").read_text(errors="replace"):
                assert head.poll() is None, (tmp_path / "head.out").read_text()
                assert time.monotonic() < deadline, "the head node did not start within 90 s"
                time.sleep(0.5)
            yield f"127.0.0.1:{port}"
            assert head.poll() is None, "the run must leave the cluster standing"
        finally:
            processes = [tree, *tree.children(recursive=True)] if tree.is_running() else []
            for process in processes:
                try:
                    process.send_signal(signal.SIGKILL)
                except psutil.NoSuchProcess:
                    continue
            head.wait(timeout=30)


def test_a_run_joins_a_standing_cluster_and_leaves_it_standing(
    launch: Callable[..., Launched], standing_cluster: str
) -> None:
    job = launch("+experiment=cpu_smoke", f"cluster.ray_address={standing_cluster}")
    assert job.wait(timeout_s=400) == 0, job.output
    assert "all of" in job.output
    # The actors are the cluster's processes, not the run's: they have ended with their driver.
    deadline = time.monotonic() + 30
    while left := [p.name() for p in psutil.process_iter(["name"]) if _serves(p, job)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    assert job.survivors(within_s=15) == []


def _serves(process: psutil.Process, job: Launched) -> bool:
    """Whether an actor of the run is at work: it keeps its log file open."""
    try:
        return any(str(job.base) in file.path for file in process.open_files())
    except psutil.Error:
        return False


def test_an_address_without_cluster_is_refused_at_once() -> None:
    port = free_port()
    with (
        pytest.raises(
            ConfigError, match=rf"cluster\.ray_address: got '127\.0\.0\.1:{port}', where nothing listens"
        ),
        join_cluster(address=f"127.0.0.1:{port}"),
    ):
        pass
