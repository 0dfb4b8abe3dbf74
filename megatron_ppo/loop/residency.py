"""Who is on the training GPUs, and with what: policy and critic share them, so each is loaded for its own phases only.

Owns the schedule of loading and offloading parameters, gradients and optimizer state. Driven by the training loop (one
context manager per phase), by the building of the models and by the checkpoints; `Movable` does the moving. Pure: it
imports no torch, so the tests drive it with a device that only takes notes.

Invariants, kept in every phase and on every exception:
    one model at most is resident;
    whatever is loaded is offloaded again, at the latest when the step ends;
    nothing is resident between steps.

| phase | resident, with |
|---|---|
| a model was built | that model, with everything; then nothing |
| scoring | one model: parameters |
| training | one model: parameters, gradients, optimizer; the policy stays after a step's last epoch |
| publishing (and its probe) | the policy: parameters |
| saving | one model after the other: parameters, optimizer |
| restoring | one model after the other: everything |

Where nothing has to move (a CPU), the models are `STATIONARY`: the same schedule runs, is checked and moves nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Protocol

from megatron_ppo.protocol.errors import MegatronPPOError


class Part(StrEnum):
    """What a model consists of on a device."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer"


class Model(StrEnum):
    """Who shares the device. The reference is the frozen copy of the policy's initial weights."""

    POLICY = "policy"
    CRITIC = "critic"
    REFERENCE = "reference"


Parts = frozenset[Part]
EVERYTHING: Parts = frozenset(Part)
WEIGHTS: Parts = frozenset({Part.PARAMETERS})
STATE: Parts = frozenset({Part.PARAMETERS, Part.OPTIMIZER})


class ResidencyError(MegatronPPOError):
    """The schedule was broken: two models at once, or one that was left behind. A bug of the caller."""


class Movable(Protocol):
    """A model whose parts can leave the device and come back."""

    def load(self, parts: Parts) -> None:
        """Bring `parts`, which are off, to the device. Gradients come back as zeros."""
        ...

    def offload(self, parts: Parts, *, after_failure: bool = False) -> None:
        """Free the device's memory of `parts`; of those that are off already, or half loaded, as well.

        All ranks offload together, except `after_failure`, when the others may be anywhere: nothing is collective then.
        """
        ...


class _Stationary:
    def load(self, parts: Parts) -> None:
        """Everything is where it always is."""

    def offload(self, parts: Parts, *, after_failure: bool = False) -> None:
        """There is nowhere else to be."""


STATIONARY: Movable = _Stationary()


class Residency:
    """The schedule over the models of one rank. All ranks run the same one.

    Args:
        models: the movable ones, none of them resident; the others are stationary. `built` adds further ones.

    A checkpoint that is still being written reads nothing here: it was copied to host memory while its model was
    being `saving`.
    """

    def __init__(self, models: Mapping[Model, Movable] | None = None) -> None:
        self._models = dict(models or {})
        self._resident: dict[Model, Parts] = {}
        self._phase: str | None = None

    @property
    def resident(self) -> Mapping[Model, Parts]:
        """What is on the device now; empty between steps. A load that failed counts until its offload."""
        return dict(self._resident)

    @property
    def moves(self) -> bool:
        """Whether anything ever leaves the device."""
        return any(movable is not STATIONARY for movable in self._models.values())

    def built(self, model: Model, movable: Movable) -> None:
        """`movable` has just been built, on the device with everything; it makes room for the next one.

        Raises: ResidencyError if it was built before, or while another one is resident.
        """
        if model in self._models:
            raise ResidencyError(f"the {model} was built twice")
        self._require_nothing_resident(f"the {model} was built")
        self._models[model] = movable
        self._resident[model] = EVERYTHING
        self._offload(model, EVERYTHING)

    @contextmanager
    def step(self, what: str) -> Iterator[None]:
        """A step, or whatever publishes and trains like one; nothing is resident before and after it.

        Raises: ResidencyError if something is; after an exception everything is offloaded and the exception goes on.
        """
        self._require_nothing_resident(f"{what} begins")
        try:
            yield
        except BaseException as error:
            self._offload_everything_after(error)
            raise
        self._require_nothing_resident(f"{what} has ended")

    @contextmanager
    def scoring(self, model: Model) -> Iterator[None]:
        """A forward-only pass."""
        with self._during(f"scoring with the {model}", model, WEIGHTS):
            yield

    @contextmanager
    def training(self, model: Model, *, stays: bool = False) -> Iterator[None]:
        """An epoch of updates. With `stays` the model is still there afterwards, for the phase that follows."""
        with self._during(f"training the {model}", model, EVERYTHING, stays=stays):
            yield

    @contextmanager
    def publishing(self) -> Iterator[None]:
        """The policy's weights are read by the refit and by its probe."""
        with self._during("publishing the policy", Model.POLICY, WEIGHTS):
            yield

    @contextmanager
    def saving(self, model: Model) -> Iterator[None]:
        """The state of one model is read by a checkpoint."""
        with self._during(f"saving the {model}", model, STATE):
            yield

    @contextmanager
    def restoring(self, model: Model) -> Iterator[None]:
        """The state of one model is overwritten from a checkpoint."""
        with self._during(f"restoring the {model}", model, EVERYTHING):
            yield

    @contextmanager
    def _during(self, phase: str, model: Model, parts: Parts, *, stays: bool = False) -> Iterator[None]:
        if self._phase is not None:
            raise ResidencyError(f"{phase} begins during {self._phase}")
        self._phase = phase
        try:
            self._hold(phase, model, parts)
            yield
            if not stays:
                self._offload(model, self._resident[model])
        except BaseException as error:
            self._offload_everything_after(error)
            raise
        finally:
            self._phase = None

    def _hold(self, phase: str, model: Model, parts: Parts) -> None:
        """Exactly `parts` of `model` are resident afterwards; what is too much goes before anything comes."""
        if others := [other for other in self._resident if other is not model]:
            raise ResidencyError(f"{phase} begins while the {others[0]} is on the device")
        present = self._resident.get(model, frozenset())
        if surplus := present - parts:
            self._offload(model, surplus)
        if missing := parts - present:
            # Counted first: of a load that fails half-way, something may be there.
            self._resident[model] = parts
            self._movable(model).load(missing)

    def _offload(self, model: Model, parts: Parts, *, after_failure: bool = False) -> None:
        self._movable(model).offload(parts, after_failure=after_failure)
        left = self._resident[model] - parts
        if left:
            self._resident[model] = left
        else:
            del self._resident[model]

    def _offload_everything_after(self, error: BaseException) -> None:
        """Nothing may stay behind, and the first error is the one to report."""
        for model, parts in self.resident.items():
            try:
                self._offload(model, parts, after_failure=True)
            except Exception as another:  # it stays counted as resident, so nothing else will be loaded
                error.add_note(
                    f"and then the {model} could not leave the device: {type(another).__name__}: {another}"
                )

    def _require_nothing_resident(self, when: str) -> None:
        if self._resident:
            seen = "; ".join(
                f"{model}: {', '.join(sorted(parts))}" for model, parts in self._resident.items()
            )
            raise ResidencyError(f"{when} while something is on the device ({seen})")

    def _movable(self, model: Model) -> Movable:
        return self._models.get(model, STATIONARY)
