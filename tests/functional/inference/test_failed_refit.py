"""A refit that fails: both sides learn why, the engine serves nothing, the next complete refit repairs it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from megatron_ppo.protocol.errors import GenerationError, RefitError
from megatron_ppo.protocol.weights import WeightManifest
from megatron_ppo.transport.broadcast_group import BroadcastGroup, BroadcastStore, PendingBroadcast
from tests.functional.inference.hf_oracle import BUCKET_BYTES, TOLERANCE_NATS, HfSource, worst_difference

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig

pytestmark = [pytest.mark.vllm]


def _assert_paused(rig: EngineRig) -> None:
    assert rig.loop.run(rig.engine.health()).paused
    with pytest.raises(GenerationError, match="closed by a refit"):
        rig.generate([1, 2, 3], deadline_s=0.2)


def _assert_serves(rig: EngineRig, model: object, version: int) -> None:
    [completion] = rig.generate([3, 4, 5], max_new_tokens=30)
    assert worst_difference(model, [3, 4, 5], completion, version) < TOLERANCE_NATS


class _Failing:
    """A source whose gather fails after `good` tensors."""

    def __init__(self, source: object, good: int) -> None:
        self._source = source
        self._good = good

    def weight_metadata(self):
        return self._source.weight_metadata()

    def full_weights(self) -> Iterator[object]:
        for position, tensor in enumerate(self._source.full_weights()):
            if position == self._good:
                raise ValueError("the gather failed")
            yield tensor


class _Partial:
    """A source that leaves out the tensors whose name contains `without`."""

    def __init__(self, source: object, without: str) -> None:
        self._source = source
        self._without = without

    def weight_metadata(self):
        return tuple(meta for meta in self._source.weight_metadata() if self._without not in meta.name)

    def full_weights(self) -> Iterator[object]:
        for meta, tensor in zip(self._source.weight_metadata(), self._source.full_weights(), strict=True):
            if self._without not in meta.name:
                yield tensor


def test_different_manifests_are_an_error_on_both_sides_and_abort_nothing(rig: EngineRig):
    seen = []
    rig.fleet.tell = lambda manifest: replace(manifest, bucket_bytes=manifest.bucket_bytes // 2)
    receive = rig.fleet.receive_weights
    rig.fleet.receive_weights = lambda manifest: seen.append(receive(manifest)) or seen[0]
    try:
        with rig.refit(HfSource(rig.models[1])) as refit, pytest.raises(RefitError, match="digest"):
            refit.push(version=rig.version + 1)
        with pytest.raises(RefitError, match="digest"):
            seen[0].wait(timeout_s=10)
    finally:
        rig.fleet.tell = lambda manifest: manifest
        del rig.fleet.receive_weights
    _assert_paused(rig)
    _assert_serves(rig, rig.models[1], rig.publish(rig.models[1]))


def test_a_sender_that_never_comes_times_out_and_a_full_refit_repairs_the_engine(rig: EngineRig):
    [frozen] = [rig.begin([1, 2, 3], max_new_tokens=200)]
    time.sleep(0.3)
    rig.loop.run(rig.engine.begin_refit(mode="keep", timeout_s=10))
    store = BroadcastStore(timeout_s=2)
    spec = store.spec(generation=1, rank_offset=1, world_size=2)
    joining = rig.loop.start(rig.engine.join_refit_group(spec))
    group = BroadcastGroup(spec, rank=0, device=torch.device("cpu"), store=store)
    joining.result(10)
    manifest = WeightManifest(tensors=HfSource(rig.models[1]).weight_metadata(), bucket_bytes=BUCKET_BYTES)
    started = time.monotonic()
    with pytest.raises(RefitError, match="sender's manifest digest"):
        rig.loop.run(rig.engine.receive_weights(manifest))
    assert time.monotonic() - started < 10
    group.close()
    _assert_paused(rig)
    with pytest.raises(RefitError, match="has not arrived completely"):
        rig.loop.run(rig.engine.commit_refit(version=rig.version + 1, recompute_kv=True))
    with pytest.raises(RefitError, match="no version was committed"):
        rig.loop.run(rig.engine.end_refit())
    version = rig.publish(rig.models[1], in_flight=True, recompute_kv=True)
    [completion] = frozen.result(60)
    assert len(completion.token_ids) == 200 and completion.spans[-1].version == version
    _assert_serves(rig, rig.models[1], version)


@pytest.mark.parametrize("good", [1, pytest.param(9, marks=pytest.mark.slow), 20])
def test_a_transfer_that_breaks_half_way_is_repaired_by_the_next(rig: EngineRig, good: int):
    rig.publish(rig.models[0])
    with (
        rig.refit(_Failing(HfSource(rig.models[1]), good), timeout_s=10) as refit,
        pytest.raises(RefitError, match="the gather failed"),
    ):
        refit.push(version=rig.version + 1)
    _assert_paused(rig)
    _assert_serves(rig, rig.models[0], rig.publish(rig.models[0]))


@pytest.mark.parametrize(
    ("without", "expected"),
    [
        ("model.norm.weight", "model.norm.weight"),
        ("layers.1.self_attn.k_proj", "layers.1.self_attn.qkv_proj"),
    ],
)
def test_a_manifest_without_some_parameters_is_refused_and_named(rig: EngineRig, without: str, expected: str):
    with (
        rig.refit(_Partial(HfSource(rig.models[1]), without)) as refit,
        pytest.raises(RefitError, match=expected),
    ):
        refit.push(version=rig.version + 1)
    _assert_paused(rig)
    _assert_serves(rig, rig.models[1], rig.publish(rig.models[1]))


def test_a_bit_that_flips_on_the_way_is_found_and_nothing_is_served_before_the_next_refit(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
):
    start = BroadcastGroup.start

    def flipping(group: BroadcastGroup, buffer: torch.Tensor) -> PendingBroadcast:
        if group.rank == 0:
            buffer = buffer.clone()
            buffer[7] ^= 1
        return start(group, buffer)

    with rig.refit(HfSource(rig.models[1]), verify_checksum=True) as refit:
        with monkeypatch.context() as patch:
            patch.setattr(BroadcastGroup, "start", flipping)
            with pytest.raises(RefitError, match=r"tensor model\.embed_tokens\.weight arrived changed"):
                refit.push(version=rig.version + 1)
        _assert_paused(rig)
        rig.version += 1
        refit.push(version=rig.version)
    _assert_serves(rig, rig.models[1], rig.version)


@pytest.mark.parametrize("rig", ["untied"], indirect=True)
def test_a_head_of_its_own_that_does_not_come_is_named_and_comes_with_the_next_refit(rig: EngineRig):
    with (
        rig.refit(_Partial(HfSource(rig.models[1]), "lm_head.weight")) as refit,
        pytest.raises(RefitError, match="lm_head"),
    ):
        refit.push(version=rig.version + 1)
    _assert_paused(rig)
    _assert_serves(rig, rig.models[1], rig.publish(rig.models[1]))
