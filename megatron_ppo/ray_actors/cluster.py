"""The Ray cluster of a run: one of its own on the loopback interface, gone when the driver is gone; or, for engines on
other hosts, one that stands already.

Driven by the composition root on trainer rank 0. Invariant: no process of the run's own cluster outlives the driver,
neither after a clean end nor after SIGKILL, nor ends before it of a signal that asks the run to end; of a cluster that
stood before, the run's actors end with the driver.
"""

from __future__ import annotations

import functools
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
import ray._private.parameter
import ray._private.services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.signals import deaf_children
from megatron_ppo.ray_actors import reaper

logger = logging.getLogger(__name__)

# A thread that still asks for something when the run's cluster is gone would start another one, which nobody ends.
ray._private.auto_init_hook.enable_auto_connect = False

START_ATTEMPTS = 3
_ANSWER_LIMIT_S = 20.0

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
    gpu_ids: Sequence[str] = (),
    object_store_bytes: int = 128 * 2**20,
) -> Iterator[None]:
    """Start Ray on 127.0.0.1 and connect this process; stop it on the way out, also after an error.

    Args:
        log_dir: receives Ray's own logs (`ray/`) when the block ends.
        env: environment of every actor and task that sets none of its own.
        num_cpus: what Ray believes to have; actors of this package ask for 0.
        gpu_ids: CUDA devices that Ray may hand out, as in CUDA_VISIBLE_DEVICES; the trainer's own are not among them.
        object_store_bytes: nothing large passes through the object store; weights take the broadcast group.
    Raises: RuntimeError when this process is connected to a cluster already.
    """
    if ray.is_initialized():
        raise RuntimeError("this process is connected to a Ray cluster already; a run starts its own")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Socket paths below it must fit into 107 characters, which a run directory may not.
    temp_dir = Path(tempfile.mkdtemp(prefix="mppo-ray-"))
    options = {
        "num_cpus": num_cpus,
        "num_gpus": len(gpu_ids) or None,
        "object_store_memory": object_store_bytes,
        "runtime_env": {"env_vars": dict(env)} if env else None,
        "_temp_dir": str(temp_dir),
    }
    with _reaper(temp_dir), _connection(temp_dir, log_dir, gpu_ids, options):
        yield


@contextmanager
def join_cluster(*, address: str, env: Mapping[str, str] | None = None) -> Iterator[None]:
    """Connect this process to a cluster that `ray start` has made; leave it, and end this run's actors, on the way out.

    Args:
        address: `host:port` of the head node. Ray takes the token of a cluster with authentication from its file
            or from RAY_AUTH_TOKEN.
        env: as in `start_local_cluster`.
    Raises: ConfigError for an address without a cluster; RuntimeError when connected already.
    """
    if ray.is_initialized():
        raise RuntimeError(
            "this process is connected to a Ray cluster already; a run needs a connection of its own"
        )
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    host, _, port = address.rpartition(":")
    try:  # Ray itself would try for minutes
        socket.create_connection((host, int(port)), timeout=_ANSWER_LIMIT_S).close()
    except OSError as error:
        raise ConfigError(f"cluster.ray_address: got {address!r}, where nothing listens: {error}") from error
    # Ray does so for a cluster that it finds by itself, but not for an address that it is given.
    maybe_enable_token_auth_if_token_available(warn_if_disabled=False)
    try:
        with _own_sigterm():
            ray.init(
                address=address,
                log_to_driver=False,
                configure_logging=False,
                runtime_env={"env_vars": dict(env)} if env else None,
            )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"cluster.ray_address: got {address!r}, where no Ray cluster answers: {error}"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def cluster_gpus() -> int:
    """GPUs of the connected cluster, over all of its nodes."""
    return int(ray.cluster_resources().get("GPU", 0))


