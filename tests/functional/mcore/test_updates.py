"""Updates that go wrong, resumes, and the frozen reference."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.functional.worker_group import WorkerGroup

pytestmark = pytest.mark.megatron

JOBS = "tests.functional.mcore.jobs:"
TP2 = {"tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2}


@pytest.mark.parametrize("layout", [{}, TP2, PP2], ids=["dp2", "tp2", "pp2"])
@pytest.mark.parametrize(("kind", "spoil"), [("policy", "nan"), ("critic", "inf")])
def test_a_bad_loss_names_its_prompt_on_every_rank_and_applies_no_step(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], kind: str, spoil: str, layout: dict[str, int]
) -> None:
    folder = str(tiny_model("qwen2"))
    ranks = workers.run(JOBS + "spoilt_update", kind=kind, folder=folder, layout=layout, spoil=spoil)
    for seen in ranks:
        assert seen["ordinals"] == (105,)
        assert "[105]" in seen["error"]
        # Only the good minibatch before it was applied, and nothing of the bad one is left in the gradients.
        assert seen["same_as_clean"]


def test_an_infinite_gradient_norm_raises_on_every_rank_and_applies_no_step(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    folder = str(tiny_model("qwen2"))
    for seen in workers.run(
        JOBS + "spoilt_update", kind="policy", folder=folder, layout=TP2, spoil="gradient"
    ):
        assert "gradient norm is inf" in seen["error"]
        assert len(seen["ordinals"]) == 8
        assert seen["same_as_clean"]


def assert_same_continuation(seen: dict[str, Any], expected: dict[str, Any], *, exact: bool) -> None:
    for mine, theirs in zip(seen["metrics"], expected["metrics"], strict=True):
        for name in theirs:
            if exact:
                assert mine[name] == theirs[name], name
            elif name.endswith(("loss", "grad_norm", "/lr")):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5), name
    for model in ("policy", "critic"):
        for name, tensor in expected[model].items():
            # Another layout adds in another order (see test_layouts); the same one must not differ in a bit.
            tolerance = 0.0 if exact else 1e-6
            torch.testing.assert_close(seen[model][name], tensor, rtol=0.0, atol=tolerance)
    assert seen["adam_steps"] == expected["adam_steps"] == [{2.0}, {4.0}]


def test_training_goes_on_from_a_checkpoint_as_if_never_interrupted(
    workers: WorkerGroup, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, checkpoint = str(tiny_model("qwen2")), str(tmp_path / "models")
    layouts = {"policy_layout": TP2, "critic_layout": {}}
    ranks = workers.run(JOBS + "save", folder=folder, checkpoint=checkpoint, **layouts)
    # A never-stepped policy (warm-up) is saved without being touched.
    assert all(rank["saved_unchanged"] for rank in ranks)
    resumed = workers.run(JOBS + "resume", folder=folder, checkpoint=checkpoint, **layouts)
    for seen, expected in zip(resumed, ranks, strict=True):
        assert_same_continuation(seen, expected, exact=True)
    # Another layout, and one process, load the same folder.
    other = {"policy_layout": PP2, "critic_layout": TP2}
    for seen in workers.run(JOBS + "resume", folder=folder, checkpoint=checkpoint, **other):
        assert_same_continuation(seen, ranks[0], exact=False)
    alone = {"policy_layout": {}, "critic_layout": {}}
    seen = workers.run_alone(JOBS + "resume", folder=folder, checkpoint=checkpoint, **alone)
    assert_same_continuation(seen, ranks[0], exact=False)

    message = workers.run_alone(JOBS + "load_error", folder=str(tiny_model("qwen3")), checkpoint=checkpoint)
    assert "policy was" in message
    assert "Qwen3ForCausalLM" in message
    missing = workers.run_alone(JOBS + "load_error", folder=folder, checkpoint=str(tmp_path / "nothing"))
    assert "not a complete checkpoint" in missing


def test_the_reference_stays_what_the_policy_started_from(
    workers: WorkerGroup, tiny_model: Callable[[str], Path]
) -> None:
    for seen in workers.run(JOBS + "reference_is_frozen", folder=str(tiny_model("qwen2")), layout=TP2):
        assert torch.equal(seen["reference_before"], seen["initial"])
        assert torch.equal(seen["reference_after"], seen["reference_before"])
        assert not torch.equal(seen["policy_after"], seen["initial"])
        # Reference and current policy are the same weights in the first forward pass: KL 0 up to rounding.
        assert abs(seen["metrics"]["train/kl_penalty"]) < 1e-6


def test_jobs_leave_no_threads_behind(workers: WorkerGroup, tiny_model: Callable[[str], Path]) -> None:
    # A process group's threads live as long as any model that holds it; a sweep would collect hundreds of them.
    job = "tests.functional.mcore.jobs:threads_left_by_jobs"
    first, *later = workers.run_alone(job, folder=str(tiny_model("qwen2")), jobs=3)
    assert later == [first, first]
