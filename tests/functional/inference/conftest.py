"""One engine for all tests of a file, with tied embeddings.

A head of its own matters where weights are loaded and read: those tests ask for both kinds (`EITHER`). The others run
on the second kind in `make test-long`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megatron_ppo.inference.environment import engine_environment

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig


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
