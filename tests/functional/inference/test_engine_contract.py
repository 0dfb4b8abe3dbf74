"""The real engine under the checks that hold for every `RolloutEngine`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from megatron_ppo.inference.environment import engine_environment
from tests.contract import rollout_engine

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig

pytestmark = [pytest.mark.vllm]


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineRig]:
    """See `EngineRig`; one engine for all checks, which the last one ends."""
    os.environ.update(engine_environment(device_type="cpu"))
    import torch

    from tests.functional.inference.engine_rig import running_rig

    torch.set_num_threads(1)
    with running_rig(tmp_path_factory.mktemp("model"), tied=True) as running:
        yield running


@pytest.mark.parametrize("check", rollout_engine.CHECKS)
def test_the_vllm_engine_keeps_the_contract_of_engines(rig: EngineRig, check: Callable[..., Any]) -> None:
    async def publish() -> int:
        # The sender's side blocks, as in the trainer; the engine's side runs on this loop.
        model = rig.models[(rig.version + 1) % 2]
        return await asyncio.to_thread(rig.publish, model, in_flight=True, recompute_kv=True)

    async def running() -> int:
        return (await rig.engine.health()).running

    subject = rollout_engine.Subject(
        engine=rig.engine,
        publish=publish,
        version=lambda: rig.version,
        running=running,
        long_response=400,
        kill=rig.engine.shutdown,
    )
    rig.loop.run(check(subject), timeout_s=200)
