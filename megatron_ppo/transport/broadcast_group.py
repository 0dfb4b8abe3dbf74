"""One sender, many receivers: the broadcast group that carries weights from the trainer to the engine
workers.

Rank 0 of the trainer owns the `BroadcastStore` for the whole run and is group rank 0; every engine worker is
one further rank. A change of members is a new generation: the same store, another key prefix, a new process
group. Neither side needs a default process group.

On the CPU one worker of a host receives; the others read what it has received, where the host lets them (`relay`).
Nobody else sees a difference: all of them join, confirm, and say how far they are.

Invariant: no bucket moves before every receiver has confirmed the sender's manifest digest, because two ends
that cut different buckets make gloo abort the process instead of raising.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.protocol.errors import RefitError, WaitTimeoutError
from megatron_ppo.protocol.weights import RefitGroupSpec
from megatron_ppo.transport.relay import Lender, Reader, lenders
from megatron_ppo.transport.tcp_stores import is_loopback, listener_on, store_at

logger = logging.getLogger(__name__)

SENDER_RANK = 0
_ACCEPTED = "accepted"
# Pauses between two polls: a fixed share of the time waited so far, so that a bucket of any size is noticed with at
# most that delay, within bounds that keep a long wait from burning the core that the receiving engine needs.
_POLL_SHARE = 0.1
_POLL_MIN_S = 0.0002
_POLL_MAX_S = 0.01
# gloo wakes a waiter at once, so its limit only says how often one looks for failures meanwhile.
_GLOO_WAIT = timedelta(milliseconds=50)
_ABANDONED = "abandoned"
_JOINED = "joined"
_ALL_HERE = "all_here"
_PLAN = "plan"
_LENDS = "lends"
_READS = "reads"
_READERS = "the other receivers of this host to read what has arrived"
_ABANDONED_LOOK_S = 0.5
_CAUSE_GRACE_S = 3.0
# How often a receiver says how far it is: often enough to name the one that stands still, and else as seldom as can be.
_PROGRESS_S = 0.1
# A healthy receiver also waits for one that stands still. The sender, which knows who that is, gives up first.
_RECEIVER_PATIENCE = 1.25
_BACKEND_PATIENCE = 2.0

CheckPeers = Callable[[], None]


def backend_for(device: torch.device) -> str:
    """The process-group backend for tensors on `device`: "nccl" on CUDA, otherwise "gloo"."""
    return "nccl" if device.type == "cuda" else "gloo"


class BroadcastStore:
    """The rendezvous that the trainer's rank 0 keeps open for the whole run.

    Args:
        host: address that engine workers reach this process under; the listener binds to it alone.
        backend: "gloo" or "nccl", the same for every member.
        timeout_s: limit for joining and for every single broadcast.
    """

    def __init__(self, *, host: str = "127.0.0.1", backend: str = "gloo", timeout_s: float = 120.0) -> None:
        self.host = host
        self.backend = backend
        self.timeout_s = timeout_s
        self.tcp_store = store_at(
            listener_on(host), host, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
        )
        self.port = self.tcp_store.port

    def spec(self, *, generation: int, rank_offset: int, world_size: int) -> RefitGroupSpec:
        """What one engine needs to join `generation`."""
        return RefitGroupSpec(
            host=self.host,
            port=self.port,
            generation=generation,
            rank_offset=rank_offset,
            world_size=world_size,
            backend=self.backend,
            timeout_s=self.timeout_s,
        )


class BroadcastGroup:
    """One generation of the group. Every member constructs it at the same time.

    Args:
        spec: the group; its `rank_offset` is not used here.
        rank: this member's rank; 0 is the sender.
        device: where the broadcast buffers live.
        relay: the sender's choice for all: receivers of one host may read what one of them has received.
        store: the master store in the sender's process; None connects to it.
        receiver_names: what the sender's errors call the receivers, the one of rank 1 first.
        check_peers: called while the sender waits for the receivers; raises when one is known to have failed.

    Raises: RefitError when not all members arrive within `spec.timeout_s`.
    """

    def __init__(
        self,
        spec: RefitGroupSpec,
        *,
        rank: int,
        device: torch.device,
        relay: bool = True,
        store: BroadcastStore | None = None,
        receiver_names: Sequence[str] = (),
        check_peers: CheckPeers | None = None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self.device = device
        self._limit_s = spec.timeout_s * (1.0 if rank == SENDER_RANK else _RECEIVER_PATIENCE)
        self._lender: Lender | None = None
        self._reader: Reader | None = None
        self._group: dist.ProcessGroup | None = None
        self._receiver_names = tuple(receiver_names)
        timeout = timedelta(seconds=self._limit_s)
        try:
            tcp_store = (
                store.tcp_store if store else dist.TCPStore(spec.host, spec.port, None, False, timeout)
            )
            self._store = present = dist.PrefixStore(f"refit_{spec.generation}", tcp_store)
            # Connecting waits without looking at anything else, for long, so nobody begins before all are there.
            if rank == SENDER_RANK:
                connected = self._gather(present, relay, check_peers)
            else:
                connected = self._join(present)
            if rank in connected:
                self._group = _process_group(spec, present, connected.index(rank), len(connected), device)
        # DistStoreError and gloo's errors derive from RuntimeError
        except (RuntimeError, OSError, WaitTimeoutError) as error:
            self.close()
            raise RefitError(
                f"rank {rank} could not join refit group generation {spec.generation} of {spec.world_size} "
                f"members at {spec.host}:{spec.port} within {spec.timeout_s:.0f} s: {error}"
            ) from error
        self._transfer = 0
        self._started = 0
        self._moving = 0
        self._received = 0
        self._next_progress_at = 0.0

    def _gather(self, present: dist.Store, relay: bool, check_peers: CheckPeers | None) -> list[int]:
        """Sender: wait until all receivers are here; who is to be in the process group."""
        receivers = range(1, self.spec.world_size)

        def answers(prefix: str, ranks: Collection[int]) -> dict[int, str]:
            keys = [f"{prefix}/{rank}" for rank in ranks]
            try:
                self._poll(lambda: not keys or present.check(keys), "all receivers to join", check_peers)
            except WaitTimeoutError as error:
                raise WaitTimeoutError(f"{error}{self._without(present, prefix, 'missing', ranks)}") from None
            return {rank: present.get(key).decode() for rank, key in zip(ranks, keys, strict=True)}

        try:
            addresses = answers(_JOINED, receivers)
            plan = lenders(addresses) if relay else {}
            present.set(_PLAN, json.dumps([addresses, plan]))
            reading = [rank for rank, answer in answers(_READS, plan).items() if answer]
        except Exception as error:
            # Those that are here shall not wait for the others until their own limit: the next generation needs them.
            with suppress(RuntimeError):
                present.set(_ABANDONED, f"rank {self.rank}: {error}")
            raise
        connected = [rank for rank in range(self.spec.world_size) if rank not in reading]
        present.set(_ALL_HERE, json.dumps(connected))
        return connected

    def _join(self, present: dist.Store) -> list[int]:
        """Receiver: say that it is here, and find out from where it gets its bytes; as `_gather`."""

        def await_key(key: str) -> Any:
            self._poll(lambda: present.check([key]), "all members to join", None)
            return json.loads(present.get(key))

        lends = self.spec.backend == "gloo" and self.device.type == "cpu"
        lender = Lender(self.spec.world_size) if lends else None
        present.set(f"{_JOINED}/{self.rank}", lender.address() if lender else "")
        addresses, plan = await_key(_PLAN)
        readers = [int(rank) for rank in plan if plan[rank] == self.rank]
        if lender is not None and readers:
            self._lender = lender
            lender.let_in([addresses[str(rank)] for rank in readers])
            present.set(f"{_LENDS}/{self.rank}", json.dumps(True))
        if (source := plan.get(str(self.rank))) is not None:
            await_key(f"{_LENDS}/{source}")
            try:
                self._reader = Reader(addresses[str(source)], number=self.rank)
            except OSError as error:
                logger.info("this worker receives over a socket of its own: %s", error)
            present.set(f"{_READS}/{self.rank}", "" if self._reader is None else "yes")
        connected: list[int] = await_key(_ALL_HERE)
        if self._lender is not None:
            self._lender.begin([rank for rank in readers if rank not in connected])
        return connected

    def offer_manifest(self, digest: str, *, check_peers: CheckPeers | None = None) -> None:
        """Sender: publish the digest and wait until every receiver has accepted it.

        Args:
            check_peers: called while waiting; raises when a receiver is known to have failed.
        Raises: RefitError when a receiver holds another manifest; WaitTimeoutError when one does not answer.
        """
        transfer = self._next_transfer()
        self._store.set(f"{transfer}/digest", digest)
        receivers = range(1, self.spec.world_size)
        keys = [f"{transfer}/answer/{rank}" for rank in receivers]
        try:
            self._poll(lambda: self._store.check(keys), "all receivers to accept the manifest", check_peers)
        except WaitTimeoutError as error:
            silent = self._without(self._store, f"{transfer}/answer", "no answer from", receivers)
            raise WaitTimeoutError(f"{error}{silent}") from None
        for rank, key in zip(receivers, keys, strict=True):
            if (answer := self._store.get(key).decode()) != _ACCEPTED:
                raise RefitError(f"{self._name(rank)} refused the manifest: {answer}")

    def accept_manifest(self, digest: str) -> None:
        """Receiver: compare the sender's digest with one's own and answer, before any byte moves.

        Raises: RefitError when they differ; WaitTimeoutError when the sender publishes none in time.
        """
        transfer = self._next_transfer()
        key = f"{transfer}/digest"
        self._poll(lambda: self._store.check([key]), "the sender's manifest digest", None)
        offered = self._store.get(key).decode()
        answer_key = f"{transfer}/answer/{self.rank}"
        if offered != digest:
            text = f"the sender's manifest has digest {offered[:12]}, this engine was told {digest[:12]}"
            self._store.set(answer_key, text)
            raise RefitError(text)
        self._store.set(answer_key, _ACCEPTED)

    def broadcast(self, buffer: Tensor, *, check_peers: CheckPeers | None = None) -> None:
        """Send (rank 0) or receive (other ranks) one contiguous uint8 buffer; returns when it may be reused.

        Raises: as `start`, `PendingBroadcast.wait` and `await_readers`.
        """
        self.start(buffer).wait(check_peers=check_peers)
        self.await_readers()

    def start(self, buffer: Tensor) -> PendingBroadcast:
        """The same without waiting, so that the next buffer is filled, or the last one used, meanwhile.

        Broadcasts finish in the order of their start. Raises: RefitError.
        """
        work: dist.Work | _Reading
        with self._transfer_errors(f"broadcast of {buffer.numel()} bytes"):
            if self._reader is not None:
                work = _Reading(self._reader, self._started, buffer)
            elif self._group is not None:
                options = dist.BroadcastOptions()
                options.rootRank = SENDER_RANK
                options.rootTensor = 0
                work = self._group.broadcast([buffer], options)
            else:
                raise RefitError(f"refit group generation {self.spec.generation} is closed")
        self._started += 1
        self._moving += 1
        return PendingBroadcast(self, work, buffer)

    def await_readers(self) -> None:
        """Receiver: return when no other receiver needs what this one has received.

        Raises: RefitError, WaitTimeoutError.
        """
        if (lender := self._lender) is not None:
            with self._transfer_errors("lending to the other receivers"):
                self._poll(lender.has_all_back, _READERS, self._publish_progress)

    def publish(self, key: str, text: str) -> None:
        """Make a short text of the transfer in progress known to all members."""
        self._store.set(f"{self._transfer}/{key}", text)

    def lookup(self, key: str, *, what: str, check_peers: CheckPeers | None = None) -> str:
        """What a member has published under `key`; waits for it. Raises: WaitTimeoutError, RefitError."""
        full = f"{self._transfer}/{key}"
        self._poll(lambda: self._store.check([full]), what, check_peers)
        return self._store.get(full).decode()

    def published(self, key: str) -> str | None:
        """The same without waiting; None where nothing has been published."""
        full = f"{self._transfer}/{key}"
        return self._store.get(full).decode() if self._store.check([full]) else None

    def _finish(self, work: dist.Work | _Reading, buffer: Tensor, check_peers: CheckPeers | None) -> None:
        what = f"broadcast of {buffer.numel()} bytes"
        receives = self.rank != SENDER_RANK
        while_waiting = self._publish_progress if receives else check_peers
        with self._transfer_errors(what):
            if self.spec.backend == "gloo" and isinstance(work, dist.Work):
                self._poll(lambda: _gloo_is_done(work), f"the {what}", while_waiting, sleeps=False)
            else:
                self._poll(work.is_completed, f"the {what}", while_waiting)
            work.wait()
            if (lender := self._lender) is not None:
                lender.lend(buffer)
                self._poll(lender.has_room, _READERS, self._publish_progress)
        self._moving -= 1
        if receives:
            self._received += 1
            self._publish_progress()
        if self.device.type == "cuda":
            # wait() only orders the current stream behind NCCL; the caller overwrites or frees the buffer.
            torch.cuda.current_stream(self.device).synchronize()

    def _publish_progress(self) -> None:
        if (now := time.monotonic()) >= self._next_progress_at:
            self._next_progress_at = now + _PROGRESS_S
            self.publish(f"received/{self.rank}", str(self._received))

    def slowest_receivers(self) -> str:
        """Which receivers have finished the fewest broadcasts of this transfer, for the sender's errors.

        Who waits for more has said so; of one that stands still, the last ones may be missing.
        """
        counts = {
            rank: int(self.published(f"received/{rank}") or 0) for rank in range(1, self.spec.world_size)
        }
        fewest = min(counts.values(), default=0)
        names = ", ".join(self._name(rank) for rank, count in counts.items() if count == fewest)
        return f"{names} received {fewest} buckets"

    def _name(self, rank: int) -> str:
        index = rank - SENDER_RANK - 1
        known = 0 <= index < len(self._receiver_names)
        return self._receiver_names[index] if known else f"refit group rank {rank}"

    def _without(self, store: dist.Store, prefix: str, what: str, receivers: Iterable[int]) -> str:
        """A clause that names those of the receivers that have no key under `prefix`; empty if unknown."""
        try:
            ranks = [rank for rank in receivers if not store.check([f"{prefix}/{rank}"])]
        except RuntimeError:
            return ""
        return f"; {what} {', '.join(self._name(rank) for rank in ranks)}" if ranks else ""

    @contextmanager
    def _transfer_errors(self, what: str) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, OSError) as error:
            raise RefitError(
                f"{what} failed on refit group rank {self.rank}, generation {self.spec.generation}: {error}"
            ) from error

    def abandon(self, reason: str) -> None:
        """Give the group up after a failure and tell the other members, whose waits end within a second."""
        with suppress(RuntimeError):  # the store, or the connection to it, may be what failed
            if not self._store.check([_ABANDONED]):  # the first reason is the cause of the others
                self._store.set(_ABANDONED, f"rank {self.rank}: {reason}")
        self.close()

    def close(self) -> None:
        """Drop the connections. Harmless when repeated, and after a failed broadcast."""
        self._reader = None
        if self._lender is not None:
            self._lender.close()
            self._lender = None
        group, self._group = self._group, None
        if group is None:
            return
        if self.spec.backend == "nccl":
            group.abort()
        elif self._moving:
            # gloo's destructor waits for a pending transfer until that times out; nothing can cancel it.
            dropper = threading.Thread(target=_drop, args=([group],), name="refit-group-drop", daemon=True)
            del group
            dropper.start()

    def _next_transfer(self) -> int:
        self._transfer += 1
        self._received = 0
        self._next_progress_at = 0.0
        return self._transfer

    def _poll(
        self,
        done: Callable[[], bool],
        what: str,
        check_peers: CheckPeers | None,
        *,
        sleeps: bool = True,
    ) -> None:
        """Wait until `done`; with sleeps=False `done` itself waits a little."""
        started = time.monotonic()
        next_look_s = _ABANDONED_LOOK_S
        while not done():
            if check_peers is not None:
                check_peers()
            waited_s = time.monotonic() - started
            if waited_s > next_look_s:
                next_look_s += _ABANDONED_LOOK_S
                if self._store.check([_ABANDONED]):
                    reason = self._store.get(_ABANDONED).decode()
                    raise RefitError(
                        f"refit group generation {self.spec.generation} was abandoned by {reason}"
                    )
            if waited_s > self._limit_s:
                raise WaitTimeoutError(
                    f"refit group rank {self.rank}, generation {self.spec.generation}: "
                    f"waited {waited_s:.0f} s for {what}; the limit is {self._limit_s:.0f} s"
                )
            if sleeps:
                time.sleep(min(max(_POLL_MIN_S, _POLL_SHARE * waited_s), _POLL_MAX_S))


class _Reading:
    """Broadcast number `index`, out of the memory of the worker that receives it; looks like a `dist.Work`."""

    def __init__(self, reader: Reader, index: int, into: Tensor) -> None:
        self._reader = reader
        self._index = index
        self._into = into

    def is_completed(self) -> bool:
        return self._reader.has(self._index)

    def wait(self) -> None:
        self._reader.read(self._index, self._into)


class PendingBroadcast:
    """One broadcast on its way. Keeps its buffer alive: the transport writes to it, or reads it, until the end."""

    def __init__(self, group: BroadcastGroup, work: dist.Work | _Reading, buffer: Tensor) -> None:
        self._group = group
        self._work = work
        self.buffer = buffer

    def wait(self, *, check_peers: CheckPeers | None = None) -> Tensor:
        """Returns: the buffer, which the caller may read from now on, and also change once no other receiver reads it
        (`BroadcastGroup.await_readers`).

        Raises: RefitError when the transfer fails, WaitTimeoutError after the group's `timeout_s`, or whatever
            `check_peers` raises. The group is unusable afterwards: abandon it and form a new generation.
        """
        group = self._group
        try:
            group._finish(self._work, self.buffer, check_peers)
        except (RefitError, WaitTimeoutError) as error:
            if group.rank != SENDER_RANK:
                raise
            if check_peers is not None and isinstance(error, RefitError):
                _await_cause(check_peers)
            raise type(error)(f"{error}; {group.slowest_receivers()}") from error
        return self.buffer


def _await_cause(check_peers: CheckPeers) -> None:
    # A connection that broke says nothing; the receiver's own error, a moment later, names it and the cause.
    deadline = time.monotonic() + _CAUSE_GRACE_S
    while time.monotonic() < deadline:
        check_peers()
        time.sleep(_POLL_MAX_S)


def _gloo_is_done(work: dist.Work) -> bool:
    if work.is_completed():
        return True
    # An error is either this short limit, after which the work goes on, or a failure that the caller's wait() raises.
    with suppress(RuntimeError):
        work.wait(_GLOO_WAIT)
    return work.is_completed()


def _process_group(
    spec: RefitGroupSpec, store: dist.Store, rank: int, size: int, device: torch.device
) -> dist.ProcessGroup:
    # Later than this module's own limits, whose errors say more: gloo closes connections at its own, and NCCL's
    # watchdog ends the whole process.
    timeout = timedelta(seconds=_BACKEND_PATIENCE * spec.timeout_s)
    if spec.backend == "nccl":
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        torch.cuda.set_device(device)
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    if spec.backend != "gloo":
        raise RefitError(f'refit backend must be "gloo" or "nccl", got "{spec.backend}"')
    if not is_loopback(spec.host):
        # Several hosts: gloo picks the interface itself and follows GLOO_SOCKET_IFNAME.
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    gloo = dist.ProcessGroupGloo._Options()
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=spec.host)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)


def _drop(holder: list[dist.ProcessGroup]) -> None:
    holder.clear()
