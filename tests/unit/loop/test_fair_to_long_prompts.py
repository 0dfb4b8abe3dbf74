"""Long responses are trained as often as they are sampled, also when the run is killed while they are under way.

At each kill the groups in flight tend to be long ones, because the short ones are finished and saved. Nothing may
replace them: a resume asks for the same prompts again, with the same seeds.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from bisect import bisect_right
from pathlib import Path

import pytest
import torch

from megatron_ppo.collector.seeds import sample_seed
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.testing.fakes import skewed_length
from tests.unit.loop.fake_run import GENERATIONS, PROMPTS
from tests.unit.loop.kill_anywhere import Death, Plan, live_once

LONGEST = 40
SEED = 42
PLAN = Plan(
    schedule=AsyncSchedule(max_num_steps=60, max_trajectory_age_steps=2),
    checkpoint_period=1,
    asynchronous=False,
    load_replay_buffer=True,
    seed=SEED,
    max_new_tokens=LONGEST,
)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def lengths_by_ordinal(folder: Path) -> dict[int, list[int]]:
    lengths: dict[int, list[int]] = {}
    for line in (folder / "trained_groups.jsonl").read_text().splitlines():
        row = json.loads(line)
        lengths.setdefault(row["ordinal"], []).append(len(row["response"]))
    return lengths


def run_with_kills(plan: Plan, folder: Path, *, points_per_life: int) -> int:
    """Kill the run every so many points until it is complete; how often it was killed."""
    rng = random.Random(3)
    kills = 0
    while not live_once(plan, folder, Death(folder=folder, at=rng.randrange(points_per_life)), rng):
        kills += 1
        assert kills < 2000, "the run makes no progress"
    return kills


def distance(sample: list[int], population: list[int]) -> float:
    """Kolmogorov-Smirnov: the largest difference of the two distribution functions."""
    ordered, everyone = sorted(sample), sorted(population)
    return max(
        abs(bisect_right(ordered, x) / len(ordered) - bisect_right(everyone, x) / len(everyone))
        for x in range(1, LONGEST + 1)
    )


def test_trained_lengths_are_distributed_as_sampled_ones_through_resumes(tmp_path: Path) -> None:
    kills = run_with_kills(PLAN, tmp_path, points_per_life=250)
    assert kills > 20
    trained = lengths_by_ordinal(tmp_path)
    steps = PLAN.schedule.max_num_steps
    assert trained == {
        q: [skewed_length(sample_seed(SEED, q, i), LONGEST) for i in range(GENERATIONS)]
        for q in range(steps * PROMPTS)
    }
    lengths = [length for group in trained.values() for length in group]
    population = [skewed_length(seed, LONGEST) for seed in range(20_000)]
    # The 1 % critical value of the test. The draw is fixed by the seed: the verdict is always the same.
    assert distance(lengths, population) < 1.63 / math.sqrt(len(lengths))


def test_a_run_that_loses_its_longest_responses_is_seen_by_the_test() -> None:
    """The control: a sample of that size without its longest fifth."""
    population = [skewed_length(seed, LONGEST) for seed in range(20_000)]
    sample = sorted(skewed_length(sample_seed(SEED, q, 0), LONGEST) for q in range(240))[:192]
    assert distance(sample, population) > 1.63 / math.sqrt(len(sample))


def test_drawing_anew_after_each_kill_trains_other_responses_than_were_sampled(tmp_path: Path) -> None:
    """The control of the exact comparison: kills do meet groups in flight, so the seeds matter."""
    plan = dataclasses.replace(PLAN, schedule=AsyncSchedule(max_num_steps=8, max_trajectory_age_steps=2))
    run_with_kills(plan, tmp_path, points_per_life=250)
    redrawn = tmp_path / "redrawn"
    redrawn.mkdir()
    run_with_kills(dataclasses.replace(plan, seed=None), redrawn, points_per_life=250)
    assert lengths_by_ordinal(redrawn) != lengths_by_ordinal(tmp_path)
