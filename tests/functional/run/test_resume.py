"""Save, kill -9 of the whole tree, and the same command again."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from launcher import Launched, final_history

pytestmark = [pytest.mark.megatron, pytest.mark.vllm, pytest.mark.ray, pytest.mark.timeout(500)]

STEPS, GROUPS, SAMPLES = 6, 4, 4


def test_a_killed_run_continues_and_trains_every_prompt_exactly_once(launch: Callable[..., Launched]) -> None:
    words = [
        "+experiment=cpu_smoke", f"run.max_num_steps={STEPS}", "checkpoint.period=2",
        "checkpoint.async_save=true",  # the kill may meet a save that is being written
        "telemetry.record_trajectories=true", "validation.period=0", "gates.age_in_versions=null",
        # As on a GPU: policy and critic take turns, also while they are saved, restored, published and probed.
        "cluster.offload_models=always",
    ]  # fmt: skip
    first = launch(*words)
    first.wait_for_step(3)
    first.kill()
    assert first.survivors(within_s=15) == []

    second = launch(*words)
    assert second.wait() == 0, second.output + second.log_tails()
    assert second.run_dir == first.run_dir
    assert "continuing cpu_smoke" in second.output

    rows = second.rows()
    assert [row["step"] for row in rows if row["step"] > 0] == list(range(1, STEPS + 1))
    assert all(row.get("age/max_versions", 0) <= 1 for row in rows)
    ordinals = [record["ordinal"] for records in final_history(second.run_dir).values() for record in records]
    assert sorted(ordinals) == [ordinal for ordinal in range(STEPS * GROUPS) for _ in range(SAMPLES)]
    assert not list((second.run_dir / "checkpoints").glob("tmp_*"))
    assert (second.run_dir / "checkpoints" / "latest").read_text() == f"step_{STEPS}"
    # The learning rate schedule and Adam's state went on: the restored run publishes the version it stopped at.
    assert (
        max(version for r in final_history(second.run_dir)[STEPS] for version, _, _ in r["versions"])
        <= STEPS - 1
    )
