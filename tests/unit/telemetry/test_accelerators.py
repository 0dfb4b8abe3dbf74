"""Which optional packages are chosen, on machines that are made of fake module specs."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.accelerators import (
    APEX_UNRELATED,
    GRADIENT_KERNEL,
    Accelerators,
    Kernels,
    Precision,
    TransformerImpl,
    probe,
    select,
)

ENGINE = "transformer_engine"
VERSIONS = {"transformer-engine": "2.20.2", "apex": "0.1"}
NVIDIA_APEX = ("apex/normalization", "apex/optimizers", "apex/multi_tensor_apply")


class Machine:
    """A site-packages folder with the given modules; a name without a slash is a compiled top-level module."""

    def __init__(self, folder: Path, *modules: str, broken: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._broken = broken
        self.loaded: list[str] = []
        self._compiled = {module for module in modules if "/" not in module}
        for module in modules:
            if "/" in module:
                (folder / module).mkdir(parents=True)

    def find(self, name: str) -> ModuleSpec | None:
        if name in self._compiled:
            return ModuleSpec(name, None)
        if not (self._folder / name).is_dir():
            return None
        spec = ModuleSpec(name, None, is_package=True)
        spec.submodule_search_locations = [str(self._folder / name)]
        return spec

    def load(self, name: str) -> object:
        self.loaded.append(name)
        if name in self._broken:
            raise OSError(f"lib{name}.so: undefined symbol")
        return object()

    def probe(self, *, cuda: bool = True, versions: dict[str, str] | None = None) -> Accelerators:
        known = VERSIONS if versions is None else versions
        return probe(cuda=cuda, find=self.find, versions=known, load=self.load)


def chosen(
    found: Accelerators, transformer_impl: TransformerImpl = "auto", precision: Precision = "bf16"
) -> Kernels:
    return select(found, transformer_impl=transformer_impl, precision=precision)


def used(kernels: Kernels) -> dict[str, str]:
    return {name: choice.used for name, choice in kernels.choices.items()}


def full(folder: Path, **kwargs: tuple[str, ...]) -> Machine:
    return Machine(folder, f"{ENGINE}/pytorch", *NVIDIA_APEX, "amp_C", GRADIENT_KERNEL, **kwargs)


def test_with_everything_there_everything_is_used(tmp_path: Path) -> None:
    machine = full(tmp_path)
    kernels = chosen(machine.probe())
    assert kernels.layers == ENGINE
    assert kernels.gradient_accumulation_fusion
    assert used(kernels) == {
        "layers": ENGINE,
        "norms": "fused",
        "attention": "Transformer Engine flash or cuDNN",
        "gradient accumulation": "fused",
        "optimizer": "FusedAdam",
    }
    assert "2.20.2" in kernels.described()["layers"]
    assert machine.loaded == [f"{ENGINE}.pytorch", GRADIENT_KERNEL, "amp_C"]


def test_a_cpu_uses_none_of_it_and_imports_none_of_it(tmp_path: Path) -> None:
    machine = full(tmp_path)
    kernels = chosen(machine.probe(cuda=False))
    assert (kernels.layers, kernels.gradient_accumulation_fusion) == ("local", False)
    assert used(kernels)["optimizer"] == "torch AdamW"
    assert kernels.choices["layers"].why == "there is no CUDA device"
    assert machine.loaded == []


def test_each_missing_package_has_its_fallback_and_is_named(tmp_path: Path) -> None:
    nothing = chosen(Machine(tmp_path / "a").probe(versions={}))
    assert nothing.layers == "local" and not nothing.gradient_accumulation_fusion
    assert nothing.choices["layers"].why == "Transformer Engine is not installed"
    assert nothing.choices["gradient accumulation"].why == "NVIDIA Apex is not installed"
    assert used(nothing)["optimizer"] == "torch AdamW"
    assert "Transformer Engine is not" in nothing.choices["optimizer"].why
    assert "Apex is not" in nothing.choices["optimizer"].why

    engine = chosen(Machine(tmp_path / "b", f"{ENGINE}/pytorch").probe())
    assert engine.layers == ENGINE and not engine.gradient_accumulation_fusion
    assert engine.choices["optimizer"].why == "Transformer Engine 2.20.2"

    apex = chosen(Machine(tmp_path / "c", *NVIDIA_APEX, "amp_C", GRADIENT_KERNEL).probe())
    assert apex.layers == "local" and apex.gradient_accumulation_fusion
    assert apex.choices["optimizer"].why == "NVIDIA Apex"
    assert used(apex)["attention"] == "scaled_dot_product_attention"

    unbuilt = chosen(Machine(tmp_path / "d", *NVIDIA_APEX).probe())
    assert not unbuilt.gradient_accumulation_fusion
    assert unbuilt.choices["gradient accumulation"].why == f"NVIDIA Apex was built without {GRADIENT_KERNEL}"
    assert used(unbuilt)["optimizer"] == "torch AdamW"

    no_torch_part = chosen(Machine(tmp_path / "e", f"{ENGINE}/common").probe())
    assert no_torch_part.choices["layers"].why == "Transformer Engine is installed without its part for torch"


def test_the_web_toolkit_called_apex_is_recognised_and_ignored(tmp_path: Path) -> None:
    """Its modules are those of the wheel on the index; a stray kernel of the right name changes nothing."""
    machine = Machine(
        tmp_path, "apex/lib", "apex/models", "apex/tools", "apex/views", "apex/interfaces", GRADIENT_KERNEL
    )
    found = machine.probe(versions={"apex": "0.9.10.dev0"})
    assert found.apex.version == "0.9.10.dev0"
    assert APEX_UNRELATED in found.apex.problem
    kernels = chosen(found)
    assert not kernels.gradient_accumulation_fusion
    assert "unrelated" in kernels.choices["gradient accumulation"].why
    assert machine.loaded == []


@pytest.mark.parametrize(
    ("broken", "part"),
    [(f"{ENGINE}.pytorch", "layers"), (GRADIENT_KERNEL, "gradient accumulation")],
)
def test_a_package_that_cannot_be_imported_is_not_chosen_and_says_why(
    tmp_path: Path, broken: str, part: str
) -> None:
    machine = full(tmp_path, broken=(broken,))
    kernels = chosen(machine.probe())
    assert used(kernels)[part] in ("local", "separate")
    assert f"{broken} cannot be imported: OSError" in kernels.choices[part].why
    # The doctor imports nothing, so it cannot know.
    looked = probe(cuda=True, find=machine.find, versions=VERSIONS)
    assert used(chosen(looked))[part] not in ("local", "separate")


def test_transformer_engine_can_be_refused_but_not_conjured(tmp_path: Path) -> None:
    found = full(tmp_path / "a").probe()
    local = chosen(found, "local")
    assert local.layers == "local"
    assert local.choices["layers"].why == "asked for by transformer_impl"
    assert local.gradient_accumulation_fusion  # Apex's kernel does not depend on the layers
    assert chosen(found, ENGINE).layers == ENGINE
    for absent, why in (
        (Machine(tmp_path / "b").probe(versions={}), "Transformer Engine is not installed"),
        (full(tmp_path / "c").probe(cuda=False), "there is no CUDA device"),
        (full(tmp_path / "d", broken=(f"{ENGINE}.pytorch",)).probe(), "cannot be imported"),
    ):
        with pytest.raises(ConfigError, match=f"transformer_impl: got 'transformer_engine'.*{why}"):
            chosen(absent, ENGINE)


def test_flash_attention_needs_sixteen_bits(tmp_path: Path) -> None:
    found = full(tmp_path).probe()
    assert "flash" in used(chosen(found, precision="bf16"))["attention"]
    assert used(chosen(found, precision="fp32"))["attention"] == "Transformer Engine unfused"


def test_this_environment_is_probed_without_importing() -> None:
    looked_for: list[str] = []

    def find(name: str) -> ModuleSpec | None:
        looked_for.append(name)
        assert "." not in name  # a dotted name would import its parent
        return importlib.util.find_spec(name)

    finder: Callable[[str], ModuleSpec | None] = find
    found = probe(cuda=False, find=finder)
    assert looked_for[0] == "apex" and ENGINE in looked_for
    assert chosen(found).layers == "local"
