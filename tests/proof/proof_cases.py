"""The runs that the proof consists of, and what each has to show. Plain data, no heavy imports.

`run_proof.py` executes them; `proof_report.py` renders their results.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

DEFAULT_SEEDS = tuple(range(10))
SEEDS_ALLOWED_TO_FAIL = 1
"""Gates pass for at least 9 of 10 seeds."""

SYNC = "+experiment=megatron_40step_sync"
LAG4 = "+experiment=megatron_40step_lag4"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run of the real job.

    Attributes:
        section: seeds, variants, long, real, chaos or broken; the part of the report that it belongs to.
        words: configuration, as on the command line.
        bug: key of `alterations.ALTERATIONS`; None runs the job as it is.
        ranks: trainer ranks.
        rejected_by: gates of which at least one must fail; empty when all gates must pass.
        shows: for the report, what was broken or varied.
    """

    id: str
    section: str
    words: tuple[str, ...]
    bug: str | None = None
    ranks: int = 1
    rejected_by: tuple[str, ...] = ()
    shows: str


def seed_case(seed: int) -> Case:
    """The default experiment with another seed."""
    return Case(
        id=f"seed_{seed}",
        section="seeds",
        words=("+experiment=megatron_40step", f"run.seed={seed}"),
        shows=f"run.seed={seed}",
    )


VARIANTS = (
    *(
        Case(
            id=f"variant_{name}",
            section="variants",
            words=(f"+experiment=megatron_40step_{name}",),
            shows=shows,
        )
        for name, shows in (
            ("banked", "rollouts banked two steps ahead during critic warm-up"),
            ("nowarmup", "policy trained from step 1"),
        )
    ),
    Case(
        id="variant_two_ranks",
        section="variants",
        words=("+experiment=megatron_40step", "run.seed=0"),
        ranks=2,
        shows="two trainer ranks, policy and critic at TP2",
    ),
)

# Several seeds, because the critic of one of them says little: at the end hardly any variance is left to explain.
LONG = tuple(
    Case(
        id=f"long_{seed}",
        section="long",
        words=("+experiment=megatron_40step_long", f"run.seed={seed}"),
        shows=f"run.seed={seed}",
    )
    for seed in (1, 2, 3, 4)
)

REAL = (
    Case(
        id="real_smollm2",
        section="real",
        words=("+experiment=smollm2_135m_chain_sum",),
        shows="SmolLM2-135M-Instruct on chain_sum, asynchronous",
    ),
)

# The same run without and with faults: what they cost is the difference.
CHAOS = (
    Case(
        id="chaos_off",
        section="chaos",
        words=("+experiment=chaos_40step", "chaos=disabled", "run.seed=0"),
        shows="no faults",
    ),
    Case(
        id="chaos_on",
        section="chaos",
        words=("+experiment=chaos_40step", "run.seed=0"),
        shows="every kind of fault",
    ),
)

LEARNT_NOTHING = ("final_reward", "reward_gain", "final_validation", "validation_gain")
CRITIC_IS_WRONG = ("critic_learns", "critic_keeps_up")


def _broken(
    name: str, rejected_by: tuple[str, ...], shows: str, *, at: str = SYNC, more: tuple[str, ...] = ()
) -> Case:
    return Case(
        id=f"broken_{name}",
        section="broken",
        words=(at, "run.seed=0", *more),
        bug=name,
        rejected_by=rejected_by,
        shows=shows,
    )


def _control(name: str, words: tuple[str, ...], shows: str) -> Case:
    return Case(id=f"control_{name}", section="broken", words=words, shows=shows)


BROKEN = (
    _control("sync", (SYNC, "run.seed=0"), "nothing broken, age 0"),
    _broken("sign", LEARNT_NOTHING, "advantage sign flipped"),
    _broken(
        "shift_logp",
        ("final_reward", "clip_fraction"),
        "PPO denominator shifted by one token",
    ),
    _broken("shuffle_reward", LEARNT_NOTHING, "rewards shuffled between sequences"),
    _broken(
        "gae_mask_short", LEARNT_NOTHING, "GAE mask one token short, so the reward sits on a masked token"
    ),
    _broken("values_shift", CRITIC_IS_WRONG, "values shifted by one token, 0 at the last"),
    _broken("critic_frozen", CRITIC_IS_WRONG, "critic never trained"),
    _broken("stale_old", ("learning_speed", "clip_fraction"), "PPO denominator from weights four steps old"),
    _broken(
        "never_synced",
        ("final_reward", "generation_kl"),
        "engine keeps the weights of version 0",
        # The probe would end the run at the first publish; here it only reports, so that the other gates are seen.
        more=("refit.probe_tolerance_nats=1e9",),
    ),
    _control("lag4", (LAG4, "run.seed=0"), "nothing broken, age 4, importance weights capped at 2"),
    _broken("no_importance_weights", ("lag4_reward",), "age 4 without importance weights", at=LAG4),
    _broken("inverted_importance_weights", ("lag4_reward",), "age 4, importance weights inverted", at=LAG4),
)


def all_cases(seeds: tuple[int, ...] = DEFAULT_SEEDS) -> tuple[Case, ...]:
    """Every case in the order in which they run."""
    return (*(seed_case(seed) for seed in seeds), *VARIANTS, *LONG, *REAL, *CHAOS, *BROKEN)


def select(cases: tuple[Case, ...], patterns: list[str]) -> tuple[Case, ...]:
    """Cases whose id or section matches one of the shell patterns; all without patterns.

    Raises: ValueError for a pattern that matches nothing.
    """
    for pattern in patterns:
        if not any(fnmatch(case.id, pattern) or fnmatch(case.section, pattern) for case in cases):
            raise ValueError(
                f"--only {pattern} matches no case; cases: {', '.join(case.id for case in cases)}"
            )
    return tuple(
        case
        for case in cases
        if not patterns or any(fnmatch(case.id, p) or fnmatch(case.section, p) for p in patterns)
    )
