"""What processes listen on, seen from outside."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import IPv6Address, ip_address

import psutil


def listening(processes: Iterable[psutil.Process]) -> dict[str, bool]:
    """Every socket that one of `processes` listens on, in words -> whether other hosts could reach it."""
    found = {}
    for process in processes:
        try:
            for each in process.net_connections(kind="inet"):
                if each.status == psutil.CONN_LISTEN:
                    line = f"{each.laddr.ip}:{each.laddr.port} of {process.pid} {' '.join(process.cmdline())[:100]}"
                    found[line] = not _is_loopback(each.laddr.ip)
        except psutil.Error:  # it has ended meanwhile
            continue
    return found


def open_to_others(processes: Iterable[psutil.Process]) -> list[str]:
    """Those that other hosts could reach."""
    return [line for line, is_open in listening(processes).items() if is_open]


def _is_loopback(address: str) -> bool:
    found = ip_address(address)
    # Ray's processes write 127.0.0.1 as ::ffff:127.0.0.1, which Python calls loopback from 3.13 on.
    plain = found.ipv4_mapped if isinstance(found, IPv6Address) and found.ipv4_mapped else found
    return plain.is_loopback
