"""Where a critic's first weights may come from besides the policy's folder."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.checkpoint_jobs:"
LAYOUTS: dict[str, dict[str, int | bool]] = {
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
}
# float32 through two layers in another order of sums; the values are of order 1.
VALUE_ABSOLUTE = 1e-4


@pytest.fixture(scope="module", params=["TokenClassification", "SequenceClassification"])
def reward_model(
    request: pytest.FixtureRequest, workers: WorkerGroup, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Folder of a reward or value model as transformers writes it."""
    folder = tmp_path_factory.mktemp("reward")
    workers.run_alone(JOBS + "make_reward_model", folder=str(folder), kind=request.param)
    return folder


def test_a_critic_takes_over_backbone_and_head_of_a_reward_model(
    workers: WorkerGroup, reward_model: Path
) -> None:
    results = [workers.run_alone(JOBS + "value_difference", folder=str(reward_model), layout={})]
    for layout in LAYOUTS.values():
        results += workers.run(JOBS + "value_difference", folder=str(reward_model), layout=layout)
    for result in results:
        assert result["difference"] < VALUE_ABSOLUTE
        assert result["size"] > 0.1, "a head that stayed zero would compare equal to nothing"


def test_a_policy_refuses_a_reward_model(workers: WorkerGroup, reward_model: Path) -> None:
    message = workers.run_alone(JOBS + "policy_error", folder=str(reward_model))
    assert str(reward_model) in message and "only the critic" in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"score.weight": None}, "has no tensor score.weight"),
        ({"score.weight": torch.zeros(2, 64)}, "score.weight has shape (2, 64), the model needs (1, 64)"),
    ],
)
def test_a_head_that_is_missing_or_of_another_shape_is_named(
    workers: WorkerGroup, reward_model: Path, tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(reward_model, folder)
    message = workers.run_alone(JOBS + "head_error", folder=str(folder), changes=changes)
    assert words in message and str(folder) in message
