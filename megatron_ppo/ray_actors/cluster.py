"""A Ray cluster of this run alone: on the loopback interface, without dashboard, gone when the driver is
gone.

Driven by the composition root on trainer rank 0. Invariant: no process of the cluster outlives the driver,
neither after a clean end nor after SIGKILL.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import ray

from megatron_ppo.ray_actors import reaper

logger = logging.getLogger(__name__)

_SYSTEM_CONFIG = {
    # Actors bring their own environment, so a worker started ahead of time would never be used.
    "prestart_worker_first_driver": False,
    # Ray would kill an engine when the *machine* runs low; the run is to end with its own message instead.
    "memory_monitor_refresh_ms": 0,
    "metrics_report_interval_ms": 3_600_000,
}


@contextmanager
def start_local_cluster(
    *,
    log_dir: Path,
    env: Mapping[str, str] | None = None,
    num_cpus: int = 1,
    num_gpus: int | None = None,
    object_store_bytes: int = 128 * 2**20,
) -> Iterator[None]:
    """Start Ray on 127.0.0.1 and connect this process; stop it on the way out, also after an error.

    Args:
        log_dir: receives Ray's own logs (`ray/`) when the block ends.
        env: environment of every actor and task that sets none of its own.
        num_cpus: what Ray believes to have; actors of this package ask for 0.
        object_store_bytes: nothing large passes through the object store; weights take the broadcast group.
    Raises: RuntimeError when this process is connected to a cluster already.
    """
    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already; a run starts its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Socket paths below it must fit into 107 characters, which a run directory may not.
    temp_dir = Path(tempfile.mkdtemp(prefix="mppo-ray-"))
    with _reaper(temp_dir), _connection(temp_dir, log_dir, env, num_cpus, num_gpus, object_store_bytes):
        yield


@contextmanager
def _connection(
    temp_dir: Path,
    log_dir: Path,
    env: Mapping[str, str] | None,
    num_cpus: int,
    num_gpus: int | None,
    object_store_bytes: int,
) -> Iterator[None]:
    try:
        ray.init(
            address="local",
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            num_cpus=num_cpus,
            num_gpus=num_gpus,
            object_store_memory=object_store_bytes,
            runtime_env={"env_vars": dict(env)} if env else None,
            _node_ip_address="127.0.0.1",
            _temp_dir=str(temp_dir),
            _system_config=_SYSTEM_CONFIG,
        )
        yield
    finally:
        ray.shutdown()
        logs = temp_dir / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, log_dir / "ray", dirs_exist_ok=True, symlinks=True)


@contextmanager
def _reaper(temp_dir: Path) -> Iterator[None]:
    # A session of its own: a signal to the driver's process group must not reach it.
    command = [sys.executable, "-I", reaper.__file__, str(temp_dir), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(timeout=reaper.LIMIT_S + 5)
        except subprocess.TimeoutExpired:
            logger.warning("processes of the Ray cluster in %s could not be ended", temp_dir)
