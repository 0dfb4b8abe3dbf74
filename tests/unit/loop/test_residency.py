"""The schedule of loading and offloading, on a device that takes notes: over whole runs, resumes and every failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.loop.async_ppo import LoopSettings, train
from megatron_ppo.loop.checkpoints import ModelStore
from megatron_ppo.loop.residency import EVERYTHING, WEIGHTS, Model, Part, Residency, ResidencyError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.strategies import schedules
from tests.unit.loop.fake_run import FakeRun, WorkLog, fake_run, loop_settings
from tests.unit.loop.recording_device import Device, Fault, on_device

ALL = "gradients,optimizer,parameters"


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def run_on(device: Device, schedule: AsyncSchedule, **kwargs: Any) -> FakeRun:
    """A fake run on `device`; keywords go to `fake_run`."""

    def make_run(wrap_store: Callable[[ModelStore], ModelStore]) -> FakeRun:
        return fake_run(schedule, wrap_store=wrap_store, **kwargs)

    return on_device(device, make_run)


def with_everything_due(schedule: AsyncSchedule, **changes: Any) -> LoopSettings:
    """Two epochs, a reference, validation and a checkpoint after every step."""
    plain: dict[str, Any] = {
        "ppo_epochs": 2,
        "use_reference": True,
        "validation_period": 1,
        "validate_at_start": True,
        "checkpoint_period": 1,
    }
    return loop_settings(schedule, **{**plain, **changes})


def assert_paired(device: Device) -> None:
    """Every part that came has gone, in that order, and nothing is there now."""
    assert device.on == {} and device.left_alone == set()
    held: dict[Model, set[Part]] = {model: set(Part) for model in Model}  # as built
    for kind, model, parts in device.moves:
        if kind == "load":
            assert not held[model] & parts
            held[model] |= parts
        else:
            held[model] -= parts
    assert not any(held.values())


def test_a_frozen_and_a_trained_step_load_and_offload_in_the_documented_order(tmp_path: Path) -> None:
    """P1 and P2 of the case list; the order is written out in full."""
    schedule = AsyncSchedule(max_num_steps=2, policy_training_start_step=1)
    device = Device()
    run = run_on(device, schedule, epochs=2, folder=tmp_path)
    train(with_everything_due(schedule), schedule, run.parts)

    def whole(model: str, use: str) -> list[str]:
        return [f"load {model}: {ALL}", use, f"offload {model}: {ALL}"]

    def weights(model: str, use: str) -> list[str]:
        return [f"load {model}: parameters", use, f"offload {model}: parameters"]

    built = [f"offload {model}: {ALL}" for model in ("policy", "reference", "critic")]
    published = weights("policy", "publish")
    scored = [
        *weights("critic", "values"),
        *weights("policy", "log-probs"),
        *weights("reference", "reference log-probs"),
    ]
    saved = [
        note
        for model in ("policy", "critic")
        for note in (
            f"load {model}: optimizer,parameters",
            f"save {model}",
            f"offload {model}: optimizer,parameters",
        )
    ]
    critic_epoch, policy_epoch = whole("critic", "critic update"), whole("policy", "policy update")
    frozen = [*scored, *critic_epoch, *critic_epoch, *saved]
    trained = [
        *scored,
        *critic_epoch,
        *policy_epoch,
        *critic_epoch,
        *policy_epoch[:2],
        # It stays for the publish: no parameter moves between the last update and the transfer.
        "offload policy: gradients,optimizer",
        "publish",
        "offload policy: parameters",
        *saved,
    ]
    assert device.notes == [*built, *published, *frozen, *trained]
    assert_paired(device)


@settings(max_examples=60, deadline=None)
@given(
    schedule=schedules(max_steps=8, max_start=4),
    epochs=st.integers(1, 3),
    period=st.integers(0, 3),
    asynchronous=st.booleans(),
)
def test_no_schedule_ever_holds_two_models_or_leaves_one_behind(
    schedule: AsyncSchedule, epochs: int, period: int, asynchronous: bool
) -> None:
    device = Device()
    with TemporaryDirectory() as folder:
        run = run_on(device, schedule, epochs=epochs, folder=Path(folder), asynchronous=asynchronous)
        plan = with_everything_due(
            schedule, ppo_epochs=epochs, validation_period=period, checkpoint_period=period
        )
        train(plan, schedule, run.parts)
    assert_paired(device)
    assert run.parts.residency.resident == {}


def test_nothing_is_on_the_device_while_validation_and_collection_run(tmp_path: Path) -> None:
    schedule = AsyncSchedule(max_num_steps=3, policy_training_start_step=1)
    device = Device()
    run = run_on(device, schedule, epochs=2, folder=tmp_path)
    seen: list[str] = []

    class Watched:
        """Passes calls on, and looks at the device first."""

        def __init__(self, part: Any, name: str) -> None:
            self._part, self._name = part, name

        def __getattr__(self, attribute: str) -> Any:
            assert device.on == {}, f"{self._name}.{attribute} while {device.on}"
            seen.append(f"{self._name}.{attribute}")
            return getattr(self._part, attribute)

    parts = run.parts
    watched = run.but(groups=Watched(parts.groups, "groups"), validator=Watched(parts.validator, "validator"))
    train(with_everything_due(schedule), schedule, watched.parts)
    assert {"groups.take", "groups.open", "validator.run"} == set(seen)


def operations(schedule: AsyncSchedule, folder: Path) -> int:
    """How many moves and uses a whole run has."""
    device = Device()
    run = run_on(device, schedule, epochs=2, folder=folder)
    train(with_everything_due(schedule), schedule, run.parts)
    return len(device.notes)


@pytest.mark.parametrize("asynchronous", [False, True], ids=["saved_at_once", "saved_later"])
def test_a_failure_of_any_operation_leaves_nothing_behind_and_a_resumed_run_ends_the_same(
    tmp_path: Path, asynchronous: bool
) -> None:
    """Every load, use and offload of a run with warm-up, validation and checkpoints fails once."""
    schedule = AsyncSchedule(max_num_steps=3, policy_training_start_step=1)
    plan = with_everything_due(schedule)
    total = operations(schedule, tmp_path / "whole")
    expected = WorkLog()
    train(plan, schedule, fake_run(schedule, epochs=2, work=expected).parts)
    assert total > 80
    for fault_at in range(3, total):  # the first three are of the building, see the next test
        folder, work = tmp_path / f"at_{fault_at}", WorkLog()
        device = Device(fault_at=fault_at)
        run = run_on(device, schedule, epochs=2, folder=folder, work=work, asynchronous=asynchronous)
        with pytest.raises(Fault):
            train(plan, schedule, run.parts)
        assert device.faults and device.on == {}, device.faults
        assert run.parts.residency.resident == {}
        again = Device()
        steps = [int(saved.name.removeprefix("step_")) for saved in folder.glob("step_*")]
        resumed = run_on(
            again,
            schedule,
            epochs=2,
            folder=folder,
            work=work,
            asynchronous=asynchronous,
            first_step=max(steps, default=0),
        )
        train(plan, schedule, resumed.parts)
        assert_paired(again)
        assert work.trained_ordinals() == expected.trained_ordinals()


@pytest.mark.parametrize("fault_at", range(3))
def test_a_model_that_cannot_leave_after_it_was_built_stops_the_building(fault_at: int) -> None:
    device = Device(fault_at=fault_at)
    with pytest.raises(Fault):
        run_on(device, AsyncSchedule(max_num_steps=1))
    assert len(device.notes) == fault_at + 1
    assert len(device.on) == 1


def test_a_model_that_can_never_leave_keeps_every_other_one_out(tmp_path: Path) -> None:
    """Whatever happens next, there are never two; the first error is the one that is raised, with the second noted."""
    schedule = AsyncSchedule(max_num_steps=2)
    total = operations(schedule, tmp_path / "whole")
    plan = with_everything_due(schedule)
    stuck = 0
    for fault_at in range(3, total):
        device = Device(fault_at=fault_at, stuck=True)
        run = run_on(device, schedule, epochs=2, folder=tmp_path / f"at_{fault_at}")
        with pytest.raises(Fault) as raised:
            train(plan, schedule, run.parts)
        if not device.faults[0].startswith("offload"):
            continue
        stuck += 1
        (model,) = device.on
        assert any(str(model) in note for note in raised.value.__notes__)
        other = Model.CRITIC if model is not Model.CRITIC else Model.POLICY
        with (
            pytest.raises(ResidencyError, match=f"while the {model} is on"),
            run.parts.residency.scoring(other),
        ):
            pytest.fail("two models on the device")
        assert set(device.on) == {model}
    assert stuck > 10


def test_phases_do_not_nest() -> None:
    residency = Residency()
    with (
        pytest.raises(ResidencyError, match="scoring with the critic begins during training the policy"),
        residency.training(Model.POLICY),
        residency.scoring(Model.CRITIC),
    ):
        pytest.fail("two phases at once")
    assert residency.resident == {}
    with residency.scoring(Model.CRITIC):  # the refused attempt has left nothing
        assert residency.resident == {Model.CRITIC: WEIGHTS}


def test_a_model_that_stays_has_to_be_published_before_the_step_ends() -> None:
    residency = Residency()
    with (
        pytest.raises(ResidencyError, match=r"step 1 has ended while .*policy: gradients, optimizer, param"),
        residency.step("step 1"),
        residency.training(Model.POLICY, stays=True),
    ):
        pass
    assert residency.resident == {Model.POLICY: EVERYTHING}
    with pytest.raises(ResidencyError, match="step 2 begins while"), residency.step("step 2"):
        pytest.fail("a step began with a model on the device")


def test_a_failure_after_a_model_stayed_still_offloads_it() -> None:
    device = Device()
    residency = Residency({Model.POLICY: device.movable(Model.POLICY)})
    with pytest.raises(KeyError), residency.step("step 1"):
        with residency.training(Model.POLICY, stays=True):
            pass
        raise KeyError("between the update and the publish")
    assert device.on == {} and residency.resident == {}
    assert device.left_alone == {Model.POLICY}


def test_a_model_is_built_once_and_alone() -> None:
    device = Device()
    residency = Residency()
    device.on[Model.POLICY] = EVERYTHING
    residency.built(Model.POLICY, device.movable(Model.POLICY))
    with pytest.raises(ResidencyError, match="the policy was built twice"):
        residency.built(Model.POLICY, device.movable(Model.POLICY))
    with (
        pytest.raises(ResidencyError, match="the critic was built while"),
        residency.training(Model.POLICY),
    ):
        residency.built(Model.CRITIC, device.movable(Model.CRITIC))


def test_only_movable_models_make_a_schedule_that_moves() -> None:
    device = Device()
    assert not Residency().moves
    assert Residency({Model.CRITIC: device.movable(Model.CRITIC)}).moves
