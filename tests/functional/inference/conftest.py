"""One engine for all tests of a file, once with tied and once with untied embeddings."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from megatron_ppo.inference.environment import engine_environment

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig


@pytest.fixture(scope="session")
def engine_process_environment() -> None:
    """What vLLM reads while it is imported; it stays for the rest of the session."""
    os.environ.update(engine_environment(device_type="cpu"))


@pytest.fixture(scope="module", params=["tied", "untied"])
def rig(
    request: pytest.FixtureRequest, engine_process_environment: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineRig]:
    """See `EngineRig`."""
    import torch

    from tests.functional.inference.engine_rig import running_rig

    torch.set_num_threads(1)
    with running_rig(tmp_path_factory.mktemp("model"), tied=request.param == "tied") as running:
        yield running
