"""A run that is killed anywhere, any number of times, trains what an undisturbed one trains.

`KILL_POINTS` sets how many kills there are in total; the default fits into the unit tests.
"""

from __future__ import annotations

import itertools
import json
import os
import random
from collections import Counter
from pathlib import Path

import pytest
import torch

from megatron_ppo.protocol.moves import Stage
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.replay.history import read_history
from tests.unit.loop.fake_run import BATCH, PROMPTS
from tests.unit.loop.kill_anywhere import (
    EPOCH,
    FILE_POINTS,
    Death,
    Plan,
    complete_steps,
    live_once,
    prompt_of,
)

KILLS = int(os.environ.get("KILL_POINTS", "1000"))
SYNC = AsyncSchedule(max_num_steps=5, max_trajectory_age_steps=0)
ASYNC = AsyncSchedule(max_num_steps=6, max_trajectory_age_steps=2)
BANKED = AsyncSchedule(
    max_num_steps=7, max_trajectory_age_steps=1, policy_training_start_step=2, warmup_generation_lead_steps=2
)
PLANS = {
    "age 0": Plan(schedule=SYNC, checkpoint_period=1, asynchronous=False, load_replay_buffer=True),
    "age 2": Plan(schedule=ASYNC, checkpoint_period=2, asynchronous=True, load_replay_buffer=True),
    "warm-up": Plan(schedule=BANKED, checkpoint_period=1, asynchronous=False, load_replay_buffer=True),
    "warm-up, saved in the background": Plan(
        schedule=BANKED, checkpoint_period=2, asynchronous=True, load_replay_buffer=True
    ),
    "window generated again": Plan(
        schedule=BANKED, checkpoint_period=2, asynchronous=False, load_replay_buffer=False
    ),
    "a prompt that always fails": Plan(
        schedule=ASYNC, checkpoint_period=2, asynchronous=False, load_replay_buffer=True, failing=3
    ),
}
MUST_DIE_AT = {
    "after a prompt is dropped",
    "an epoch begins",
    "before checkpoints.publish",
    "before critic.update",
    "before groups.open",
    "before groups.take",
    "before policy.update",
    "before refit.push",
    "before replay.restore",
    "before replay.snapshot",
    "before the ledger's sync",
    "before validator.run",
    "engine begins",
    "engine ends",
    "half of critic.json",
    "half of files.json",
    "half of latest.tmp",
    "half of policy.json",
    "half of replay_buffer.json",
    "half of training_info.json",
    "in the middle of the refit",
    "os.mkdir tmp_step_#",
    "os.rename latest.tmp",
    "os.rename step_#",
    "os.rename tmp_step_#",
    "shutil.rmtree old_step_#",
}
"""By name: a point that is no longer passed must be missed, and not only one that is passed without a death."""
LIVES_PER_RUN = 12
"""Kills before a run may finish; each dies somewhere between its start and about the end of the run."""


@pytest.fixture(autouse=True)
def _points_in_written_files(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(Path, "write_text", _write_text)
    # The disk's own latency is not the subject; what a missing fsync loses is simulated by the harness.
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def _write_text(path: Path, text: str, **options: str) -> int:
    return FILE_POINTS.write_text(path, text, **options)


def trained_rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "trained_groups.jsonl").read_text().splitlines()]


def check_end(plan: Plan, folder: Path) -> None:
    """What a finished run must look like, however often it was killed."""
    steps = plan.schedule.max_num_steps
    rows = trained_rows(folder)
    trained = Counter(int(str(row["ordinal"])) for row in rows)
    whole = list(itertools.islice((q for q in itertools.count() if not plan.lost(q)), steps * PROMPTS))
    assert trained == Counter(dict.fromkeys(whole, BATCH // PROMPTS))
    assert Counter(int(str(row["step"])) for row in rows) == dict.fromkeys(range(1, steps + 1), BATCH)
    for row in rows:
        assert row["prompt"] == list(prompt_of(int(str(row["ordinal"]))))
        for version, _, _ in row["versions"]:  # type: ignore[attr-defined]
            age = plan.schedule.age(generation_version=version, target_step=int(str(row["step"])) - 1)
            assert 0 <= age <= plan.schedule.max_trajectory_age_steps
    history = read_history(folder / "ledger.jsonl")
    assert history.ordinals(Stage.TRAINED) == whole
    assert history.ordinals(Stage.DROPPED) == [q for q in range(whole[-1]) if plan.lost(q)]
    assert plan.failing is None or history.count(Stage.DROPPED) >= len(whole) // EPOCH
    assert complete_steps(folder)[-1] == steps
    saved = folder / "checkpoints" / f"step_{steps}"
    minibatches = 2
    assert json.loads((saved / "critic.json").read_text()) == steps * minibatches
    frozen = plan.schedule.policy_training_start_step
    assert json.loads((saved / "policy.json").read_text()) == (steps - frozen) * minibatches
    left_over = [f.name for f in (folder / "checkpoints").iterdir() if f.name.startswith(("tmp_", "old_"))]
    assert left_over == []
    assert (folder / "checkpoints" / "latest").read_text() == f"step_{steps}"


def kill_and_resume(
    plan: Plan, folder: Path, *, seed: int, whole: Counter[str], died_at: Counter[str], tried: Counter[str]
) -> None:
    """One run through `LIVES_PER_RUN` deaths to its end.

    Every other life dies at any point, all alike; those between at the kind of point with the fewest deaths.

    Args:
        whole: points of an undisturbed run.   died_at: deaths per kind of point, over all runs; counted here.
        tried: lives that were to end there; some are over before they come there.
    """
    rng = random.Random(seed)
    for life in range(LIVES_PER_RUN):
        done = max(complete_steps(folder), default=0)
        share = 1 - done / plan.schedule.max_num_steps
        kind = None if life % 2 else min(sorted(whole), key=lambda kind: (died_at[kind], tried[kind]))
        if kind is not None:
            tried[kind] += 1
        count = whole.total() if kind is None else whole[kind]
        death = Death(folder=folder, at=rng.randrange(max(1, int(share * count))), kind=kind)
        if live_once(plan, folder, death, rng):
            break
        assert death.where is not None
        died_at[death.where] += 1  # the next life reads checkpoints and ledger, and fails if one is torn
    else:
        assert live_once(plan, folder, Death(folder=folder, at=None), rng)
    check_end(plan, folder)


@pytest.mark.parametrize("name", PLANS)
def test_a_run_that_is_killed_anywhere_trains_every_prompt_exactly_once(tmp_path: Path, name: str) -> None:
    plan = PLANS[name]
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    whole = Death(folder=undisturbed, at=None)
    assert live_once(plan, undisturbed, whole, random.Random(0))
    check_end(plan, undisturbed)

    died_at: Counter[str] = Counter()
    tried: Counter[str] = Counter()
    seed = 0
    enough = KILLS / len(PLANS)
    # A kind that is rare may take some more runs.
    while died_at.total() < enough or (whole.seen.keys() - died_at.keys() and died_at.total() < 2 * enough):
        seed += 1
        folder = tmp_path / f"run_{seed}"
        folder.mkdir()
        kill_and_resume(plan, folder, seed=seed, whole=whole.seen, died_at=died_at, tried=tried)
    missed = whole.seen.keys() - died_at.keys()
    print(
        f"{name}: {died_at.total()} kills in {seed} runs at {len(died_at)} kinds of points; missed: {missed}"
    )
    if KILLS >= 1000:  # fewer are for a quick look
        must = MUST_DIE_AT if plan.failing is not None else MUST_DIE_AT - {"after a prompt is dropped"}
        assert (missed | must) - died_at.keys() == set()
