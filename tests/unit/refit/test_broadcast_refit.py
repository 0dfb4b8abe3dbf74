"""The refit over real gloo broadcasts: two trainer ranks as threads, engines that only receive."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.replicas import PausedEngines
from megatron_ppo.protocol.weights import RefitGroupSpec, TensorMeta, WeightManifest
from megatron_ppo.refit.broadcast import BroadcastRefit
from megatron_ppo.refit.recovery import RecoveringRefit
from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore
from megatron_ppo.transport.streams import receive_stream
from tests.weight_metadata import tensor_meta

CPU = torch.device("cpu")
TIMEOUT_S = 20.0


class Source:
    """Tensors that differ with `version`; counts how far each pass went. `fail_at` breaks the gather."""

    def __init__(self, *, surplus: int = 0) -> None:
        self.version = 0
        self.yielded: list[int] = []
        self.fail_at: int | None = None
        self._surplus = surplus

    def tensors(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.version)
        return {f"layer.{i}": torch.randn(i + 1, 30, generator=generator) for i in range(6)}

    def weight_metadata(self) -> tuple[TensorMeta, ...]:
        return tuple(tensor_meta(name, tensor) for name, tensor in self.tensors().items())

    def full_weights(self) -> Iterator[Tensor]:
        self.yielded.append(0)
        for position, tensor in enumerate([*self.tensors().values(), *[torch.zeros(1)] * self._surplus]):
            if position == self.fail_at:
                raise ValueError("the gather failed")
            self.yielded[-1] += 1
            yield tensor


class Calls:
    """`refit.fleet.PendingCalls` over futures."""

    def __init__(self, futures: list[Future[None]]) -> None:
        self._futures = futures

    def raise_if_failed(self) -> None:
        for future in self._futures:
            if future.done():
                future.result()

    def wait(self, *, timeout_s: float) -> None:
        for future in self._futures:
            future.result(timeout_s)


class Fleet:
    """Engines that receive over the real group, and refuse what a real engine would refuse."""

    made: ClassVar[list[Fleet]] = []

    def __init__(self, engines: int = 2) -> None:
        self.up = list(range(engines))
        self.slow: list[int] = []
        self.held: list[dict[str, Tensor]] = [{} for _ in range(engines)]
        self.calls: list[str] = []
        self.break_engine_at: int | None = None
        self.breaks_left = 10**6
        self.break_commit = False
        self.second_may_join = threading.Event()
        self.second_may_join.set()
        self._groups: dict[int, BroadcastGroup] = {}
        self._pool = ThreadPoolExecutor(2 * engines)
        self.made.append(self)

    def leave(self) -> None:
        self.second_may_join.set()
        for group in self._groups.values():
            group.close()
        self._pool.shutdown(wait=False)

    def muster(self, *, version: int) -> list[str]:
        return self._take_in([engine for engine in self.up if engine not in self.slow])

    def _take_in(self, engines: list[int]) -> list[str]:
        self.members = engines
        return [f"engine {index}" for index in engines]

    def join_refit_group(self, spec: RefitGroupSpec) -> Calls:
        self.calls.append(f"join {spec.generation}")
        assert spec.world_size == 1 + len(self.members)
        for group in self._groups.values():
            group.close()
        self._groups = {}

        def join(rank: int, engine: int) -> None:
            if engine == 1:
                self.second_may_join.wait(TIMEOUT_S)
            self._groups[engine] = BroadcastGroup(spec, rank=rank, device=CPU)

        ranks = range(spec.rank_offset, spec.world_size)
        return Calls(
            [self._pool.submit(join, rank, engine) for rank, engine in zip(ranks, self.members, strict=True)]
        )

    def begin_refit(self, *, mode: str, timeout_s: float, patience_s: float | None) -> PausedEngines:
        self.calls.append(f"begin {mode}")
        ready = [engine for engine in self.members if engine not in self.slow]
        assert patience_s is not None or not self.slow
        return PausedEngines(ready=self._take_in(ready), num_slow=len(self.slow))

    def receive_weights(self, manifest: WeightManifest) -> Calls:
        self.calls.append("receive")

        def receive(engine: int, group: BroadcastGroup) -> None:
            for position, tensors in enumerate(receive_stream(group, manifest)):
                if engine == 0 and position == self.break_engine_at and self.breaks_left:
                    self.breaks_left -= 1
                    raise RefitError("engine 0 is out of memory")
                self.held[engine] |= dict(tensors)

        assert sorted(self._groups) == self.members, "receive before join"
        return Calls([self._pool.submit(receive, i, group) for i, group in self._groups.items()])

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        self.calls.append(f"commit {version} recompute={recompute_kv}")
        if self.break_commit:
            raise RefitError("engine 1 cannot reset its cache")

    def end_refit(self, *, timeout_s: float) -> None:
        self.calls.append("end")


@pytest.fixture(autouse=True)
def leave_groups() -> Iterator[None]:
    """A group that the garbage collector finds blocks whichever thread it runs in, until its transfer times out."""
    yield
    while Fleet.made:
        Fleet.made.pop().leave()


class Meeting:
    """`refit.agreement` between threads."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._errors: dict[int, str | None] = {}

    def of(self, rank: int) -> Callable[[str | None], str | None]:
        def agree(error: str | None) -> str | None:
            self._errors[rank] = error
            self._barrier.wait(TIMEOUT_S)
            first = next((text for _, text in sorted(self._errors.items()) if text is not None), None)
            self._barrier.wait(TIMEOUT_S)
            return first

        return agree


