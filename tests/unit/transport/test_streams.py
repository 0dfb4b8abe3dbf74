"""A manifest over a real gloo group, its members as threads of this process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from benchmarks.peak_memory import broadcasts_release_at_once
from megatron_ppo.protocol.errors import RefitError, WaitTimeoutError
from megatron_ppo.protocol.weights import largest_layer_bytes
from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore, PendingBroadcast
from megatron_ppo.transport.streams import broadcast_sizes, manifest_for, receive_stream, send_stream
from tests.unit.transport.group_members import CPU, run_members
from tests.weight_metadata import tensor_meta

STAGING_BYTES = 2000
# Small ones share buckets of 1000 bytes; "large" and "last" exceed a bucket and travel in pieces, "transposed" travels
# alone but is not laid out as it travels.
SHAPES = {
    "a": (10, 3),
    "b": (20,),
    "large": (50, 30),
    "c": (7,),
    "d": (5, 11),
    "transposed": (22, 9),
    "last": (400,),
}


def _tensors() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tensors = {name: torch.randn(*shape, generator=generator) for name, shape in SHAPES.items()}
    return tensors | {"transposed": tensors["transposed"].t().contiguous().t()}


def _manifest(**kwargs: bool):
    metadata = tuple(tensor_meta(name, tensor) for name, tensor in _tensors().items())
    return manifest_for(metadata, staging_bytes=STAGING_BYTES, **kwargs)


def _receive_all(group: BroadcastGroup, *, verify_checksum: bool = False) -> dict[str, Tensor]:
    received: dict[str, Tensor] = {}
    for tensors in receive_stream(group, _manifest(verify_checksum=verify_checksum)):
        received |= dict(tensors)
    return received


@pytest.mark.parametrize("verify_checksum", [False, True])
def test_every_receiver_gets_every_tensor_bit_for_bit(verify_checksum: bool):
    manifest = _manifest(verify_checksum=verify_checksum)
    assert [len(bucket.tensors) for bucket in manifest.buckets()] == [2, 1, 2, 1, 1]
    futures = run_members(
        lambda group: send_stream(group, manifest, iter(_tensors().values())),
        [lambda group: _receive_all(group, verify_checksum=verify_checksum)] * 2,
    )
    futures[0].result()
    for future in futures[1:]:
        received = future.result()
        assert list(received) == list(SHAPES)
        assert all(torch.equal(received[name], tensor) for name, tensor in _tensors().items())


class _Recording(BroadcastGroup):
    """Counts the bytes that are on their way at once, and where they lie."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.moving: list[int] = []
        self.most = 0
        self.addresses: list[tuple[int, int]] = []

    def start(self, buffer: Tensor) -> PendingBroadcast:
        self.moving.append(buffer.numel())
        self.most = max(self.most, len(self.moving))
        self.addresses.append((buffer.data_ptr(), buffer.numel()))
        return super().start(buffer)

    def _finish(self, *args: object) -> None:
        super()._finish(*args)
        self.moving.pop(0)


