"""One refit: pause the engines, broadcast the policy's weights into them, stamp the version, let them go on.

No engine goes on before all that take part have the whole version, so a failure up to there leaves each of them paused.
Of a failure of the last call alone, the engines that did go on serve the whole new version. An engine that is slow to
pause takes no part: it serves nothing new, and a later push gives it the version of that time.

Implements `loop.ports.Refit`. All trainer ranks call `push` together: gathering full tensors is collective,
sending and steering the engines is rank 0's part.

Invariants: `push` returns on every rank only when every engine that takes part serves `version`, and raises on every
rank otherwise; no engine ever serves a mixture. Every rank iterates the weight source to its end in both cases: a rank
that stopped early would leave its peers in a gather. The sender holds `bucket_bytes` of staging memory and
what the source gathers at a time, see `transport.streams`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from megatron_ppo.loop.ports import Metrics, WeightSource
from megatron_ppo.protocol.errors import RefitError
from megatron_ppo.protocol.replicas import PausedEngines
from megatron_ppo.refit.agreement import Agree, single_rank
from megatron_ppo.refit.fleet import EngineFleet
from megatron_ppo.transport.broadcast_group import SENDER_RANK, BroadcastGroup, BroadcastStore
from megatron_ppo.transport.streams import manifest_for, send_stream

logger = logging.getLogger(__name__)


class BroadcastRefit:
    """Publishes over a `BroadcastGroup` of trainer rank 0 and all engine workers.

    Args:
        source: the policy's weights in the Hugging Face layout.
        sink: the engines; on rank 0 only, None elsewhere.
        store: the rendezvous, kept for the whole run; on rank 0 only, None elsewhere.
        device: where the weights are broadcast from: "cuda" with NCCL, "cpu" with gloo.
        bucket_bytes: staging memory of the sender; one broadcast carries a half of it, the other half is filled
            meanwhile. A larger tensor travels in pieces.
        verify_checksum: the engines compare a checksum of every tensor before they load it.
        in_flight: freeze running requests instead of letting them finish first.
        recompute_kv: frozen requests rebuild their key-value cache under the new weights.
        timeout_s: longest wait for the engines to pause, to receive one bucket, or to go on.
        straggler_patience_s: how long to wait for an engine to pause while others are ready; None waits for all.
        agree: collective over the trainer ranks, see `refit.agreement`.
    """

    def __init__(
        self,
        *,
        source: WeightSource,
        sink: EngineFleet | None,
        store: BroadcastStore | None,
        device: torch.device | str = "cpu",
        bucket_bytes: int = 32 * 2**20,
        verify_checksum: bool = False,
        in_flight: bool = False,
        recompute_kv: bool = False,
        timeout_s: float = 120.0,
        straggler_patience_s: float | None = None,
        agree: Agree = single_rank,
    ) -> None:
        if (sink is None) != (store is None):
            raise ValueError("rank 0 needs both sink and store, the other ranks neither")
        self._source = source
        self._sink = sink
        self._store = store
        self._device = torch.device(device)
        self._bucket_bytes = bucket_bytes
        self._verify_checksum = verify_checksum
        self._in_flight = in_flight
        self._recompute_kv = recompute_kv
        self._timeout_s = timeout_s
        self._straggler_patience_s = straggler_patience_s
        self._agree = agree
        self._group: BroadcastGroup | None = None
        self._members: tuple[str, ...] = ()
        self._paused = PausedEngines(ready=())
        self._generation = 0

    def push(self, *, version: int) -> Metrics:
        """Returns `refit/...` metrics on rank 0, nothing elsewhere. Raises: RefitError on every rank.

        `drain_s` is the wait for the engines to pause, `transfer_s` gathers, broadcasts and the engines' loading, which
        go on at the same time, `pause_s` how long no request was served, and `stragglers` how many engines are up
        and were not waited for.

        After a failure the engines stay paused, see above. A further `push` forms a new generation of the group and
        sends everything again, which repairs them. So does any push after an engine has died or has come back, and
        within a push the lateness of one: the group is always that of the engines that take part, and an engine that
        is being built, or is slow, skips the version. A push of the version that some engines serve already is for the
        others alone.
        """
        started = time.monotonic()
        self._together(version, "waiting for all trainer ranks", lambda: None)
        self._together(version, "joining the refit group", lambda: self._muster(version))
        joined = time.monotonic()
        self._together(version, "pausing the engines", self._pause)
        paused = time.monotonic()
        self._together(version, "joining the refit group of those that have paused", self._without_stragglers)
        ready = time.monotonic()
        self._together(version, "sending weights", self._send)
        sent = time.monotonic()
        self._together(version, "switching the engines to the new version", lambda: self._commit(version))
        self._together(version, "letting the engines go on", self._end)
        ended = time.monotonic()
        if self._sink is None:
            return {}
        num_bytes = sum(meta.num_bytes for meta in self._source.weight_metadata())
        return {
            "refit/drain_s": paused - joined,
            "refit/transfer_s": sent - ready,
            "refit/pause_s": ended - joined,
            "refit/total_s": ended - started,
            "refit/bytes": float(num_bytes),
            "refit/transfer_gb_per_s": num_bytes / 1e9 / (sent - ready),
            "refit/stragglers": float(self._paused.num_slow),
        }

    def close(self) -> None:
        """Leave the group."""
        if self._group is not None:
            self._group.close()
            self._group = None

    def _together(self, version: int, doing: str, action: Callable[[], None]) -> None:
        """Run `action` and fail on every rank when it failed on one."""
        cause: Exception | None = None
        try:
            action()
        except Exception as error:  # a process boundary: raised again below, on every rank
            cause = error
        failure = self._agree(None if cause is None else f"{type(cause).__name__}: {cause}")
        if failure is not None:
            if self._group is not None:
                self._group.abandon(failure)
                self._group = None
            raise RefitError(f"refit to version {version} failed while {doing}: {failure}") from cause

    def _muster(self, version: int) -> None:
        if self._sink is not None:
            self._join(self._sink, self._sink.muster(version=version))

    def _without_stragglers(self) -> None:
        if self._sink is not None:
            self._join(self._sink, self._paused.ready)

    def _join(self, sink: EngineFleet, receivers: Sequence[str]) -> None:
        names = tuple(receivers)
        assert self._store is not None, "rank 0 has both"
        if self._group is not None and names == self._members:
            return
        self.close()  # of the engines that are gone, or have come back, or are late
        self._generation += 1
        self._members = names
        spec = self._store.spec(
            generation=self._generation, rank_offset=SENDER_RANK + 1, world_size=1 + len(names)
        )
        joining = sink.join_refit_group(spec)
        self._group = BroadcastGroup(
            spec,
            rank=SENDER_RANK,
            device=self._device,
            store=self._store,
            receiver_names=names,
            check_peers=joining.raise_if_failed,
        )
        joining.wait(timeout_s=self._timeout_s)

    def _pause(self) -> None:
        if self._sink is not None:
            self._paused = self._sink.begin_refit(
                mode="keep" if self._in_flight else "drain",
                timeout_s=self._timeout_s,
                patience_s=self._straggler_patience_s,
            )

    def _send(self) -> None:
        tensors = iter(self._source.full_weights())
        try:
            if self._sink is not None and self._group is not None:
                self._send_buckets(self._sink, self._group, tensors)
        finally:
            # Also after a failure, and on the ranks that send nothing: the gathers are collective.
            surplus = sum(1 for _ in tensors)
        if self._sink is not None and surplus:
            raise RefitError(f"the weight source yielded {surplus} more tensors than its metadata lists")

    def _send_buckets(self, sink: EngineFleet, group: BroadcastGroup, tensors: Iterator[Tensor]) -> None:
        manifest = manifest_for(
            self._source.weight_metadata(),
            staging_bytes=self._bucket_bytes,
            verify_checksum=self._verify_checksum,
        )
        receiving = sink.receive_weights(manifest)
        send_stream(group, manifest, tensors, check_peers=receiving.raise_if_failed)
        receiving.wait(timeout_s=self._timeout_s)

    def _commit(self, version: int) -> None:
        if self._sink is not None:
            self._sink.commit_refit(
                version=version, recompute_kv=self._recompute_kv, timeout_s=self._timeout_s
            )

    def _end(self) -> None:
        if self._sink is not None:
            self._sink.end_refit(timeout_s=self._timeout_s)