class Ranks:
    """Two trainer ranks, each with its own view of the source."""

    def __init__(self, fleet: Fleet, *, timeout_s: float = TIMEOUT_S, **kwargs: object) -> None:
        meeting = Meeting(2)
        self.sources = [Source(), Source()]
        self.refits = [
            BroadcastRefit(
                source=self.sources[rank],
                sink=None if rank else fleet,
                store=None if rank else BroadcastStore(timeout_s=timeout_s),
                bucket_bytes=500,
                timeout_s=timeout_s,
                agree=meeting.of(rank),
                **kwargs,
            )
            for rank in range(2)
        ]

    def push(self, version: int) -> list[Future[object]]:
        for source in self.sources:
            source.version = version
        with ThreadPoolExecutor(2) as pool:
            return [pool.submit(refit.push, version=version) for refit in self.refits]


def _assert_holds(fleet: Fleet, source: Source) -> None:
    for held in fleet.held:
        assert list(held) == list(source.tensors())
        assert all(torch.equal(held[name], tensor) for name, tensor in source.tensors().items())


def test_every_engine_holds_the_sources_bits_after_every_push():
    fleet = Fleet()
    ranks = Ranks(fleet, in_flight=True, recompute_kv=True)
    for version in (1, 2):
        on_rank_0, on_rank_1 = (future.result() for future in ranks.push(version))
        _assert_holds(fleet, ranks.sources[0])
        assert on_rank_0["refit/bytes"] == sum(t.numel() * 4 for t in ranks.sources[0].tensors().values())
        assert on_rank_0["refit/total_s"] >= on_rank_0["refit/pause_s"] >= on_rank_0["refit/transfer_s"] > 0
        rate = on_rank_0["refit/bytes"] / 1e9 / on_rank_0["refit/transfer_s"]
        assert on_rank_0["refit/transfer_gb_per_s"] == pytest.approx(rate)
        assert on_rank_1 == {}
    assert fleet.calls == [
        "join 1",
        *["begin keep", "receive", "commit 1 recompute=True", "end"],
        *["begin keep", "receive", "commit 2 recompute=True", "end"],
    ]


