"""What a refit needs of the engines. `ray_actors.inference_group.InferenceGroup` implements it; only rank 0
holds one.

Every method addresses all engines at once and concurrently: a broadcast moves only when every member is
inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from megatron_ppo.protocol.weights import RefitGroupSpec, WeightManifest


class PendingCalls(Protocol):
    """One running call per engine."""

    def raise_if_failed(self) -> None:
        """Return at once; raise the error of a call that has failed by now."""
        ...

    def wait(self, *, timeout_s: float) -> None:
        """Wait until all calls have returned. Raises: their error, or WaitTimeoutError."""
        ...


class EngineFleet(Protocol):
    """All engines that take part in a refit: those that were up at the last `muster`."""

    def muster(self) -> Sequence[str]:
        """Take in every engine that is up, after waiting for one if none is.

        Returns: one name per worker of these engines; with the trainer's rank 0 they are the broadcast group, in this
            order. An engine that was built again has another name than before, so equal names are an equal group.
        Raises: EngineDeadError when no engine comes up in time or ever.
        """
        ...

    def join_refit_group(self, spec: RefitGroupSpec) -> PendingCalls:
        """Let every engine join; `spec.rank_offset` is that of the first one."""
        ...

    def begin_refit(self, *, mode: Literal["drain", "keep"], timeout_s: float) -> None:
        """Stop sampling everywhere. Raises: RefitError, EngineDeadError, WaitTimeoutError."""
        ...

    def receive_weights(self, manifest: WeightManifest) -> PendingCalls:
        """Let every engine receive."""
        ...

    def commit_refit(self, *, version: int, recompute_kv: bool, timeout_s: float) -> None:
        """Make the received weights `version` everywhere; nobody serves yet. Raises: as `begin_refit`."""
        ...

    def end_refit(self, *, timeout_s: float) -> None:
        """Let requests in again everywhere. Raises: as `begin_refit`."""
        ...
