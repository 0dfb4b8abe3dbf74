"""Rules of the section `chaos`: a run that could not survive its own faults, or would not have any, is refused.

Driven by `checks.derive`. Because every decision is a function of the seed, the steps and publications of the whole run
can be looked at before anything starts.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.faults import FaultKind, FaultPlan

_ATTEMPTS_LOOKED_AT = 8
"""A version is published once, again after every failure, and once more for each engine that came back."""


def fault_problems(config: RunConfig) -> Iterator[str]:
    """One line for each rule that the faults of `config` break."""
    plan = config.chaos.plan()
    if plan.kinds and config.run.deterministic:
        on = ", ".join(f"chaos.{kind.config_key}" for kind in plan.kinds)
        yield f"run.deterministic: got True; must be false with {on}, which strike whole steps or at any moment"
    yield from _recovery_problems(config, plan)
    yield from _schedule_problems(config, plan)


def _recovery_problems(config: RunConfig, plan: FaultPlan) -> Iterator[str]:
    """What the faults need to be survived."""
    chaos, on = config.chaos, plan.kinds
    if FaultKind.KILL_ENGINE in on and config.inference.max_engine_restarts == 0:
        yield (
            f"chaos.kill_engine: got {chaos.kill_engine}; must be 0 with inference.max_engine_restarts=0, where the "
            "first death of an engine ends the run"
        )
    if FaultKind.HANG_REWARD in on and config.reward.isolation != "process":
        yield (
            f"chaos.hang_reward: got {chaos.hang_reward}; must be 0 with reward.isolation={config.reward.isolation}, "
            "where a reward function that hangs cannot be killed"
        )
    if config.collector.max_retries == 0 and config.schedule.max_generation_failures == 0:
        for kind in (FaultKind.FAIL_GENERATION, FaultKind.HANG_REWARD, FaultKind.RAISE_REWARD):
            if kind in on:
                yield (
                    f"chaos.{kind}: got {plan.rates[kind]}; must be 0 with collector.max_retries=0 and "
                    "schedule.max_generation_failures=0, where the first one ends the run"
                )
    if chaos.delay_refit_s >= config.refit.timeout_s:
        yield (
            f"chaos.delay_refit_s: got {chaos.delay_refit_s}; must be less than "
            f"refit.timeout_s={config.refit.timeout_s}"
        )


def _schedule_problems(config: RunConfig, plan: FaultPlan) -> Iterator[str]:
    """What the seed does to the steps and publications of this run."""
    steps = config.run.max_num_steps
    if FaultKind.KILL_ENGINE in plan.kinds:
        struck = [step for step in range(steps) if plan.strikes(FaultKind.KILL_ENGINE, step)]
        if not struck:
            yield _never(config, FaultKind.KILL_ENGINE, f"none of {steps} steps")
        restarts = config.inference.max_engine_restarts * config.inference.replicas
        if len(struck) > restarts > 0:
            yield (
                f"chaos.kill_engine: got {config.chaos.kill_engine}; with chaos.seed={config.chaos.seed} it strikes "
                f"{len(struck)} steps, but only {restarts} deaths are survived "
                "(inference.replicas * inference.max_engine_restarts)"
            )
    if FaultKind.FAIL_REFIT in plan.kinds:
        yield from _publication_problems(config, plan)


def _publication_problems(config: RunConfig, plan: FaultPlan) -> Iterator[str]:
    versions = range(max(0, config.run.max_num_steps - config.schedule.policy_training_start_step) + 1)
    allowed = config.refit.max_retries
    if not any(plan.strikes(FaultKind.FAIL_REFIT, version, 0) for version in versions):
        yield _never(config, FaultKind.FAIL_REFIT, f"none of {len(versions)} publications")
    for version in versions:
        failures = 0
        for attempt in range(_ATTEMPTS_LOOKED_AT):
            failures = failures + 1 if plan.strikes(FaultKind.FAIL_REFIT, version, attempt) else 0
            if failures > allowed:
                yield (
                    f"chaos.fail_refit: got {config.chaos.fail_refit}; with chaos.seed={config.chaos.seed} the "
                    f"publication of version {version} fails {failures} times in a row, refit.max_retries allows "
                    f"{allowed}; choose a lower rate, another seed or more retries"
                )
                return


def _never(config: RunConfig, kind: FaultKind, of_what: str) -> str:
    return (
        f"chaos.{kind}: got {getattr(config.chaos, kind.config_key)}; with chaos.seed={config.chaos.seed} it strikes "
        f"{of_what}, so the run would prove nothing; choose a higher rate or another seed"
    )
