"""Receivers of one host that read what one of them has received."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import Tensor

from megatron_ppo.protocol.errors import RefitError, WaitTimeoutError
from megatron_ppo.transport import broadcast_group, relay
from megatron_ppo.transport.broadcast_group import BroadcastGroup
from megatron_ppo.transport.relay import Lender, Reader, lenders
from megatron_ppo.transport.streams import manifest_for, receive_stream, send_stream
from tests.unit.transport.group_members import run_members
from tests.weight_metadata import tensor_meta

TENSORS = {f"layer_{n}": torch.arange(600.0 + n) * (n + 1) for n in range(12)}
"""Each travels alone in two pieces, 24 broadcasts: more than a lender has slots for at once."""


def _manifest(*, verify_checksum: bool = False):
    return manifest_for(
        tuple(tensor_meta(name, tensor) for name, tensor in TENSORS.items()),
        staging_bytes=2 * 2000,
        verify_checksum=verify_checksum,
    )


def _send(group: BroadcastGroup) -> None:
    try:
        send_stream(group, _manifest(), iter(TENSORS.values()))
    except Exception as error:
        group.abandon(str(error))
        raise


def _receive(group: BroadcastGroup) -> dict[str, Tensor]:
    return {name: tensor for tensors in receive_stream(group, _manifest()) for name, tensor in tensors}


def _is_whole(received: object) -> bool:
    assert isinstance(received, dict)
    return list(received) == list(TENSORS) and all(torch.equal(received[n], TENSORS[n]) for n in TENSORS)


@pytest.mark.parametrize("relays", [False, True])
@pytest.mark.parametrize("verify_checksum", [False, True])
def test_all_receivers_get_every_bit(verify_checksum: bool, relays: bool) -> None:
    reading: dict[int, bool] = {}

    def receive(group: BroadcastGroup) -> dict[str, Tensor]:
        reading[group.rank] = group._reader is not None
        manifest = _manifest(verify_checksum=verify_checksum)
        received = {}
        for _ in range(2):  # publications over one group
            received = {n: tensor for tensors in receive_stream(group, manifest) for n, tensor in tensors}
        return received

    def send(group: BroadcastGroup) -> None:
        for _ in range(2):
            send_stream(group, _manifest(verify_checksum=verify_checksum), iter(TENSORS.values()))

    sender, *receivers = run_members(send, [receive] * 5, relay=relays)
    sender.result()
    assert all(_is_whole(receiver.result()) for receiver in receivers)
    assert reading == {rank: relays and rank != 1 for rank in range(1, 6)}


def test_a_worker_that_may_not_read_receives_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Reader):
        def __init__(self, address: str, *, number: int) -> None:
            if number == 3:
                raise OSError("Operation not permitted")
            super().__init__(address, number=number)

    monkeypatch.setattr(broadcast_group, "Reader", Refused)
    connected: dict[int, bool] = {}

    def receive(group: BroadcastGroup) -> dict[str, Tensor]:
        connected[group.rank] = group._group is not None
        return _receive(group)

    sender, *receivers = run_members(_send, [receive] * 4)
    sender.result()
    assert all(_is_whole(receiver.result()) for receiver in receivers)
    assert connected == {1: True, 2: False, 3: True, 4: False}


@pytest.mark.parametrize("stalled", [1, 2], ids=["who_receives", "who_reads"])
def test_a_worker_that_stands_still_is_named(stalled: int) -> None:
    release = threading.Event()

    def stall(group: BroadcastGroup) -> None:
        for _ in receive_stream(group, _manifest()):
            release.wait(20)

    def send(group: BroadcastGroup) -> None:
        try:
            _send(group)
        finally:
            release.set()

    started = time.monotonic()
    parts = [stall if rank == stalled else _receive for rank in (1, 2, 3)]
    names = [f"worker {rank}" for rank in (1, 2, 3)]
    futures = run_members(send, parts, timeout_s=2.0, names=names)
    errors = [future.exception() for future in futures]
    assert all(isinstance(error, RefitError | WaitTimeoutError) for error in errors), errors
    # A reader that waits for the one that receives has said so since; it is no further than that one.
    assert f"worker {stalled}" in str(errors[0]) and "worker 3" not in str(errors[0])
    assert time.monotonic() - started < 15


@pytest.mark.parametrize("abandons", [False, True])
def test_readers_do_not_outlive_the_worker_that_receives(abandons: bool) -> None:
    def leave(group: BroadcastGroup) -> None:
        stream = receive_stream(group, _manifest())
        next(stream)
        if abandons:
            group.abandon("this one left")
        else:
            group.close()

    def send(group: BroadcastGroup) -> None:
        with pytest.raises(RefitError):
            _send(group)

    started = time.monotonic()
    futures = run_members(send, [leave, _receive])
    futures[0].result()
    assert isinstance(futures[2].exception(), RefitError)
    assert time.monotonic() - started < 10, "the limit of the group is 20 s"


def test_a_reader_that_fails_at_the_end_does_not_keep_the_one_that_receives() -> None:
    def fail(group: BroadcastGroup) -> None:
        for tensors in receive_stream(group, _manifest()):
            if tensors[0][0] == "layer_10":
                group.abandon("ValueError: the loader failed")
                return

    started = time.monotonic()
    sender, lending, failed, reading = run_members(_send, [_receive, fail, _receive])
    assert sender.exception() is None, "all bytes have left it"
    assert failed.exception() is None and _is_whole(reading.result())
    with pytest.raises(RefitError, match="abandoned by rank 2: ValueError: the loader failed"):
        lending.result()
    assert time.monotonic() - started < 10, "the limit of the group is 20 s"


def test_a_buffer_is_lent_until_all_have_read_it_and_few_are_at_once() -> None:
    lender = Lender(3)
    readers = [Reader(lender.address(), number=number) for number in (0, 2)]
    lender.begin([0, 2])
    buffers = [torch.full((10,), value, dtype=torch.uint8) for value in range(20)]
    given = 0
    while lender.has_room():
        lender.lend(buffers[given])
        given += 1
    assert given < 6 and not lender.has_all_back()
    into = torch.empty(10, dtype=torch.uint8)
    for index in range(20):
        for reader in readers:
            assert not lender.has_room() or given == 20
            assert reader.has(index) and not reader.has(given)
            reader.read(index, into)
            assert torch.equal(into, buffers[index])
        if given < 20:
            assert lender.has_room(), "the oldest has been read by both"
            lender.lend(buffers[given])
            given += 1
    assert lender.has_all_back()


def test_nothing_is_lent_where_nobody_reads() -> None:
    lender = Lender(1)
    lender.begin([])
    for _ in range(100):
        lender.lend(torch.zeros(3))
        assert lender.has_room() and lender.has_all_back()


def test_what_is_read_while_the_lender_leaves_does_not_count() -> None:
    lender = Lender(1)
    reader = Reader(lender.address(), number=0)
    lender.begin([0])
    lender.lend(torch.zeros(10, dtype=torch.uint8))
    assert reader.has(0)
    lender.close()
    with pytest.raises(OSError, match="has left"):
        reader.read(0, torch.empty(10, dtype=torch.uint8))


def test_a_lender_that_is_forgotten_lends_no_more() -> None:
    lender = Lender(1)
    reader = Reader(lender.address(), number=0)
    del lender
    with pytest.raises(OSError, match="has left"):
        reader.has(0)


def test_where_processes_cannot_be_told_apart_all_receive_by_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> str:
        raise FileNotFoundError("/proc/sys/kernel/random/boot_id")

    monkeypatch.setattr(relay.process_memory, "namespace", unknown)
    sender, *receivers = run_members(_send, [_receive] * 2)
    sender.result()
    assert all(_is_whole(receiver.result()) for receiver in receivers)


OTHER_PROCESS = """
import sys
import torch
from megatron_ppo.transport.relay import Lender
lender = Lender(1)
lender.begin([0])
print(lender.address(), flush=True)
for index in range(10):
    lender.lend(torch.full((100_000,), index, dtype=torch.int32))
    while not lender.has_room():
        pass
