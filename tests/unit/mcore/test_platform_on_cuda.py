"""What `platform.install` touches where there is a GPU. Megatron-Core is pretended here, and so is the GPU.

A real GPU has not run it; what this shows is that the CPU's patches stay away, and which three answers do not (ADR
0022).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_ppo.mcore import platform

RANDOM = "megatron.core.tensor_parallel.random"
ROUTER = "megatron.core.transformer.moe.moe_utils"
LANGUAGE = "megatron.core.models.common.language_module.language_module"


def a_function() -> None:
    """Stands for whatever Megatron-Core has under a name."""


class PretendedMegatron:
    """Modules by name, each with the names that `install` could change; `asked` are the imports."""

    def __init__(self, *, transformer_engine: bool) -> None:
        self.asked: list[str] = []
        self.modules: dict[str, SimpleNamespace] = {
            RANDOM: SimpleNamespace(
                HAVE_TE=transformer_engine,
                CheckpointWithoutOutput=type("CheckpointWithoutOutput", (), {"__init__": self.checkpoint}),
                _set_cuda_rng_state=a_function,
            ),
            ROUTER: SimpleNamespace(**({"te_general_gemm": a_function} if transformer_engine else {})),
            LANGUAGE: SimpleNamespace(
                LanguageModule=type(
                    "LanguageModule", (), {"tie_embeddings_and_output_weights_state_dict": a_function}
                ),
                parallel_state=a_function,
            ),
        }
        self.fp8: list[object] = []

    def checkpoint(self, instance: object, fp8: object = False) -> None:
        self.fp8.append(fp8)

    def load(self, name: str) -> SimpleNamespace:
        self.asked.append(name)
        return self.modules.setdefault(name, SimpleNamespace())

    def content(self) -> dict[str, object]:
        """Dotted name -> object, of modules and of the classes in them."""
        found: dict[str, object] = {}
        for name, module in self.modules.items():
            for key, value in vars(module).items():
                found[f"{name.rpartition('.')[2]}.{key}"] = value
                if isinstance(value, type):
                    found |= {f"{value.__name__}.{k}": v for k, v in vars(value).items()}
        return found


def identities(*owners: object) -> dict[tuple[int, str], int]:
    return {(id(owner), key): id(value) for owner in owners for key, value in vars(owner).items()}


def install(megatron: PretendedMegatron, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(platform._state, "installed", False)
    monkeypatch.setattr(platform, "on_cuda", lambda: True)
    monkeypatch.setattr(platform, "import_module", megatron.load)
    platform.install()


def changed(before: Mapping[str, object], after: Mapping[str, object]) -> set[str]:
    return {name for name in after if name not in before or after[name] is not before[name]}


@pytest.mark.parametrize(
    ("transformer_engine", "answers"),
    [
        (
            False,
            {
                "moe_utils.te_general_gemm",
                "CheckpointWithoutOutput.__init__",
                "LanguageModule.tie_embeddings_and_output_weights_state_dict",
            },
        ),
        (True, {"LanguageModule.tie_embeddings_and_output_weights_state_dict"}),
    ],
)
def test_on_a_gpu_three_upstream_mistakes_are_answered_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch, transformer_engine: bool, answers: set[str]
) -> None:
    megatron = PretendedMegatron(transformer_engine=transformer_engine)
    before, of_torch = megatron.content(), identities(torch, torch.cuda, torch.Tensor)
    install(megatron, monkeypatch)
    assert changed(before, megatron.content()) == answers
    assert identities(torch, torch.cuda, torch.Tensor) == of_torch


def test_the_default_of_recomputation_no_longer_means_that_fp8_is_in_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    megatron = PretendedMegatron(transformer_engine=False)
    install(megatron, monkeypatch)
    make: Callable[..., Any] = megatron.modules[RANDOM].CheckpointWithoutOutput
    make(), make(fp8=False), make(fp8="a recipe")
    assert megatron.fp8 == [None, None, "a recipe"]
