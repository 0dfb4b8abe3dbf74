"""One engine for all tests of a file, with tied embeddings.

A head of its own matters where weights are loaded and read: those tests ask for both kinds (`EITHER`). The others run
on the second kind in `make test-long`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from megatron_ppo.inference.environment import engine_environment

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig


ROOT = Path(__file__).parents[3]


@dataclass(frozen=True)
class GroupDriver:
    """`group_driver.py` as a process, and what it prints besides its reports."""

    process: subprocess.Popen[str]
    log: Path


@pytest.fixture(scope="package", autouse=True)
def group_driver(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[GroupDriver | None]:
    """Runs beside the tests that come before its own: its engines start for half a minute, twice, on few cores."""
    if not any(item.path.name == "test_inference_group.py" for item in request.session.items):
        yield None
        return
    folder = tmp_path_factory.mktemp("group")
    with (folder / "driver.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.functional.inference.group_driver", str(folder)],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=ROOT,
        )
    try:
        yield GroupDriver(process, folder / "driver.log")
    finally:
        process.kill()
        process.wait(timeout=30)


@pytest.fixture(scope="session")
def engine_process_environment() -> Iterator[None]:
    """What vLLM reads while it is imported."""
    # TORCH_COMPILE_DISABLE is read when torch is imported, which has happened by now; without the second
    # variable, read at every use, the first generation would wait for a C++ compiler.
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (engine_environment(device_type="cpu") | {"TORCHDYNAMO_DISABLE": "1"}).items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module", params=["tied", pytest.param("untied", marks=pytest.mark.slow)])
def rig(
    request: pytest.FixtureRequest, engine_process_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineRig]:
    """See `EngineRig`."""
    import torch

    from tests.functional.inference.engine_rig import running_rig

    torch.set_num_threads(1)
    with running_rig(tmp_path_factory.mktemp("model"), tied=request.param == "tied") as running:
        yield running
