"""Which processes of a real run are killed, and when. Plain data, no heavy imports.

`kill_chain.py` carries it out, `run_proof.py --only kills` drives that. Each victim meets each phase once; the moment
(before, during, after) goes round, so that every victim and every phase meets every moment.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

STEPS = 24
PROMPTS, SAMPLES = 4, 4
EPOCH = 10
"""Prompts per epoch: no multiple of a step's, so an epoch ends inside of steps as well as at their borders."""
WARM_UP = 2
LEAD = 2


class Victim(StrEnum):
    """What is killed with SIGKILL."""

    TREE = "the whole tree"
    TRAINER = "a trainer rank"
    ENGINE_CORE = "the engine core"
    ENGINE = "the engine actor"
    COLLECTOR = "the collector"
    BUFFER = "the replay buffer"
    RAYLET = "the raylet"


class Phase(StrEnum):
    """Of a step, or of the run."""

    WARM_UP = "warm-up"
    ROLLOUT_WAIT = "rollout wait"
    LOGPROBS = "log-probs"
    CRITIC = "critic training"
    POLICY = "policy training"
    REFIT = "refit"
    SAVE = "save"
    HALF_SAVE = "half-written save"
    EPOCH = "epoch boundary"


class Moment(StrEnum):
    """Where in the phase: at its beginning's predecessor, inside, or as soon as it is over."""

    BEFORE = "before"
    DURING = "during"
    AFTER = "after"


STAGES: dict[Phase, str] = {
    Phase.ROLLOUT_WAIT: "exposed_generation",
    Phase.LOGPROBS: "policy_and_reference_logprobs",
    Phase.CRITIC: "value_training",
    Phase.POLICY: "policy_training",
    Phase.REFIT: "weight_sync",
    Phase.SAVE: "checkpointing",
}
"""Names under which the trainer's heartbeat shows them."""
STAGE_BEFORE: dict[str, str] = {
    "exposed_generation": "checkpointing",
    "policy_and_reference_logprobs": "value_inference",
    "value_training": "policy_and_reference_logprobs",
    "policy_training": "value_training",
    "weight_sync": "policy_training",
    "checkpointing": "weight_sync",
}
"""What runs before each of them; between the two is nothing that takes longer than a heartbeat."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill.

    Attributes:
        share: how far into its stage, 0 to 1, by the time that the stage took in the steps before.
        rank: of the trainer rank that dies, if one does; such a run has two.
    """

    id: str
    victim: Victim
    phase: Phase
    moment: Moment
    share: float
    rank: int

    @property
    def num_ranks(self) -> int:
        """Trainer ranks of the life in which it happens."""
        return 2 if self.victim is Victim.TRAINER else 1

    @property
    def when(self) -> str:
        """In words."""
        if self.phase is Phase.HALF_SAVE:
            return f"in a {self.phase}"
        return f"{self.moment} {self.phase}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSettings:
    """How the run of one chain of kills is configured; it stays the same over all of its lives.

    Attributes:
        engine_core: only in a process of its own can it be killed by itself.   extra: further words.
    """

    name: str
    seed: int
    age: int
    async_save: bool
    load_replay_buffer: bool
    steps: int = STEPS
    engine_core: str = "thread"
    extra: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Command line."""
        return (
            "+experiment=cpu_smoke", f"run.seed={self.seed}", f"run.max_num_steps={self.steps}",
            f"data.num_train={EPOCH}", "data.num_validation=8", "algorithm.ppo_epochs=1",
            f"schedule.policy_training_start_step={WARM_UP}", f"schedule.warmup_generation_lead_steps={LEAD}",
            f"schedule.max_trajectory_age_steps={self.age}", f"inference.engine_core={self.engine_core}",
            "checkpoint.period=1", f"checkpoint.async_save={str(self.async_save).lower()}",
            f"checkpoint.load_replay_buffer={str(self.load_replay_buffer).lower()}",
            "telemetry.record_trajectories=true", "telemetry.tensorboard=false",
            "validation.period=0", "validation.at_start=false", "validation.at_end=false",
            "gates.age_in_versions=null", *self.extra,
        )  # fmt: skip


def all_kills(seed: int = 0) -> tuple[Kill, ...]:
    """Every victim in every phase."""
    rng = random.Random(f"kills/{seed}")
    moments = tuple(Moment)
    kills = []
    for row, victim in enumerate(Victim):
        for column, phase in enumerate(Phase):
            kills.append(
                Kill(
                    id=f"{victim.name.lower()}-{phase.name.lower()}",
                    victim=victim,
                    phase=phase,
                    moment=moments[(row + column) % len(moments)],
                    share=rng.random(),
                    rank=rng.randrange(2),
                )
            )
    return tuple(kills)


def next_chain(pending: Sequence[Kill], *, length: int) -> tuple[Kill, ...]:
    """The kills that one run goes through next: different phases, and different victims as far as there are any.

    One in warm-up comes first, while the run is there; the others in the order in which their phases come in a step.
    Engine cores are killed in runs of their own, because only they need an engine in two processes.
    """
    chosen: list[Kill] = []
    for may_repeat in (False, True):
        for kill in pending:
            if len(chosen) == length:
                break
            if kill in chosen or (chosen and needs_own_core(kill) is not needs_own_core(chosen[0])):
                continue
            victims, phases = {other.victim for other in chosen}, {other.phase for other in chosen}
            if kill.phase not in phases and (may_repeat or kill.victim not in victims):
                chosen.append(kill)
    order = tuple(Phase)
    return tuple(sorted(chosen, key=lambda kill: order.index(kill.phase)))


def needs_own_core(kill: Kill) -> bool:
    """Whether the engine core has to be a process, and not a thread of the engine's actor."""
    return kill.victim is Victim.ENGINE_CORE


def chain_settings(number: int, kills: Sequence[Kill] = ()) -> ChainSettings:
    """The configuration of the run number `number`: ages, ways to save and to restore go round."""
    return ChainSettings(
        name=f"chain_{number}",
        seed=number,
        age=1 + number % 2,
        async_save=number % 4 < 2,
        load_replay_buffer=number % 3 != 2,
        engine_core="process" if any(map(needs_own_core, kills)) else "thread",
    )


def epoch_rows(steps: int) -> frozenset[int]:
    """Rows (completed steps) whose prompts, in the order of the stream, belong to two epochs or end one."""
    return frozenset(-(-end // PROMPTS) for end in range(EPOCH, steps * PROMPTS + 1, EPOCH))


def select_kills(kills: Iterable[Kill], patterns: Sequence[str]) -> tuple[Kill, ...]:
    """Kills whose id matches one of the shell patterns, all without patterns."""
    from fnmatch import fnmatch

    return tuple(kill for kill in kills if not patterns or any(fnmatch(kill.id, p) for p in patterns))
