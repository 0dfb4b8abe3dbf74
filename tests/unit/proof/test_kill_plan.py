"""What the kill table consists of, and when a kill strikes, on made-up heartbeats."""

from __future__ import annotations

import json
import time
from collections import Counter
from pathlib import Path

import pytest
from kill_plan import (
    EPOCH,
    PROMPTS,
    STEPS,
    WARM_UP,
    Kill,
    Moment,
    Phase,
    Victim,
    all_kills,
    chain_settings,
    epoch_rows,
    needs_own_core,
    next_chain,
    select_kills,
)
from kill_watch import DEFAULT_STAGE_S, Point, StageWatch, Trigger, stage_seconds

from megatron_ppo.config.compose import parse_command_line

ONE_STEP = (
    "exposed_generation", "between stages", "value_inference", "policy_and_reference_logprobs", "update",
    "value_training", "update", "policy_training", "update", "weight_sync", "between stages", "checkpointing",
    "between stages",
)  # fmt: skip


def points(steps: int) -> list[Point]:
    """The way of a run as its heartbeat shows it; frozen steps neither train the policy nor publish."""
    frozen = {"policy_training", "weight_sync"}
    return [
        Point(stage, row)
        for row in range(1, steps + 1)
        for stage in ONE_STEP
        if not (row <= WARM_UP and stage in frozen)
    ]


def trigger(phase: Phase, moment: Moment, checkpoints: Path = Path("none")) -> Trigger:
    kill = Kill(id="x", victim=Victim.TREE, phase=phase, moment=moment, share=0.5, rank=0)
    return Trigger(kill, epochs=epoch_rows(STEPS), checkpoints=checkpoints)


def test_the_plan_has_every_victim_in_every_phase_and_more_than_fifty_kills() -> None:
    kills = all_kills()
    assert {(kill.victim, kill.phase) for kill in kills} == {(v, p) for v in Victim for p in Phase}
    assert len(kills) >= 50 and len({kill.id for kill in kills}) == len(kills)
    for moment in Moment:
        of_moment = [kill for kill in kills if kill.moment is moment]
        assert {kill.phase for kill in of_moment} == set(Phase)
        assert {kill.victim for kill in of_moment} == set(Victim)
    assert kills == all_kills()
    assert {kill.rank for kill in kills if kill.victim is Victim.TRAINER} == {0, 1}


def test_chains_use_every_kill_once_and_mix_victims_and_phases() -> None:
    pending = list(all_kills())
    done: Counter[str] = Counter()
    while chain := next_chain(pending, length=7):
        assert len({kill.phase for kill in chain}) == len(chain)
        assert len({needs_own_core(kill) for kill in chain}) == 1
        assert chain_settings(0, chain).engine_core == ("process" if needs_own_core(chain[0]) else "thread")
        phases = [kill.phase for kill in chain]
        assert phases == sorted(phases, key=tuple(Phase).index)  # the one in warm-up comes first
        done.update(kill.id for kill in chain)
        pending = [kill for kill in pending if kill not in chain]
    assert done == Counter(kill.id for kill in all_kills())


def test_a_chain_takes_other_victims_before_it_repeats_one() -> None:
    pending = select_kills(all_kills(), ["tree-*", "raylet-*", "buffer-*"])
    assert {kill.victim for kill in next_chain(pending, length=3)} == {
        Victim.TREE,
        Victim.RAYLET,
        Victim.BUFFER,
    }
    assert len(next_chain(pending, length=7)) == 7
    assert next_chain([], length=7) == ()


@pytest.mark.parametrize("number", range(4))
def test_the_run_of_a_chain_is_a_valid_command(number: int) -> None:
    settings = chain_settings(number)
    (config,) = parse_command_line(settings.words).load()
    assert config.run.max_num_steps == STEPS
    assert config.schedule.policy_training_start_step == WARM_UP
    assert config.algorithm.num_prompts_per_step == PROMPTS


def test_epochs_end_inside_of_steps_and_at_their_borders() -> None:
    rows = epoch_rows(STEPS)
    assert rows == {
        row
        for row in range(1, STEPS + 1)
        if any((row - 1) * PROMPTS < end <= row * PROMPTS for end in range(EPOCH, STEPS * PROMPTS + 1, EPOCH))
    }
    inside = [end for end in range(EPOCH, STEPS * PROMPTS, EPOCH) if end % PROMPTS]
    assert inside and len(inside) < len(rows)


