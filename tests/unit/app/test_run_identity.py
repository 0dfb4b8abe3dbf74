"""What a resume notices when other content came under the same path, and what it does then."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.app.identity import run_identity
from megatron_ppo.config.checks import derive
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.data.tasks import build_task
from megatron_ppo.loop.identity import Trait, differences
from megatron_ppo.protocol.errors import CheckpointError
from tests.unit.config.composed import changed
from tests.unit.hf_folder import TINY_QWEN2, write_model_folder


class World:
    """Everything that a run reads from outside, to be changed between two attempts."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.critic = folder / "policy", folder / "critic"
        for path in (self.policy, self.critic):
            write_model_folder(path, TINY_QWEN2)
            (path / "tokenizer.json").write_text('{"model": {}}')
        self.config: RunConfig = changed({})
        self.task: TaskSpec = build_task("sort3_5", num_train=20, num_validation=4)
        self.reference = False

    def traits(self) -> dict[str, Trait]:
        derived = dataclasses.replace(derive(self.config), needs_reference=self.reference)
        return run_identity(
            self.config, derived, task=self.task, policy_folder=self.policy, critic_folder=self.critic
        )


def other_seed(world: World) -> None:
    world.config = changed({"run.seed": 7})


def other_prompts(world: World) -> None:
    world.task = dataclasses.replace(world.task, train=world.task.train[:-1])


def other_order(world: World) -> None:
    world.task = dataclasses.replace(world.task, train=world.task.train[::-1])


def other_answer(world: World) -> None:
    first, *others = world.task.train
    world.task = dataclasses.replace(world.task, train=(dataclasses.replace(first, answer="?"), *others))


def other_validation(world: World) -> None:
    world.task = dataclasses.replace(world.task, validation=world.task.validation[:-1])


def other_place(world: World) -> None:
    world.config = changed({"data.num_validation": 4})


def other_age(world: World) -> None:
    world.config = changed({"schedule.max_trajectory_age_steps": 2})


def other_step(world: World) -> None:
    world.config = changed({"algorithm.num_prompts_per_step": 32})


def other_group(world: World) -> None:
    world.config = changed({"algorithm.num_generations_per_prompt": 8, "algorithm.num_prompts_per_step": 8})


def other_tokenizer(world: World) -> None:
    (world.policy / "tokenizer.json").write_text('{"model": {"a": 1}}')


def other_rope(world: World) -> None:
    (world.policy / "config.json").write_text(json.dumps({**TINY_QWEN2, "rope_theta": 9.0}))


def other_weights(world: World) -> None:
    _flip_last_byte(world.policy / "model.safetensors")


def other_critic_rope(world: World) -> None:
    (world.critic / "config.json").write_text(json.dumps({**TINY_QWEN2, "rope_theta": 9.0}))


def other_critic_weights(world: World) -> None:
    _flip_last_byte(world.critic / "model.safetensors")


def _flip_last_byte(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("change", "name", "why"),
    [
        (other_seed, "run.seed", "order of prompts"),
        (other_prompts, "data.train", "trained twice or never"),
        (other_order, "data.train", "trained twice or never"),
        (other_answer, "data.train", "trained twice or never"),
        (other_tokenizer, "policy.model.tokenizer", "other tokens"),
        (other_rope, "policy.model.config", "another function"),
        (other_critic_rope, "critic.model.config", "another function"),
    ],
)
def test_a_change_that_would_spoil_the_run_is_refused_with_the_reason(
    tmp_path: Path, change: Any, name: str, why: str
) -> None:
    world = World(tmp_path)
    saved = {key: trait.value for key, trait in world.traits().items()}
    assert differences(tmp_path, saved, world.traits()) == []
    change(world)
    with pytest.raises(CheckpointError, match=rf"{name} was \S+ when it was saved.*{why}"):
        differences(tmp_path, saved, world.traits())


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (other_validation, "data.validation"),
        (other_place, "data"),
        (other_weights, "policy.model.content"),
        (other_critic_weights, "critic.model.content"),
        (other_age, "schedule.max_trajectory_age_steps"),
        (other_step, "algorithm.num_prompts_per_step"),
        (other_group, "algorithm.num_generations_per_prompt"),
    ],
)
def test_a_change_that_the_checkpoint_makes_up_for_is_told(tmp_path: Path, change: Any, name: str) -> None:
    world = World(tmp_path)
    saved = {key: trait.value for key, trait in world.traits().items()}
    change(world)
    told = differences(tmp_path, saved, world.traits())
    assert any(f"{name} was " in line and "the run goes on" in line for line in told)
    assert len(told) == 1 + (change is other_group)  # which keeps the size of a step


def test_other_initial_weights_are_refused_where_they_are_the_reference(tmp_path: Path) -> None:
    world = World(tmp_path)
    world.reference = True
    saved = {key: trait.value for key, trait in world.traits().items()}
    other_weights(world)
    with pytest.raises(CheckpointError, match="reference model of the KL term"):
        differences(tmp_path, saved, world.traits())