while not lender.has_all_back():
    pass
print("all back", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], Reader]]:
    """Another process that lends, and a reader of it."""
    process = subprocess.Popen(
        [sys.executable, "-c", OTHER_PROCESS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    yield process, Reader(process.stdout.readline(), number=0)
    process.communicate(timeout=20)


def _await(reader: Reader, index: int) -> None:
    deadline = time.monotonic() + 20
    while not reader.has(index):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_out_of_another_process(other: tuple[subprocess.Popen[str], Reader]) -> None:
    process, reader = other
    into = torch.empty(100_000, dtype=torch.int32)
    for index in range(10):
        _await(reader, index)
        reader.read(index, into)
        assert (into == index).all()
    assert process.stdout is not None
    assert process.stdout.readline() == "all back\n"


def test_a_killed_process_is_an_error(other: tuple[subprocess.Popen[str], Reader]) -> None:
    process, reader = other
    _await(reader, 0)
    process.kill()
    process.wait(timeout=20)
    with pytest.raises(OSError, match=f"memory of process {process.pid}"):
        reader.has(1)


def test_a_lender_of_another_host_is_refused() -> None:
    address = json.loads(Lender(1).address())
    with pytest.raises(OSError, match="another host"):
        Reader(json.dumps(address | {"namespace": "elsewhere"}), number=0)


def test_every_host_has_a_lender_of_its_own() -> None:
    def at(host: str) -> str:
        return json.dumps({"namespace": host, "process": 1, "table": 1})

    addresses = {1: at("a"), 2: at("b"), 3: at("a"), 4: "", 5: at("b"), 6: at("a"), 7: at("c")}
    assert lenders(addresses) == {3: 1, 5: 2, 6: 1}


def test_the_kernel_is_told_the_nearest_process_that_all_readers_come_from(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[int] = []
    monkeypatch.setattr(relay.process_memory, "let_process_in", told.append)
    sleepers = [subprocess.Popen(["sh", "-c", "sleep 60 & sleep 60"]) for _ in range(2)]
    try:
        deadline = time.monotonic() + 20
        while any(len(psutil.Process(each.pid).children()) < 2 for each in sleepers):
            assert time.monotonic() < deadline
        below = [[child.pid for child in psutil.Process(each.pid).children()] for each in sleepers]

        def let_in(*processes: int) -> None:
            Lender(1).let_in(
                [json.dumps({"namespace": "", "process": process, "table": 0}) for process in processes]
            )

        let_in(below[0][0])
        let_in(*below[0])
        let_in(below[0][0], below[1][0])
        assert told == [below[0][0], sleepers[0].pid, os.getpid()]
    finally:
        for sleeper in sleepers:
            for child in psutil.Process(sleeper.pid).children():
                child.kill()
            sleeper.kill()
            sleeper.wait(timeout=10)
    let_in(sleepers[0].pid)
    assert len(told) == 3, "a process that has ended is nobody"
