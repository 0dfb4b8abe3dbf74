"""A device that takes notes: it moves nothing, knows what is on it, and fails where it is told to.

Every part of a fake run is put on it (`on_device`): a model that is used while it is off, or a second model beside a
first one is an AssertionError in the moment it happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.checkpoints import BackgroundSave, ModelStore
from megatron_ppo.loop.ports import Critic, Policy, Refit
from megatron_ppo.loop.residency import EVERYTHING, STATE, WEIGHTS, Model, Parts, Residency
from tests.unit.loop.fake_run import FakeRun


class Fault(Exception):
    """What the device was told to raise."""


class Device:
    """The notes.

    Args:
        fault_at: number of the operation (a move, or a use) that raises; None is none.
        stuck: whether the same move of the same model fails for ever after.

    Attributes:
        moves: ("load" or "offload", model, parts), in order, of those that succeeded.
        notes: every move and every use, in words.
        left_alone: models that left without waiting for the other ranks.
    """

    def __init__(self, *, fault_at: int | None = None, stuck: bool = False) -> None:
        self.fault_at = fault_at
        self.stuck = stuck
        self.on: dict[Model, Parts] = {}
        self.moves: list[tuple[str, Model, Parts]] = []
        self.notes: list[str] = []
        self.faults: list[str] = []
        self.left_alone: set[Model] = set()

    def operation(self, note: str) -> None:
        """One thing that can fail."""
        self.notes.append(note)
        again = self.stuck and self.faults and note.split(":")[0] == self.faults[0].split(":")[0]
        if len(self.notes) - 1 == self.fault_at or again:
            self.faults.append(note)
            raise Fault(note)

    def movable(self, model: Model) -> Recorded:
        """The port of one model."""
        return Recorded(self, model)

    def use(self, model: Model, parts: Parts, what: str) -> None:
        """`what` needs exactly `parts` of `model`."""
        assert self.on == {model: parts}, f"{what} while on the device are {self.on}"
        self.operation(what)


class Recorded:
    """`Movable` of one model on a `Device`."""

    def __init__(self, device: Device, model: Model) -> None:
        self._device = device
        self._model = model

    def load(self, parts: Parts) -> None:
        """See `Movable.load`. A load that fails leaves a part behind."""
        device, model = self._device, self._model
        assert not set(device.on) - {model}, f"the {model} comes beside {device.on}"
        present = device.on.get(model, frozenset())
        assert parts and not parts & present, f"{parts & present} of the {model} are loaded twice"
        device.on[model] = present | {min(parts)}
        device.operation(f"load {model}: {','.join(sorted(parts))}")
        device.on[model] = present | parts
        device.moves.append(("load", model, parts))

    def offload(self, parts: Parts, *, after_failure: bool = False) -> None:
        """See `Movable.offload`. One that fails leaves everything where it was."""
        device, model = self._device, self._model
        assert after_failure or not device.faults, f"the {model} leaves collectively after a failure"
        device.left_alone |= {model} if after_failure else set()
        device.operation(f"offload {model}: {','.join(sorted(parts))}")
        left = device.on.get(model, frozenset()) - parts
        device.on.pop(model, None)
        if left:
            device.on[model] = left
        device.moves.append(("offload", model, parts))


class PolicyOn:
    """`Policy` that must be on the device."""

    def __init__(self, policy: Policy, device: Device) -> None:
        self._policy = policy
        self._device = device

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        """See `Policy.logprobs`."""
        self._device.use(Model.POLICY, WEIGHTS, "log-probs")
        return self._policy.logprobs(batch, temperature=temperature)

    def reference_logprobs(self, batch: TrainBatch) -> Tensor:
        """See `Policy.reference_logprobs`."""
        self._device.use(Model.REFERENCE, WEIGHTS, "reference log-probs")
        return self._policy.reference_logprobs(batch)

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Policy.update`."""
        self._device.use(Model.POLICY, EVERYTHING, "policy update")
        return self._policy.update(minibatches)


class CriticOn:
    """`Critic` that must be on the device."""

    def __init__(self, critic: Critic, device: Device) -> None:
        self._critic = critic
        self._device = device

    def values(self, batch: TrainBatch) -> Tensor:
        """See `Critic.values`."""
        self._device.use(Model.CRITIC, WEIGHTS, "values")
        return self._critic.values(batch)

    def update(self, minibatches: Sequence[TrainBatch]) -> Mapping[str, float]:
        """See `Critic.update`."""
        self._device.use(Model.CRITIC, EVERYTHING, "critic update")
        return self._critic.update(minibatches)


class RefitOn:
    """`Refit` that reads the policy's weights from the device."""

    def __init__(self, refit: Refit, device: Device) -> None:
        self._refit = refit
        self._device = device

    def push(self, *, version: int) -> Mapping[str, float]:
        """See `Refit.push`."""
        self._device.use(Model.POLICY, WEIGHTS, "publish")
        return self._refit.push(version=version)


class StoreOn:
    """`ModelStore` that reads and writes both models on the device, one after the other."""

    def __init__(self, store: ModelStore, device: Device, residency: Residency) -> None:
        self._store = store
        self._device = device
        self._residency = residency

    def save(self, folder: Path) -> None:
        """See `ModelStore.save`."""
        self._read()
        self._store.save(folder)

    def begin_save(self, folder: Path) -> BackgroundSave:
        """See `ModelStore.begin_save`."""
        self._read()
        return self._store.begin_save(folder)

    def _read(self) -> None:
        for model in (Model.POLICY, Model.CRITIC):
            with self._residency.saving(model):
                self._device.use(model, STATE, f"save {model}")

    def load(self, folder: Path) -> None:
        """See `ModelStore.load`."""
        for model in (Model.POLICY, Model.CRITIC):
            with self._residency.restoring(model):
                self._device.use(model, EVERYTHING, f"restore {model}")
        self._store.load(folder)


def on_device(device: Device, make_run: Callable[[Callable[[ModelStore], ModelStore]], FakeRun]) -> FakeRun:
    """A fake run whose models share `device`.

    Args:
        make_run: given what wraps the store of the models.
    """
    residency = Residency()
    run = make_run(lambda store: StoreOn(store, device, residency))
    for model in (Model.POLICY, Model.REFERENCE, Model.CRITIC):
        device.on[model] = EVERYTHING  # just built
        residency.built(model, device.movable(model))
    return run.but(
        policy=PolicyOn(run.parts.policy, device),
        critic=CriticOn(run.parts.critic, device),
        refit=RefitOn(run.parts.refit, device),
        residency=residency,
    )