def test_no_engine_is_asked_for_anything_before_every_trainer_rank_is_there():
    fleet = Fleet()
    mustered = threading.Event()
    muster = fleet.muster
    fleet.muster = lambda version: (mustered.set(), muster(version=version))[1]
    ranks = Ranks(fleet)
    for source in ranks.sources:
        source.version = 1
    with ThreadPoolExecutor(2) as pool:
        early = pool.submit(ranks.refits[0].push, version=1)
        # A push of this size is over after a hundredth of that time once both ranks are there.
        assert not mustered.wait(0.3)
        assert (fleet.calls, ranks.sources[0].yielded) == ([], [])
        late = pool.submit(ranks.refits[1].push, version=1)
        early.result(TIMEOUT_S)
        late.result(TIMEOUT_S)
    assert fleet.calls == ["join 1", "begin drain", "receive", "commit 1 recompute=False", "end"]


def test_without_in_flight_updates_the_engines_drain():
    fleet = Fleet()
    for future in Ranks(fleet).push(1):
        future.result()
    assert fleet.calls == ["join 1", "begin drain", "receive", "commit 1 recompute=False", "end"]


@pytest.mark.parametrize("bucket", [0, 1])
def test_an_engines_error_reaches_every_rank_at_once_and_every_rank_finishes_its_gathers(bucket: int):
    fleet = Fleet()
    fleet.break_engine_at = bucket
    ranks = Ranks(fleet)
    started = time.monotonic()
    for future in ranks.push(1):
        with pytest.raises(RefitError, match=r"version 1 failed while sending.*engine 0 is out of memory"):
            future.result()
    assert time.monotonic() - started < TIMEOUT_S / 2, "the error was noticed only by the timeout"
    assert [source.yielded for source in ranks.sources] == [[6], [6]]
    assert not any(call.startswith("commit") for call in fleet.calls)


def test_a_push_after_a_failed_one_forms_a_new_generation_and_repairs_the_engines():
    fleet = Fleet()
    fleet.break_engine_at = 1
    ranks = Ranks(fleet)
    for future in ranks.push(1):
        assert isinstance(future.exception(), RefitError)
    fleet.break_engine_at = None
    for future in ranks.push(2):
        future.result()
    assert [call for call in fleet.calls if call.startswith(("join", "commit"))] == [
        "join 1",
        "join 2",
        "commit 2 recompute=False",
    ]
    _assert_holds(fleet, ranks.sources[0])


def test_a_transfer_that_breaks_half_way_is_repeated_over_a_fresh_group_and_no_engine_went_on_before():
    fleet = Fleet()
    fleet.break_engine_at, fleet.breaks_left = 1, 1
    ranks = Ranks(fleet)
    meeting = Meeting(2)

    def of(rank: int) -> RecoveringRefit:
        def on_rank_zero(what: str, function: Callable[[], object]) -> object:
            """Nobody dies here, so both ranks know the answer to every question."""
            assert meeting.of(rank)(None) is None
            return 0

        return RecoveringRefit(
            refit=ranks.refits[rank],
            engines=None,
            raise_if_lost=lambda: None,
            max_retries=1,
            on_rank_zero=on_rank_zero,
        )

    for source in ranks.sources:
        source.version = 5
    with ThreadPoolExecutor(2) as pool:
        pushes = [pool.submit(of(rank).push, version=5) for rank in range(2)]
    assert [push.result()["refit/failed_attempts"] for push in pushes] == [1.0, 1.0]
    _assert_holds(fleet, ranks.sources[0])
    assert fleet.calls == [
        *["join 1", "begin drain", "receive"],
        *["join 2", "begin drain", "receive", "commit 5 recompute=False", "end"],
    ]


def test_an_engine_that_is_away_skips_versions_and_is_given_the_present_one_when_it_is_back():
    fleet = Fleet()
    ranks = Ranks(fleet)
    for version, up in ((1, [0, 1]), (2, [0]), (3, [0]), (4, [0, 1])):
        fleet.up = up
        for future in ranks.push(version):
            future.result()
        assert torch.equal(fleet.held[0]["layer.0"], ranks.sources[0].tensors()["layer.0"])
        if version == 3:
            ranks.sources[0].version = 1
            assert torch.equal(fleet.held[1]["layer.0"], ranks.sources[0].tensors()["layer.0"])
    _assert_holds(fleet, ranks.sources[1])
    assert [call for call in fleet.calls if call.startswith("join")] == ["join 1", "join 2", "join 3"]