def test_two_buffers_travel_at_once_small_tensors_from_staging_and_large_ones_from_where_they_lie():
    store = BroadcastStore(timeout_s=20)
    spec = store.spec(generation=1, rank_offset=1, world_size=2)
    source = _tensors()
    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(lambda: _receive_all(BroadcastGroup(spec, rank=1, device=CPU)))
        group = _Recording(spec, rank=0, device=CPU, store=store)
        send_stream(group, _manifest(), iter(source.values()))
        receiving.result(20)
    assert group.most == 2
    assert [size for _, size in group.addresses] == broadcast_sizes(_manifest())
    assert max(size for _, size in group.addresses) <= STAGING_BYTES // 2
    in_place = {
        source[name].data_ptr() + start
        for name in ("large", "last")
        for start in range(0, source[name].nbytes, STAGING_BYTES // 2)
    }
    travelled = {address for address, _ in group.addresses}
    assert in_place < travelled
    assert len(travelled - in_place) == 2, (
        "a and b, c and d, transposed: in the two halves of the staging memory"
    )


# Layers of 4400 bytes, whose matrices travel alone, between an embedding and a head that are larger than them.
LAYERS = {
    "model.embed": (1500,),
    **{
        f"model.layers.{n}.{part}": (size,)
        for n in range(3)
        for part, size in (("norm", 50), ("up", 350), ("down", 700))
    },
    "lm_head": (1600,),
}


@pytest.mark.parametrize("head", [(1600,), (10,)], ids=["large_head", "small_head"])
@pytest.mark.parametrize("embedding", [(1500,), (10,)], ids=["large_embedding", "small_embedding"])
def test_what_travels_and_what_is_made_next_are_no_larger_than_a_layer(
    embedding: tuple[int], head: tuple[int]
):
    shapes = LAYERS | {"model.embed": embedding, "lm_head": head}
    manifest = manifest_for(
        tuple(tensor_meta(name, torch.empty(shape)) for name, shape in shapes.items()),
        staging_bytes=STAGING_BYTES,
    )
    held: list[int] = []

    def made() -> Iterator[Tensor]:
        sources: list[tuple[weakref.ref[object], int]] = []
        for shape in shapes.values():
            tensor = torch.ones(shape)
            # What the sender alone still refers to; a view of it keeps the storage.
            held.append(tensor.nbytes + sum(size for storage, size in sources if storage() is not None))
            sources.append((weakref.ref(tensor.untyped_storage()), tensor.nbytes))
            yield tensor
            del tensor

    def receive(group: BroadcastGroup) -> None:
        for _ in receive_stream(group, manifest):
            pass

    def send(group: BroadcastGroup) -> None:
        with broadcasts_release_at_once():
            send_stream(group, manifest, made())

    sender, receiver = run_members(send, [receive])
    sender.result()
    receiver.result()
    assert len(held) == len(shapes)
    assert max(held) <= largest_layer_bytes(manifest.tensors), held
    # Beside small embeddings there is room for two matrices, and they do travel side by side.
    assert max(held[2:-1]) > 2800


def test_the_next_bucket_arrives_while_one_is_used():
    sent = threading.Event()

    def receive(group: BroadcastGroup) -> bool:
        stream = receive_stream(group, _manifest())
        next(stream)
        # The second bucket, and with it the first wait of the sender, needs no further step of this receiver.
        arrived = sent.wait(10)
        list(stream)
        return arrived

    def tensors() -> Iterator[Tensor]:
        for name, tensor in _tensors().items():
            if (
                name == "c"
            ):  # the first tensor of the bucket after "large", most of whose pieces were waited for
                sent.set()
            yield tensor

    futures = run_members(lambda group: send_stream(group, _manifest(), tensors()), [receive])
    futures[0].result()
    assert futures[1].result() is True


def test_a_bit_that_flips_on_the_way_is_found_before_it_is_loaded_and_names_the_tensor():
    class Flipping(BroadcastGroup):
        def start(self, buffer: Tensor) -> PendingBroadcast:
            buffer[-3] ^= 1 << 4
            return super().start(buffer)

    store = BroadcastStore(timeout_s=20)
    spec = store.spec(generation=1, rank_offset=1, world_size=2)
    seen: list[str] = []

    def receive() -> None:
        group = BroadcastGroup(spec, rank=1, device=CPU)
        for tensors in receive_stream(group, _manifest(verify_checksum=True)):
            seen.extend(name for name, _ in tensors)

    with ThreadPoolExecutor(1) as pool:
        receiving = pool.submit(receive)

        def check_peers() -> None:
            if receiving.done():
                receiving.result()

        group = Flipping(spec, rank=0, device=CPU, store=store)
        with pytest.raises(RefitError, match="tensor b arrived changed on refit group rank 1"):
            send_stream(
                group, _manifest(verify_checksum=True), iter(_tensors().values()), check_peers=check_peers
            )
        group.close()
    assert seen == []


def test_a_receiver_that_stalls_is_named_with_what_it_has_received():
    release = threading.Event()

    def stall(group: BroadcastGroup) -> None:
        for _ in receive_stream(group, _manifest()):
            release.wait(10)

    def send(group: BroadcastGroup) -> str:
        try:
            with pytest.raises((RefitError, WaitTimeoutError)) as caught:
                send_stream(group, _manifest(), iter(_tensors().values()))
            group.abandon("stalled")
            return str(caught.value)
        finally:
            release.set()

    started = time.monotonic()
    sender, stalled = run_members(send, [stall], timeout_s=1.0)
    assert "engine 0 received 1 buckets" in sender.result()
    assert isinstance(stalled.exception(), RefitError | WaitTimeoutError)
    assert time.monotonic() - started < 10


def test_a_receiver_that_is_not_there_is_named():
    store = BroadcastStore(timeout_s=1)
    spec = store.spec(generation=1, rank_offset=1, world_size=3)
    with ThreadPoolExecutor(1) as pool:
        present = pool.submit(lambda: BroadcastGroup(spec, rank=1, device=CPU))
        with pytest.raises(RefitError, match=r"missing engine 1$"):
            BroadcastGroup(spec, rank=0, device=CPU, store=store, receiver_names=["engine 0", "engine 1"])
        assert isinstance(present.exception(), RefitError)


def test_a_broken_connection_is_explained_by_the_error_of_the_receiver():
    ended = threading.Event()

    def leave(group: BroadcastGroup) -> None:
        stream = receive_stream(group, _manifest())
        next(stream)
        group.close()
        ended.set()

    looks: list[bool] = []

    def check_peers() -> None:
        looks.append(ended.is_set())
        # The cause is known only a while after the connection broke.
        if sum(looks) > 3:
            raise RefitError("engine 0: the core died")

    def send(group: BroadcastGroup) -> None:
        with pytest.raises(RefitError, match="the core died"):
            send_stream(group, _manifest(), iter(_tensors().values()), check_peers=check_peers)

    started = time.monotonic()
    run_members(send, [leave])[0].result()
    assert time.monotonic() - started < 15