@pytest.mark.parametrize(
    ("phase", "moment", "struck"),
    [
        (Phase.WARM_UP, Moment.BEFORE, Point("exposed_generation", 1)),
        (Phase.WARM_UP, Moment.DURING, Point("value_training", 1)),
        (Phase.WARM_UP, Moment.AFTER, Point("exposed_generation", WARM_UP + 1)),
        (Phase.ROLLOUT_WAIT, Moment.BEFORE, Point("checkpointing", WARM_UP + 1)),
        (Phase.ROLLOUT_WAIT, Moment.DURING, Point("exposed_generation", WARM_UP + 1)),
        (Phase.ROLLOUT_WAIT, Moment.AFTER, Point("between stages", WARM_UP + 1)),
        (Phase.LOGPROBS, Moment.BEFORE, Point("value_inference", WARM_UP + 1)),
        (Phase.LOGPROBS, Moment.AFTER, Point("update", WARM_UP + 1)),
        (Phase.CRITIC, Moment.DURING, Point("value_training", WARM_UP + 1)),
        (Phase.POLICY, Moment.DURING, Point("policy_training", WARM_UP + 1)),
        (Phase.REFIT, Moment.BEFORE, Point("policy_training", WARM_UP + 1)),
        (Phase.REFIT, Moment.DURING, Point("weight_sync", WARM_UP + 1)),
        (Phase.SAVE, Moment.AFTER, Point("between stages", WARM_UP + 1)),
        (Phase.EPOCH, Moment.BEFORE, Point("exposed_generation", 2)),
        (Phase.EPOCH, Moment.DURING, Point("exposed_generation", 3)),
        (Phase.EPOCH, Moment.AFTER, Point("exposed_generation", 4)),
    ],
)
def test_a_kill_strikes_in_its_phase(phase: Phase, moment: Moment, struck: Point) -> None:
    waiting = trigger(phase, moment)
    seen: list[Point] = []
    for point in (Point("starting", None), Point("between stages", 0), *points(STEPS)):
        seen.append(point)
        if waiting.fires(point):
            break
    assert seen[-1] == struck
    after = [p.stage for p in seen[:-1]]
    if moment is Moment.AFTER and phase is Phase.SAVE:
        assert after[-1] == "checkpointing"


def test_a_kill_in_a_half_written_save_waits_for_a_file_of_the_models(tmp_path: Path) -> None:
    waiting, point = trigger(Phase.HALF_SAVE, Moment.DURING, tmp_path), Point("checkpointing", WARM_UP + 2)
    assert not waiting.fires(point)
    models = tmp_path / "tmp_step_4" / "models" / "policy"
    models.mkdir(parents=True)
    assert not waiting.fires(point)
    (models / "__0_0.distcp").write_bytes(b"half")
    assert waiting.fires(point)
    (tmp_path / "tmp_step_4" / "files.json").write_text("{}")
    assert not waiting.fires(point)


def test_the_delay_is_a_part_of_what_the_stage_took_before() -> None:
    rows = [
        {"timing/train/weight_sync": 3.0},
        {"timing/train/weight_sync": 2.0, "timing/train/policy_training": 1.0},
        {},
    ]
    assert stage_seconds(rows, "weight_sync") == 2.0
    assert stage_seconds(rows, "checkpointing") == DEFAULT_STAGE_S
    assert trigger(Phase.REFIT, Moment.DURING).delay_s(rows) == 1.0
    assert 0.6 < trigger(Phase.REFIT, Moment.BEFORE).delay_s(rows) < 1.0
    assert trigger(Phase.REFIT, Moment.AFTER).delay_s(rows) == 0.0


def test_signs_of_an_earlier_life_are_not_taken_for_this_one(tmp_path: Path) -> None:
    path = tmp_path / "trainer_rank_0.json"
    now = time.time()
    watch = StageWatch(path, now)
    assert watch.look() == Point("not started", None)

    def beat(stage: str, at: float) -> None:
        path.write_text(json.dumps({"beat_unix_s": at, "detail": {"stage": stage, "step": 3}}))

    beat("weight_sync", now - 1)
    assert watch.look() == Point("not started", None)
    time.sleep(0.01)
    beat("update", now + 1)
    assert watch.look() == Point("update", 3)
