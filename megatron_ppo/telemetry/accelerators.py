"""Which optional GPU packages are usable here, and what the trainer runs because of it.

Owns the one decision that `doctor`, the trainer and `run.json` share: `probe` looks, `select` decides, and every
choice carries its reason. Transformer Engine brings fused norm + linear layers, flash attention and a fused Adam;
NVIDIA Apex a kernel that adds weight gradients to Megatron's buffer, and a fused Adam of its own. Without them the
trainer runs Megatron's local layers with an RMSNorm and a core attention of this package. None of it changes what is
computed.

The package called apex on the package index is an unrelated web toolkit. NVIDIA's is told apart by its modules.

Invariant: nothing is imported unless the caller passes `load`, so a broken package is named and not fatal.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Literal

from megatron_ppo.protocol.errors import ConfigError

TransformerImpl = Literal["auto", "local", "transformer_engine"]
Layers = Literal["local", "transformer_engine"]
Precision = Literal["fp32", "bf16"]

Find = Callable[[str], ModuleSpec | None]
Load = Callable[[str], object]

GRADIENT_KERNEL = "fused_weight_gradient_mlp_cuda"
APEX_UNRELATED = "the package of that name on the package index, an unrelated web toolkit; ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One optional package.

    Attributes:
        version: as installed; None where there is none.
        problem: why it cannot be used; empty if it can.
    """

    version: str | None
    problem: str

    @property
    def usable(self) -> bool:
        """Whether nothing stands against it."""
        return not self.problem


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerators:
    """What was found.

    Attributes:
        cuda: whether the trainer runs on CUDA; without it none of the packages is used.
        gradient_kernel, apex_adam: the two parts of Apex that are of use here; each may be there without the other.
    """

    cuda: bool
    transformer_engine: Package
    apex: Package
    gradient_kernel: Package
    apex_adam: Package


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is used, and why."""

    used: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """What one model runs on.

    Attributes:
        layers: whose layer spec.   gradient_accumulation_fusion: Megatron's setting of that name.
        choices: of every part, by its name: layers, norms, attention, gradient accumulation, optimizer.
    """

    layers: Layers
    gradient_accumulation_fusion: bool
    choices: Mapping[str, Choice]

    def described(self) -> dict[str, str]:
        """One line per part, for logs and `run.json`."""
        return {name: f"{choice.used} ({choice.why})" for name, choice in self.choices.items()}


def probe(
    *,
    cuda: bool,
    find: Find = importlib.util.find_spec,
    versions: Mapping[str, str] | None = None,
    load: Load | None = None,
) -> Accelerators:
    """Look for the packages.

    Args:
        cuda: whether there is a CUDA device and a build of torch for it.
        versions: of distributions, by normalised name; those of this environment by default.
        load: imports a module; given by the trainer, so that a package that is there but broken is not chosen.
    """
    known = _installed_versions() if versions is None else versions
    trying = load if cuda else None
    apex = _apex(find, known)
    return Accelerators(
        cuda=cuda,
        transformer_engine=_transformer_engine(find, known, trying),
        apex=apex,
        gradient_kernel=_part_of_apex(apex, GRADIENT_KERNEL, find, trying),
        apex_adam=_part_of_apex(apex, "amp_C", find, trying),
    )


def select(found: Accelerators, *, transformer_impl: TransformerImpl, precision: Precision) -> Kernels:
    """Decide what a model runs on.

    Raises: ConfigError where Transformer Engine is asked for and cannot be used.
    """
    layers = _layers(found, transformer_impl)
    fusion = _gradient_accumulation(found)
    return Kernels(
        layers="transformer_engine" if layers.used == "transformer_engine" else "local",
        gradient_accumulation_fusion=fusion.used == "fused",
        choices={
            "layers": layers,
            "norms": _norms(layers),
            "attention": _attention(layers, precision),
            "gradient accumulation": fusion,
            "optimizer": _optimizer(found),
        },
    )


def _layers(found: Accelerators, wanted: TransformerImpl) -> Choice:
    problem = found.transformer_engine.problem if found.cuda else "there is no CUDA device"
    if wanted == "transformer_engine" and problem:
        raise ConfigError(
            f"transformer_impl: got 'transformer_engine', which cannot be used: {problem}; "
            "must be auto or local here"
        )
    if wanted == "local":
        return Choice(used="local", why="asked for by transformer_impl")
    if problem:
        return Choice(used="local", why=problem)
    return Choice(used="transformer_engine", why=f"Transformer Engine {found.transformer_engine.version}")


def _norms(layers: Choice) -> Choice:
    if layers.used == "transformer_engine":
        return Choice(used="fused", why="part of Transformer Engine's linear layers")
    return Choice(used="torch RMSNorm", why="local layers; knows sequence parallelism")


def _attention(layers: Choice, precision: Precision) -> Choice:
    if layers.used == "local":
        return Choice(used="scaled_dot_product_attention", why="local layers; torch picks its kernel")
    if precision == "fp32":
        return Choice(used="Transformer Engine unfused", why="flash attention needs 16-bit numbers")
    return Choice(used="Transformer Engine flash or cuDNN", why="it picks the faster one for each shape")


def _gradient_accumulation(found: Accelerators) -> Choice:
    if not found.cuda:
        return Choice(used="separate", why="there is no CUDA device")
    if found.gradient_kernel.usable:
        return Choice(used="fused", why=f"{GRADIENT_KERNEL} of NVIDIA Apex")
    return Choice(used="separate", why=found.gradient_kernel.problem)


def _optimizer(found: Accelerators) -> Choice:
    """Megatron takes the first of the three that it can import, whatever the layers are."""
    if not found.cuda:
        return Choice(used="torch AdamW", why="there is no CUDA device")
    if found.transformer_engine.usable:
        return Choice(used="FusedAdam", why=f"Transformer Engine {found.transformer_engine.version}")
    if found.apex_adam.usable:
        return Choice(used="FusedAdam", why="NVIDIA Apex")
    return Choice(used="torch AdamW", why=f"{found.transformer_engine.problem}; {found.apex_adam.problem}")


def _transformer_engine(find: Find, versions: Mapping[str, str], load: Load | None) -> Package:
    version = versions.get("transformer-engine")
    spec = find("transformer_engine")
    if spec is None:
        return Package(version=None, problem="Transformer Engine is not installed")
    if not _has(spec, "pytorch"):
        return Package(version=version, problem="Transformer Engine is installed without its part for torch")
    return Package(version=version, problem=_import_problem("transformer_engine.pytorch", load))


def _apex(find: Find, versions: Mapping[str, str]) -> Package:
    spec, version = find("apex"), versions.get("apex")
    if spec is None:
        return Package(version=None, problem="NVIDIA Apex is not installed")
    # The web toolkit has none of them.
    if not all(_has(spec, module) for module in ("normalization", "optimizers")):
        return Package(version=version, problem=f"apex is {APEX_UNRELATED}")
    return Package(version=version, problem="")


def _part_of_apex(apex: Package, module: str, find: Find, load: Load | None) -> Package:
    if not apex.usable:
        return apex
    if find(module) is None:
        return Package(version=apex.version, problem=f"NVIDIA Apex was built without {module}")
    return Package(version=apex.version, problem=_import_problem(module, load))


def _import_problem(module: str, load: Load | None) -> str:
    if load is None:
        return ""
    try:
        load(module)
    except (ImportError, OSError, RuntimeError) as error:  # a library of another torch or CUDA, no driver
        return f"{module} cannot be imported: {type(error).__name__}: {error}"
    return ""


def _has(spec: ModuleSpec, module: str) -> bool:
    folders = spec.submodule_search_locations or ()
    return any((Path(f) / module).is_dir() or (Path(f) / f"{module}.py").is_file() for f in folders)


@functools.cache
def _installed_versions() -> Mapping[str, str]:
    # Reads a file of every installed distribution, which takes longer than the building of a small model does.
    return {
        re.sub(r"[-_.]+", "-", name).lower(): distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"])
    }