@contextmanager
def _connection(
    temp_dir: Path, log_dir: Path, gpu_ids: Sequence[str], options: Mapping[str, Any]
) -> Iterator[None]:
    try:
        with (
            _visible_gpus(gpu_ids),
            _own_sigterm(),
            _needed_services(),
            _lasting_processes(),
            _on_loopback(),
        ):
            _init(options)
        yield
    finally:
        ray.shutdown()
        logs = temp_dir / "session_latest" / "logs"
        if logs.is_dir():
            shutil.copytree(logs, log_dir / "ray", dirs_exist_ok=True, symlinks=True)


def _init(options: Mapping[str, Any]) -> None:
    """Start Ray; again when its node was too slow, because Ray gives it 30 s and has no setting for that."""
    for attempt in range(1, START_ATTEMPTS + 1):
        try:
            ray.init(
                address="local",
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _node_ip_address="127.0.0.1",
                _system_config=_SYSTEM_CONFIG,
                **options,
            )
            return
        except Exception as error:  # Ray raises a plain Exception
            if "timed out during startup" not in str(error) or attempt == START_ATTEMPTS:
                raise
            logger.warning("Ray's node did not start in time (attempt %d); starting it again", attempt)
            ray.shutdown()


@contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray 2.60 installs two handlers, of which the second, in C++, kills the process before the stack unwinds."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


@contextmanager
def _needed_services() -> Iterator[None]:
    """Without Ray's autoscaler, log monitor and dashboard: nothing is scaled, and every actor writes its own log.

    Each is a Python process that would take a second of CPU time while the engines start. `ray start` has options for
    the first two, `ray.init` has not. The dashboard is started even with `include_dashboard=False`, for Ray's usage
    statistics, and `ray.init` waits until it answers (Ray 2.60).
    """
    params: Any = ray._private.parameter
    services: Any = ray._private.services
    with_all, dashboard = params.RayParams, services.start_api_server
    params.RayParams = functools.partial(with_all, no_monitor=True, include_log_monitor=False)
    services.start_api_server = lambda *_args, **_options: ("", None)  # its address, its process
    try:
        yield
    finally:
        params.RayParams, services.start_api_server = with_all, dashboard


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let the address of the cluster's only node stay what `ray.init` is given, so that nothing listens beyond it.

    Ray's processes listen on the loopback interface where their node's address is of it. But `ray.init` replaces such
    an address by that of the host, which other hosts could join, and then they listen on every interface. No parameter
    keeps it from doing so (Ray 2.60).
    """
    services: Any = ray._private.services
    plain = services.resolve_ip_for_localhost
    services.resolve_ip_for_localhost = lambda host: host
    try:
        yield
    finally:
        services.resolve_ip_for_localhost = plain


@contextmanager
def _lasting_processes() -> Iterator[None]:
    """A rank that is told to end needs its actors until its step is finished and saved.

    torchrun signals the process group of a rank, a batch system every process of the job. So Ray's processes lead
    groups of their own and are deaf, and their workers inherit it. Ray ends them with SIGTERM and waits a second for
    each; here they are killed, with their agents, and the workers leave with their raylet. Nothing is lost: the run's
    actors have ended, and the cluster is nobody else's.
    """
    module: Any = ray._private.services
    plain = module.ConsolePopen

    class Lasting(plain):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **options: Any) -> None:
            with deaf_children():
                super().__init__(*args, process_group=0, **options)

        def terminate(self) -> None:
            if self.poll() is None:  # otherwise its number may be another's
                with suppress(ProcessLookupError):
                    os.killpg(self.pid, signal.SIGKILL)

    module.ConsolePopen = Lasting
    try:
        yield
    finally:
        module.ConsolePopen = plain


@contextmanager
def _visible_gpus(gpu_ids: Sequence[str]) -> Iterator[None]:
    """Ray reads at its start which devices it owns; this process has chosen its own device by then."""
    if not gpu_ids:
        yield
        return
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu_ids)
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


@contextmanager
def _reaper(temp_dir: Path) -> Iterator[None]:
    # A session of its own: no signal to the driver's process group must reach it.
    command = [sys.executable, "-I", reaper.__file__, str(temp_dir), str(os.getpid())]
    with deaf_children():
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
