"""torch's TCP stores, kept to the address that they are meant for.

torch (2.13) binds a store's port on every interface, unless it is handed a socket that listens already.
Used by the refit's store, by `scripts/launch.py` and in vLLM's workers. Invariant: a store that is made here for a
loopback address cannot be reached from another host.
"""

from __future__ import annotations

import ipaddress
import socket
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch.distributed as dist
from torch.distributed import TCPStore


def is_loopback(host: str) -> bool:
    """Whether `host` is this host's loopback address, without asking a name server."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listener_on(host: str, port: int = 0) -> socket.socket:
    """A listening socket on that address alone; port 0 is any free one. Raises: OSError."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


def store_at(
    listener: socket.socket,
    host: str,
    *,
    world_size: int | None = None,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
) -> dist.TCPStore:
    """A store that serves on `listener`, which belongs to it from now on."""
    port = int(listener.getsockname()[1])
    return TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
    )


def keep_to_loopback(module: ModuleType) -> None:
    """Let the stores that `module` opens, under its name `TCPStore`, for a loopback address listen there alone.

    For modules of torch that know their address but open the port on all: `torch.distributed.rendezvous`, which serves
    `init_process_group(init_method="tcp://…")`, for one. Harmless when repeated.
    """
    setattr(module, "TCPStore", _store)  # noqa: B010, a name that the module has imported


def _store(
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    timeout: timedelta = timedelta(minutes=5),
    wait_for_workers: bool = True,
    multi_tenant: bool = False,
    **further: Any,
) -> dist.TCPStore:
    """As torch's own class."""
    if not is_master or not is_loopback(host_name) or further.get("master_listen_fd") is not None:
        return TCPStore(
            host_name, port, world_size, is_master, timeout, wait_for_workers, multi_tenant, **further
        )
    return store_at(
        listener_on(host_name, port),
        host_name,
        world_size=world_size,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        multi_tenant=multi_tenant,
    )
