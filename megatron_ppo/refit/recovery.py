"""A refit, and a validation, that outlive the death of engines and a failure of the transfer.

Implements `loop.ports.Refit` and `loop.ports.Validator` around the real ones. Driven by the training loop on all ranks
together; rank 0 knows the state of the engines, and every decision is its decision, shared.

Invariant: `push` and `refresh` return only when every engine that is up serves the version, and at least one does. An
engine that is still being built skips it and waits, without serving, for the next one or for `refresh`.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron_ppo.loop.ports import Metrics, Refit, Validator
from megatron_ppo.loop.validation import OnRankZero
from megatron_ppo.protocol.errors import EngineDeadError, RefitError, WeightMismatchError
from megatron_ppo.protocol.replicas import ReplicaTable

logger = logging.getLogger(__name__)

T = TypeVar("T")
NEWS_S = 2.0
"""A broken transfer may be seen earlier than the death that broke it: how long to wait for the news."""
LOOK_S = 0.5
"""How often the wait for an engine that is being built looks for what makes the wait useless."""
_LOOKS_A_TURN = 20
"""After which all ranks hear that rank 0 still waits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Died:
    reason: str


def sharing_deaths(on_rank_zero: OnRankZero[Any]) -> OnRankZero[Any]:
    """`on_rank_zero` whose EngineDeadError is one on every rank, so that all of them can recover together."""

    def run(what: str, function: Callable[[], T]) -> T:
        def guarded() -> T | _Died:
            try:
                return function()
            except EngineDeadError as error:
                return _Died(reason=str(error))

        outcome = on_rank_zero(what, guarded)
        if isinstance(outcome, _Died):
            raise EngineDeadError(outcome.reason)
        return outcome  # type: ignore[no-any-return]

    return run


class RecoveringRefit:
    """Pushes again after a failure, over a new generation of the group.

    Args:
        refit: the real one; EngineDeadError and RefitError must be raised on all ranks or on none.
        engines: their states; on rank 0 only, None elsewhere.
        raise_if_lost: called on rank 0, also while no engine is up; raises PartDiedError when an engine died that will
            not be built again, or, with no engine up, when anything else has died that ends the run.
        end_silent: called on rank 0 after a failure that no death explains: ends the engines that hang, whose deaths
            it tells `engines`.
        max_retries: further attempts of one push whose failure was not an engine's death. Deaths are limited by the
            restarts that `engines` allows.
        on_rank_zero: runs a function on rank 0 and gives every rank its result, or its error.
        publishing: brings the policy's weights to where they are sent from; for `refresh`, which comes by itself.
    """

    def __init__(
        self,
        *,
        refit: Refit,
        engines: ReplicaTable | None,
        raise_if_lost: Callable[[], None],
        max_retries: int,
        on_rank_zero: OnRankZero[Any],
        end_silent: Callable[[], None] = lambda: None,
        publishing: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._refit = refit
        self._engines = engines
        self._raise_if_lost = raise_if_lost
        self._end_silent = end_silent
        self._max_retries = max_retries
        self._on_rank_zero = on_rank_zero
        self._publishing = publishing
        self._version: int | None = None

    def push(self, *, version: int) -> Metrics:
        """As the real one; adds `refit/failed_attempts`.

        Raises: WeightMismatchError at once; the last RefitError after `max_retries`; PartDiedError when an engine died
            that will not be built again.
        """
        self._version = version
        failures, attempts = 0, 0
        while True:
            deaths = self._deaths_before(version)
            try:
                metrics = self._refit.push(version=version)
            except WeightMismatchError:
                raise
            except (RefitError, EngineDeadError) as error:
                attempts += 1
                if self._deaths_after(deaths) == deaths:
                    failures += 1
                    if failures > self._max_retries:
                        if isinstance(error, RefitError):
                            raise
                        raise RefitError(f"version {version} could not be published: {error}") from error
                logger.warning("the publication of version %d is tried again: %s", version, error)
            else:
                return {**metrics, "refit/failed_attempts": float(attempts)}

    def refresh(self) -> bool:
        """Push the last version again if an engine is up without it; whether there was one.

        Only while the policy still has the weights of that version: not after its next update has begun.
        """
        if self._version is None or not self._ask("a look at the engines", self._lacks_weights):
            return False
        self.repeat()
        return True

    def repeat(self) -> None:
        """Push the last version again; the limits and errors are those of `push`."""
        if self._version is None:
            raise RefitError("nothing has been published yet, so there is nothing to repeat")
        logger.info("version %d is published again, for engines that came back", self._version)
        with self._publishing():
            self.push(version=self._version)

    def _deaths_after(self, deaths: int) -> int:
        def count() -> int:
            engines = self._known()
            engines.wait_for_news(deaths=deaths, timeout_s=NEWS_S)
            if engines.deaths == deaths:
                self._end_silent()
            self._raise_if_lost()
            return engines.deaths

        return self._ask("the state of the engines", count)

    def _deaths_before(self, version: int) -> int:
        """Returns on every rank once an engine is up that is not slow: how many had died by then.

        In turns, because several rebuilds may take longer than ranks wait for each other.
        """
        while (
            deaths := self._ask("an engine to publish to", lambda: self._look_for_engine(version))
        ) is None:
            pass
        return deaths

    def _look_for_engine(self, version: int) -> int | None:
        """None if no engine came up within a turn."""
        # Here and not in the real refit alone: where the machine under the engines is gone, none will ever be built,
        # and only the deaths of its other processes say so. What a rebuild may take is limited by whoever builds.
        engines = self._known()
        self._raise_if_lost()
        for _ in range(_LOOKS_A_TURN):
            if engines.wait_for(lambda: bool(engines.lacking(version)), timeout_s=LOOK_S):
                return engines.deaths
            self._raise_if_lost()
        return None

    def _lacks_weights(self) -> bool:
        return self._known().lacks_weights

    def _known(self) -> ReplicaTable:
        assert self._engines is not None, "only rank 0 knows the engines"
        return self._engines

    def _ask(self, what: str, function: Callable[[], T]) -> T:
        return self._on_rank_zero(what, function)  # type: ignore[no-any-return]


class RecoveringValidator:
    """Validates again when the last engine that served has died meanwhile. Seeds make it the same validation.

    Args:
        validator: the real one; its EngineDeadError must be raised on all ranks or on none.
        repeat: publishes the current version to the engines that are up, see `RecoveringRefit.repeat`.
    """

    def __init__(self, *, validator: Validator, repeat: Callable[[], None]) -> None:
        self._validator = validator
        self._repeat = repeat

    def run(self, *, step: int) -> Metrics:
        """As the real one."""
        while True:
            try:
                return self._validator.run(step=step)
            except EngineDeadError as error:
                logger.warning("the validation after step %d is repeated: %s", step, error)
                self._repeat()
