"""Stores that are meant for loopback listen there alone, also those that torch opens by itself."""

from __future__ import annotations

import socket
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest
import torch.distributed as dist

from megatron_ppo.transport.tcp_stores import keep_to_loopback, listener_on, store_at

LIMIT = timedelta(seconds=20)


def is_reached_on(host: str, port: int) -> bool:
    # The whole of 127/8 is loopback, so another address of it reaches a listener bound to all interfaces.
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True


def free_port() -> int:
    with listener_on("127.0.0.1") as listener:
        return int(listener.getsockname()[1])


@pytest.fixture
def module() -> Any:
    """Opens its stores as torch's modules do, by a name that it has imported."""
    module = ModuleType("rendezvous")
    module.TCPStore = dist.TCPStore  # type: ignore[attr-defined]
    return module


def test_a_store_at_a_listener_serves_on_its_address_only() -> None:
    store = store_at(listener_on("127.0.0.1"), "127.0.0.1", timeout=LIMIT, wait_for_workers=False)
    assert is_reached_on("127.0.0.1", store.port) and not is_reached_on("127.0.0.2", store.port)
    store.set("key", "value")
    client = dist.TCPStore("127.0.0.1", store.port, None, False, LIMIT)
    assert client.get("key") == b"value"


def test_a_port_that_is_taken_is_an_error() -> None:
    with listener_on("127.0.0.1") as listener, pytest.raises(OSError, match="in use"):
        listener_on("127.0.0.1", int(listener.getsockname()[1]))


@pytest.mark.parametrize("kept", [False, True])
def test_torchs_own_stores_listen_everywhere_unless_they_are_kept_to_loopback(
    module: Any, kept: bool
) -> None:
    if kept:
        keep_to_loopback(module)
        keep_to_loopback(module)
    port = free_port()
    # As `torch.distributed.rendezvous` calls it.
    server = module.TCPStore(
        host_name="127.0.0.1", port=port, world_size=1, is_master=True, timeout=LIMIT, multi_tenant=True,
        use_libuv=True,
    )  # fmt: skip
    assert is_reached_on("127.0.0.1", port)
    assert is_reached_on("127.0.0.2", port) is not kept
    client = module.TCPStore("127.0.0.1", port, 1, False, LIMIT, use_libuv=True)
    client.set("key", "value")
    assert server.get("key") == b"value"


def test_a_store_for_another_address_stays_as_torch_makes_it(module: Any) -> None:
    keep_to_loopback(module)
    port = free_port()
    store = module.TCPStore("0.0.0.0", port, 1, True, LIMIT, wait_for_workers=False)
    assert store.port == port and is_reached_on("127.0.0.2", port)
