"""Keeps the trainer ranks' own connections off the network where all processes of a run are on one host.

Driven by `app.job` before the process groups exist. The refit's store and Ray bind to the address that they are given;
gloo, left alone, listens on the interface of the host name.
"""

from __future__ import annotations

import os
import socket

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.transport.tcp_stores import is_loopback

VARIABLE = "GLOO_SOCKET_IFNAME"


def keep_to_loopback(config: RunConfig) -> None:
    """Point gloo at the loopback interface, unless the run may reach over hosts or the user has chosen one.

    Inherited by the processes that this one starts, of which all are on this host.
    """
    addresses = (os.environ.get("MASTER_ADDR", "127.0.0.1"), config.cluster.node_ip_address)
    if VARIABLE in os.environ or config.cluster.ray_address or not all(map(is_loopback, addresses)):
        return
    name = next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), None)
    if name is not None:
        os.environ[VARIABLE] = name
