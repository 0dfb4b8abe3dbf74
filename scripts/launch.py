"""torchrun that leaves it to the ranks to end: python scripts/launch.py [torchrun's options] SCRIPT [arguments]

torchrun itself passes SIGTERM and SIGINT on, kills the ranks 30 seconds later and exits with 1; it dies of SIGUSR1.
Here the first of these signals is passed on to the ranks, which end after their step and their save, however long these
take, and the exit code is theirs; none is started again. A second signal is torchrun's own end: SIGTERM to the ranks,
SIGKILL after `--shutdown-timeout`.

torchrun's store listens on every interface. Where all ranks are on this host (one node, no `--rdzv-endpoint`, and a
loopback `--master-addr`, which is the default) the one of this launcher listens on loopback alone; `--master-port=0` is
any free port. Everything else is torchrun.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import time
from pathlib import Path

# The default of `--signals-to-handle`: for the others torchrun would replace the handler below by its own.
os.environ["PET_SIGNALS_TO_HANDLE"] = "SIGHUP,SIGQUIT"

from torch.distributed import run
from torch.distributed.elastic.agent.server.api import SimpleElasticAgent, WorkerGroup
from torch.distributed.elastic.multiprocessing.errors import record
from torch.distributed.elastic.rendezvous import static_tcp_rendezvous

from megatron_ppo.protocol.signals import ENDING_SIGNALS
from megatron_ppo.transport.tcp_stores import is_loopback, listener_on, store_at

SAME_REQUEST_S = 1.0
"""A batch system may signal a whole process group and the launcher by itself."""


class PassedOn:
    """The handler of the signals."""

    def __init__(self) -> None:
        self._first_s: float | None = None

    @property
    def told(self) -> bool:
        """Whether the ranks were told to end."""
        return self._first_s is not None

    def __call__(self, signum: int, _frame: object) -> None:
        """Pass the first signal on; leave on a second one, upon which torchrun ends the ranks."""
        if self._first_s is None:
            self._first_s = time.monotonic()
            for rank in ranks():
                os.kill(rank, signum)
        elif time.monotonic() - self._first_s > SAME_REQUEST_S:
            raise SystemExit(128 + signum)


def ranks() -> list[int]:
    """Process ids of the ranks that this launcher has started: its children that have a RANK."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            # After the name, in parentheses, which may contain anything, come the state and the parent's id.
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"\0RANK=" in b"\0" + (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except (OSError, IndexError):  # it has ended meanwhile
            continue
    return found


def end_once_told(handler: PassedOn) -> None:
    """Let no rank be started again that was told to end, and failed at that (torch 2.13 has no option for it)."""
    restart = SimpleElasticAgent._restart_workers

    def restart_unless_told(agent: SimpleElasticAgent, workers: WorkerGroup) -> None:
        if handler.told:
            raise SystemExit(1)  # the agent ends those that are left
        restart(agent, workers)

    SimpleElasticAgent._restart_workers = restart_unless_told  # type: ignore[method-assign]


def keep_to_loopback(options: argparse.Namespace) -> None:
    """Let the ranks meet at a store that listens on loopback alone, if all of them are on this host.

    torch 2.13: the static rendezvous opens the store itself and has no option for a socket.
    """
    alone = options.nnodes in ("1", "1:1") and (options.standalone or not options.rdzv_endpoint)
    if not alone or not is_loopback(options.master_addr):
        return
    listener = listener_on(options.master_addr, 0 if options.standalone else options.master_port)
    options.standalone = False
    options.rdzv_backend, options.rdzv_endpoint = "static", ""
    options.master_port = int(listener.getsockname()[1])
    static_tcp_rendezvous.TCPStore = serving_on(listener)  # type: ignore[misc, assignment]


def serving_on(listener: socket.socket):
    """What the rendezvous calls for its store, once."""

    def make(host, _port, world_size, _is_master, timeout, *, multi_tenant):
        return store_at(listener, host, world_size=world_size, timeout=timeout, multi_tenant=multi_tenant)

    return make


@record
def main(words: list[str]) -> None:
    """torchrun."""
    options = run.parse_args(words)
    keep_to_loopback(options)
    run.run(options)


if __name__ == "__main__":
    handler = PassedOn()
    end_once_told(handler)
    for number in ENDING_SIGNALS:
        signal.signal(number, handler)
    main(sys.argv[1:])
