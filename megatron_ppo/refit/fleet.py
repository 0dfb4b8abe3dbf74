"""What a refit needs of the engines. `ray_actors.inference_group.InferenceGroup` implements it; only rank 0
holds one.

Every method addresses all engines of the refit at once and concurrently: a broadcast moves only when every member is
inside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from megatron_ppo.protocol.replicas import PausedEngines, PauseMode
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
    """The engines that take part in a refit: those of the last `muster`, and then those that have paused."""

    def muster(self, *, version: int) -> Sequence[str]:
        """Take in every engine that is up without `version` and not slow, after waiting for one that is up and not
        slow if none is. If all of these serve `version`, take them all.

        Returns: one name per worker of these engines; with the trainer's rank 0 they are the broadcast group, in this
            order. An engine that was built again has another name than before, so equal names are an equal group.
        Raises: EngineDeadError when no engine comes up in time or ever.
        """
        ...

    def join_refit_group(self, spec: RefitGroupSpec) -> PendingCalls:
        """Let every engine join; `spec.rank_offset` is that of the first one."""
        ...

    def begin_refit(
        self, *, mode: PauseMode, timeout_s: float, patience_s: float | None = None
    ) -> PausedEngines:
        """Stop sampling everywhere. Who has not after `patience_s` (None: wait for all) is slow and takes no part, if
        another one is ready by then; otherwise the first that is ready ends the wait.

        Raises: RefitError, EngineDeadError, WaitTimeoutError.
        """
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
