"""The broadcast group over gloo, its members as threads of this process."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch

from megatron_ppo.protocol.errors import EngineDeadError, RefitError, WaitTimeoutError
from megatron_ppo.protocol.weights import WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore
from megatron_ppo.transport.buckets import pack_bucket, views_of_bucket
from tests.unit.transport.group_members import CPU, run_members
from tests.weight_metadata import tensor_meta


def _receive(size: int) -> Callable[[BroadcastGroup], torch.Tensor]:
    def receive(group: BroadcastGroup) -> torch.Tensor:
        group.accept_manifest("same")
        buffer = torch.empty(size, dtype=torch.uint8)
        group.broadcast(buffer)
        return buffer

    return receive


def test_every_receiver_gets_the_senders_bytes_in_every_generation():
    store = BroadcastStore(timeout_s=20)
    for generation in (1, 2):
        payload = torch.arange(100, dtype=torch.uint8) + generation

        def send(group: BroadcastGroup, payload: torch.Tensor = payload) -> None:
            group.offer_manifest("same")
            group.broadcast(payload.clone())

        futures = run_members(send, [_receive(100)] * 2, store=store, generation=generation)
        assert all(torch.equal(future.result(), payload) for future in futures[1:])


def test_another_digest_is_an_error_on_both_sides_before_any_byte_moves():
    futures = run_members(
        lambda group: group.offer_manifest("mine"), [lambda group: group.accept_manifest("yours")] * 2
    )
    assert [type(future.exception()) for future in futures] == [RefitError] * 3
    assert "refused the manifest" in str(futures[0].exception())


def test_a_receiver_that_never_answers_is_a_timeout_that_says_what_was_waited_for():
    over = threading.Event()

    def offer(group: BroadcastGroup) -> None:
        try:
            group.offer_manifest("mine")
        finally:
            over.set()

    futures = run_members(offer, [lambda group: over.wait(20)], timeout_s=0.5)
    assert isinstance(futures[0].exception(), WaitTimeoutError)
    assert "all receivers to accept the manifest" in str(futures[0].exception())


def test_a_sender_that_never_sends_is_an_error_on_the_receiver():
    over = threading.Event()

    def receive(group: BroadcastGroup) -> None:
        try:
            group.broadcast(torch.empty(8))
        finally:
            over.set()

    futures = run_members(lambda group: over.wait(20), [receive], timeout_s=0.5)
    assert isinstance(futures[1].exception(), RefitError | WaitTimeoutError)


def test_a_known_failure_of_a_receiver_ends_the_senders_wait_at_once():
    def check_peers() -> None:
        raise RefitError("replica 1 is out of memory")

    def send(group: BroadcastGroup) -> float:
        started = time.monotonic()
        with pytest.raises(RefitError, match="out of memory"):
            group.offer_manifest("same", check_peers=check_peers)
        return time.monotonic() - started

    futures = run_members(send, [lambda group: None])
    assert futures[0].result() < 5, "the limit of the group is 20 s"


def test_members_that_do_not_arrive_are_an_error_within_the_timeout():
    store = BroadcastStore(timeout_s=1)
    started = time.monotonic()
    with pytest.raises(RefitError, match="generation 7 of 2 members"):
        spec = store.spec(generation=7, rank_offset=1, world_size=2)
        BroadcastGroup(spec, rank=0, device=CPU, store=store)
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("failed", [False, True])
def test_who_has_joined_does_not_wait_for_an_absent_member_longer_than_the_sender(failed: bool):
    """An engine core that waits in the old group could not join the next one, nor answer anything."""
    store = BroadcastStore(timeout_s=1.0 if not failed else 60.0)
    spec = store.spec(generation=3, rank_offset=1, world_size=3)
    receiving: list[Future[object]] = []

    def check_peers() -> None:
        if failed and store.tcp_store.check(["refit_3/joined/1"]):
            raise EngineDeadError("engine 2: its core was killed")

    with ThreadPoolExecutor(1) as pool:
        receiving.append(pool.submit(lambda: BroadcastGroup(spec, rank=1, device=CPU)))
        with pytest.raises(EngineDeadError if failed else RefitError, match="engine 2"):
            BroadcastGroup(
                spec,
                rank=0,
                device=CPU,
                store=store,
                receiver_names=["engine 1", "engine 2"],
                check_peers=check_peers,
            )
        ended = time.monotonic()
        assert isinstance(receiving[0].exception(timeout=30), RefitError)
        assert time.monotonic() - ended < 5
    assert "abandoned by rank 0" in str(receiving[0].exception()) or not failed
    groups = run_members(lambda group: None, [lambda group: None], store=store, generation=4)
    assert [future.exception() for future in groups] == [None, None]


def test_the_store_listens_on_its_own_address_only():
    store = BroadcastStore(host="127.0.0.1", timeout_s=5)
    # The whole of 127/8 is loopback, so another address of it reaches a listener bound to all interfaces.
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", store.port), timeout=1)
    socket.create_connection(("127.0.0.1", store.port), timeout=1).close()


def test_an_unknown_backend_is_named():
    store = BroadcastStore(backend="mpi", timeout_s=5)
    with pytest.raises(RefitError, match='got "mpi"'):
        BroadcastGroup(store.spec(generation=1, rank_offset=1, world_size=1), rank=0, device=CPU, store=store)


def test_packed_tensors_come_out_bit_for_bit():
    torch.manual_seed(0)
    tensors = {
        "a": torch.randn(3, 5),
        "b": torch.randn(7).to(torch.bfloat16),
        "c": torch.tensor(1.5),
        "d": torch.randn(11, 2).to(torch.float16).t(),
    }
    manifest = WeightManifest(
        tensors=tuple(tensor_meta(name, tensor) for name, tensor in tensors.items()), bucket_bytes=80
    )
    source = iter(tensors.values())
    received = {}
    for bucket in manifest.buckets():
        buffer = torch.empty(1000, dtype=torch.uint8)
        received |= dict(views_of_bucket(bucket, pack_bucket(bucket, source, buffer).clone()))
    assert list(received) == list(tensors)
    assert all(torch.equal(received[name], tensors[name]) for name in tensors)
    assert all(received[name].dtype == tensors[name].dtype for name in tensors)


@pytest.mark.parametrize(
    ("yielded", "message"),
    [
        ([], "ended before w"),
        ([torch.zeros(2, 3)], r"its metadata says float32 \(3, 2\)"),
        ([torch.zeros(3, 2, dtype=torch.float16)], "yielded w as torch.float16"),
    ],
)
def test_a_source_that_disagrees_with_its_metadata_is_named(yielded: list[torch.Tensor], message: str):
    manifest = WeightManifest(tensors=(tensor_meta("w", torch.zeros(3, 2)),), bucket_bytes=80)
    [bucket] = manifest.buckets()
    with pytest.raises(RefitError, match=message):
        pack_bucket(bucket, iter(yielded), torch.empty(100, dtype=torch.uint8))
