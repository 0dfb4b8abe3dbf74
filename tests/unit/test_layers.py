"""The import contract of pyproject.toml holds, and it would notice a breach."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Run the import linter on the package in `root`."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", "--no-logo"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120, check=False)


def loaded_after_importing(package: str) -> set[str]:
    """Top-level modules loaded by importing `package` and each of its modules in a fresh interpreter."""
    code = (
        "import importlib, pkgutil, sys\n"
        "before = set(sys.modules)\n"
        f"package = importlib.import_module({package!r})\n"
        "for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        "print(' '.join({name.split('.')[0] for name in set(sys.modules) - before}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.fixture
def empty_package(tmp_path: Path) -> Path:
    """The packages that the contract names, each an empty `__init__.py`, under the real contract."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [name for layer in layers for name in re.findall(r"\w+", layer)]
    for folder in [Path("megatron_ppo"), *(Path("megatron_ppo") / name for name in names)]:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "__init__.py").touch()
    return tmp_path


def test_import_contracts_hold() -> None:
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_packages_that_import_nothing_pass(empty_package: Path) -> None:
    done = lint_imports(empty_package)
    assert done.returncode == 0, done.stdout + done.stderr


# One line per package and round: the linter takes a quarter of a second.
BREACHES: list[dict[str, str]] = [
    {
        "protocol": "torch",
        "config": "torch",
        "data": "megatron_ppo.loop",
        "numerics": "megatron_ppo.telemetry",
        "rewards": "megatron_ppo.testing",
        "collector": "megatron_ppo.replay",
        "replay": "ray",
        "loop": "vllm",
        "inference": "megatron_ppo.ray_actors",
        "mcore": "megatron_ppo.refit",
    },
    {"protocol": "numpy", "loop": "megatron.core"},
    {"protocol": "megatron_ppo.config", "loop": "megatron_ppo.mcore"},
]


@pytest.mark.parametrize("breaches", BREACHES)
def test_a_breach_of_a_contract_is_reported(empty_package: Path, breaches: dict[str, str]) -> None:
    for package, imported in breaches.items():
        (empty_package / "megatron_ppo" / package / "__init__.py").write_text(f"import {imported}\n")
    done = lint_imports(empty_package)
    assert done.returncode == 1, done.stdout + done.stderr
    for package, imported in breaches.items():
        # An external package is named by its root.
        module = imported if imported.startswith("megatron_ppo.") else imported.partition(".")[0]
        assert f"megatron_ppo.{package} is not allowed to import {module}:" in done.stdout, done.stdout


def test_a_package_without_a_place_in_the_layers_is_reported(empty_package: Path) -> None:
    (empty_package / "megatron_ppo" / "elsewhere").mkdir()
    (empty_package / "megatron_ppo" / "elsewhere" / "__init__.py").touch()
    done = lint_imports(empty_package)
    assert done.returncode == 1
    assert "elsewhere" in done.stdout


def test_protocol_loads_the_standard_library_only() -> None:
    loaded = loaded_after_importing("megatron_ppo.protocol")
    foreign = {name for name in loaded if name not in sys.stdlib_module_names} - {"megatron_ppo"}
    assert not foreign


def test_config_loads_no_torch_ray_vllm_or_megatron() -> None:
    loaded = loaded_after_importing("megatron_ppo.config")
    assert "pydantic" in loaded
    assert not loaded & {"torch", "ray", "vllm", "megatron", "transformers"}