def test_an_engine_that_is_slow_to_pause_skips_versions_and_is_given_the_one_of_the_time_when_it_has():
    """`slow` becomes true within the first push: the group has been formed with the engine, and is formed again."""
    fleet = Fleet()
    ranks = Ranks(fleet, straggler_patience_s=5.0)
    for version, slow in ((1, []), (2, [1]), (3, [1]), (4, [])):
        mustered = fleet.muster
        if version == 2:  # it is known to be slow only when it should have paused
            fleet.muster = lambda version: fleet._take_in([0, 1])  # type: ignore[method-assign]
        fleet.slow = slow
        on_rank_0, _ = (future.result() for future in ranks.push(version))
        fleet.muster = mustered  # type: ignore[method-assign]
        assert on_rank_0["refit/stragglers"] == len(slow)
        assert torch.equal(fleet.held[0]["layer.0"], ranks.sources[0].tensors()["layer.0"])
        ranks.sources[0].version = 1 if slow else version
        assert torch.equal(fleet.held[1]["layer.0"], ranks.sources[0].tensors()["layer.0"])
    _assert_holds(fleet, ranks.sources[1])
    assert [call for call in fleet.calls if call.startswith(("join", "begin"))] == [
        *["join 1", "begin drain"],
        *["begin drain", "join 2"],
        "begin drain",
        *["join 3", "begin drain"],
    ]


def test_no_engine_goes_on_while_another_could_not_switch():
    fleet = Fleet()
    fleet.break_commit = True
    ranks = Ranks(fleet)
    for future in ranks.push(1):
        with pytest.raises(RefitError, match=r"version 1 failed while switching.*cannot reset its cache"):
            future.result()
    assert "end" not in fleet.calls
    fleet.break_commit = False
    for future in ranks.push(1):
        future.result()
    assert fleet.calls[-2:] == ["commit 1 recompute=False", "end"]


def test_an_engine_that_joins_late_fails_the_refit_in_time_on_every_rank_and_is_in_the_next():
    fleet = Fleet()
    fleet.second_may_join.clear()
    ranks = Ranks(fleet, timeout_s=2.0)
    started = time.monotonic()
    for future in ranks.push(1):
        with pytest.raises(RefitError, match=r"while joining the refit group: .*missing engine 1"):
            future.result()
    assert time.monotonic() - started < TIMEOUT_S / 2, "the refit waited for the late engine"
    assert fleet.calls == ["join 1"], "the engines were not paused for a group that does not exist"
    fleet.second_may_join.set()
    for future in ranks.push(2):
        future.result()
    _assert_holds(fleet, ranks.sources[0])


def test_a_gather_that_fails_on_another_rank_fails_the_refit_on_rank_0():
    fleet = Fleet()
    ranks = Ranks(fleet)
    ranks.sources[1].fail_at = 3
    for future in ranks.push(1):
        with pytest.raises(RefitError, match="ValueError: the gather failed"):
            future.result()
    assert not any(call.startswith("commit") for call in fleet.calls)


def test_a_source_with_more_tensors_than_its_metadata_is_refused():
    fleet = Fleet()
    refit = BroadcastRefit(
        source=Source(surplus=2), sink=fleet, store=BroadcastStore(timeout_s=TIMEOUT_S), timeout_s=TIMEOUT_S
    )
    with pytest.raises(RefitError, match="2 more tensors than its metadata lists"):
        refit.push(version=1)


def test_rank_0_without_a_store_is_refused():
    with pytest.raises(ValueError, match="needs both sink and store"):
        BroadcastRefit(source=Source(), sink=Fleet(), store=None)
