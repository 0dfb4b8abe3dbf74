"""The training loop: asynchronous PPO, and at age 0 synchronous PPO, in one code path.

SPMD: every trainer rank runs this same code and holds the same ports. The loop owns the order of a step and the
step counter, nothing else; whatever has state lives in a part.

A run that has to end between two steps, because of a signal, a dead collector or buffer, or weights that reach no
engine, is saved first.

Order in a step: take the groups; mismatch metrics and masks; critic values, then policy log-probs, then reference
log-probs; advantages; per epoch all critic minibatches, then all policy minibatches; publish one new version;
open the next window; validate if due; save if due; write the row; make a complete save visible. A deterministic run
opens the window last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from megatron_ppo.data.batch import TrainBatch, pack_groups
from megatron_ppo.loop.age import age_metrics
from megatron_ppo.loop.mismatch import mask_mismatched_sequences
from megatron_ppo.loop.ports import (
    Advantage,
    Checkpoints,
    Critic,
    GroupSource,
    Metrics,
    Policy,
    Refit,
    StepLog,
    Telemetry,
    Validator,
)
from megatron_ppo.loop.residency import Model, Residency
from megatron_ppo.loop.rollout_metrics import rollout_metrics
from megatron_ppo.numerics.masking import trainable_mask
from megatron_ppo.protocol.errors import (
    CheckpointError,
    GroupMismatchError,
    MegatronPPOError,
    NonFiniteError,
    PartDiedError,
    RankZeroFailedError,
    RefitError,
    StopRequested,
    WaitTimeoutError,
    WeightMismatchError,
)
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import PromptGroup

logger = logging.getLogger(__name__)

# Met by all ranks together, with every model as the last complete step has left it.
_ENDING = (PartDiedError, WaitTimeoutError, RefitError)
# Rank 0 does not save, so nobody can; and weights that may be wrong themselves are no state to go on from.
_NOT_SAVED = (RankZeroFailedError, WeightMismatchError)
# Somebody did not come: what a person needs to find out who, is to be seen now and not after the end.
_STALLS = (WaitTimeoutError, RefitError)


def _nothing_interrupts() -> None:
    """The default of `Parts.check_interrupted`."""


def _explains_nothing(_error: MegatronPPOError) -> None:
    """The default of `Parts.explain`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """What the loop needs to know of the run.

    Attributes:
        seed: of minibatch shuffling, together with step and epoch.
        num_prompts_per_step, num_generations_per_prompt: N and G; a step trains on exactly N·G sequences.
        ppo_epochs: passes over the batch per step.   train_global_batch_size: sequences per optimizer step.
        seq_logprob_error_threshold: sequences whose mismatch exceeds it are masked; None masks nothing.
        overlong_filtering: exclude truncated responses from every loss.
        use_reference: compute reference log-probs (a KL term needs them).
        validation_period, checkpoint_period: in steps; 0 is never.
        generates_alone: a window opens only when nothing else is left to do before its step. At age 0 nothing is then
            generated beside a validation or a save, which therefore see the same every time.
    """

    max_num_steps: int
    seed: int
    num_prompts_per_step: int
    num_generations_per_prompt: int
    ppo_epochs: int
    train_global_batch_size: int
    shuffle_minibatches: bool
    pad_token_id: int
    seq_logprob_error_threshold: float | None
    overlong_filtering: bool
    use_reference: bool
    validation_period: int
    validate_at_start: bool
    validate_at_end: bool
    checkpoint_period: int
    generates_alone: bool = False

    def validation_due(self, step: int) -> bool:
        """Whether to validate after `step` completed steps."""
        periodic = self.validation_period > 0 and step % self.validation_period == 0
        return periodic or (self.validate_at_end and step == self.max_num_steps)

    def checkpoint_due(self, step: int) -> bool:
        """Whether to save after `step` completed steps; a run that saves at all also saves its last step."""
        if self.checkpoint_period <= 0:
            return False
        return step % self.checkpoint_period == 0 or step == self.max_num_steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The loop's collaborators; the app makes the real ones, the unit tests make fakes.

    Attributes:
        scoring: how the models cut the step's batch to score it, asked right after that; the same on every rank.
        observe: what the run's other processes say of themselves, once a step; the same on every rank.
        residency: which model is on the device; by default nothing has to move.
        check_interrupted: asked between steps, on every rank together; raises StopRequested when the run was asked to
            end, PartDiedError when a part of it is gone.
        explain: told of every wait and publication that ended without success, at that moment, on each rank that meets
            it; adds notes to the error.
    """

    policy: Policy
    critic: Critic
    advantage: Advantage
    groups: GroupSource
    refit: Refit
    validator: Validator
    checkpoints: Checkpoints
    telemetry: Telemetry
    scoring: Callable[[], Metrics] = dict
    observe: Callable[[], Metrics] = dict
    residency: Residency = field(default_factory=Residency)
    check_interrupted: Callable[[], None] = _nothing_interrupts
    explain: Callable[[MegatronPPOError], None] = _explains_nothing


def train(run: LoopSettings, schedule: AsyncSchedule, parts: Parts) -> int:
    """Train until `run.max_num_steps` steps are complete and return their number.

    Raises: NonFiniteError, StaleGroupError, PartDiedError, WaitTimeoutError, RefitError; each with its step.
        StopRequested when the run was asked to end. What ends it between two steps leaves a checkpoint of that moment;
        so does a publication that fails for good, which a resume begins with.
    """
    with _explaining_stalls(parts):
        step = _begin(run, schedule, parts)
    saved = step

    while step < run.max_num_steps:
        log = parts.telemetry.step(step)
        with _saving_what_ends_here(run, parts, step, log, saved=saved):
            parts.check_interrupted()
            with log.timed("exposed_generation"):  # the only place where the learner waits for actors
                groups = parts.groups.take(target_step=step)
        with parts.residency.step(f"step {step + 1}"):
            unpublished = _train_step(run, schedule, parts, step, groups, log)
        step += 1
        with _saving_what_ends_here(run, parts, step, log, saved=saved, has_row=True):
            if unpublished is not None:
                raise unpublished
            if step < run.max_num_steps:
                parts.check_interrupted()
            if not run.generates_alone:
                # After the publish, so that nothing is born older than it has to be.
                parts.groups.open(step=step, frontier=schedule.frontier(step))
            if run.validation_due(step):
                with log.timed("idle/validation"):
                    log.add(parts.validator.run(step=step))
            log.add(parts.observe())
        with _explaining_stalls(parts):
            if run.checkpoint_due(step) or parts.checkpoints.overdue:
                with log.timed("checkpointing"):
                    at_save = parts.checkpoints.save(step=step, metrics=log.values)
                log.add(at_save)
                saved = step
            # Between the save and its publication: a run that is killed before repeats the step, one that is killed
            # after has its row.
            log.flush()
            parts.checkpoints.publish(wait=step == run.max_num_steps)
            if run.generates_alone:
                parts.groups.open(step=step, frontier=schedule.frontier(step))
    return step


def _begin(run: LoopSettings, schedule: AsyncSchedule, parts: Parts) -> int:
    """Restore; unless all steps are complete, give the engines their weights and let the collector begin.

    Returns: completed steps.
    """
    step = parts.checkpoints.restore()
    if step >= run.max_num_steps:
        return step
    with parts.residency.step("the first publish"), parts.residency.publishing():
        parts.refit.push(version=schedule.version_at(step))
    if step == 0 and run.validate_at_start:
        log = parts.telemetry.before_first_step()
        with log.timed("idle/validation"):
            log.add(parts.validator.run(step=0))
        log.flush()
    parts.groups.open(step=step, frontier=schedule.frontier(step))
    return step


@contextmanager
def _explaining_stalls(parts: Parts) -> Iterator[None]:
    """Have what ended inside the block without success explained, unless somebody answered, but wrongly."""
    try:
        yield
    except WeightMismatchError:
        raise
    except _STALLS as error:
        parts.explain(error)
        raise


@contextmanager
def _saving_what_ends_here(
    run: LoopSettings, parts: Parts, step: int, log: StepLog, *, saved: int, has_row: bool = False
) -> Iterator[None]:
    """Save `step` completed steps when the run ends inside the block, in which no weight changes.

    Args:
        saved: the newest step that is saved already.
        has_row: `log` is that of the last completed step, whose row has to be written; else of one that did not begin.
    """
    try:
        with _explaining_stalls(parts):
            yield
    except _NOT_SAVED:
        raise
    except (StopRequested, *_ENDING) as error:
        try:
            _save_at_the_end(run, parts, step, log, saved=saved, has_row=has_row)
        except MegatronPPOError as failed:
            if isinstance(error, StopRequested):
                raise
            logger.exception("the run ends without a checkpoint of step %d", step)
            error.add_note(f"and then step {step} could not be saved: {failed}")
        raise


def _save_at_the_end(
    run: LoopSettings, parts: Parts, step: int, log: StepLog, *, saved: int, has_row: bool
) -> None:
    checkpoints = parts.checkpoints
    if run.checkpoint_period > 0 and (saved != step or checkpoints.overdue):
        with log.timed("checkpointing"):
            checkpoints.save(step=step, metrics=log.values if has_row else {})
    if has_row:
        log.flush()
    checkpoints.publish(wait=True)
    if checkpoints.overdue:
        raise CheckpointError(f"step {step} was to be saved before the run ends, which failed")


def _train_step(
    run: LoopSettings,
    schedule: AsyncSchedule,
    parts: Parts,
    step: int,
    groups: list[PromptGroup],
    log: StepLog,
) -> PartDiedError | WaitTimeoutError | RefitError | None:
    """Score, update, publish. Returns what the publication failed of for good: the step is complete without it."""
    batch = _batch(run, schedule, step, groups, log)
    try:
        batch = _score(run, parts, batch, log)
        _update(run, schedule, parts, step, batch, log)
    except NonFiniteError as error:
        raise NonFiniteError(f"step {step + 1}: {error}", error.ordinals) from error
    if schedule.trains_policy(step):  # a frozen step changes no weight: nothing to publish, nobody to pause
        with log.timed("weight_sync"), parts.residency.publishing():
            try:
                log.add(parts.refit.push(version=schedule.version_at(step + 1)))
            except _NOT_SAVED:
                raise
            except _ENDING as error:  # kept until the policy has left the device, which all ranks do together
                return error
    return None


def _batch(
    run: LoopSettings, schedule: AsyncSchedule, step: int, groups: list[PromptGroup], log: StepLog
) -> TrainBatch:
    """Check the taken groups and pad them into one batch."""
    with log.timed("data_processing"):
        log.add(age_metrics(groups, schedule=schedule, step=step))
        log.add(rollout_metrics(groups))
        batch = pack_groups(groups, pad_token_id=run.pad_token_id)
        expected = run.num_prompts_per_step * run.num_generations_per_prompt
        if len(batch) != expected:
            raise GroupMismatchError(
                f"step {step + 1} took {len(batch)} sequences, expected exactly {expected}"
            )
        if not batch.reward_B.isfinite().all():
            bad = tuple(sorted(set(batch.ordinal_B[~batch.reward_B.isfinite()].tolist())))
            raise NonFiniteError(f"step {step + 1}: a reward is NaN or infinite, prompt ordinals {bad}", bad)
        if run.overlong_filtering:
            batch = batch.replace(sample_mask_B=batch.sample_mask_B & ~batch.truncated_B)
    return batch


def _score(run: LoopSettings, parts: Parts, batch: TrainBatch, log: StepLog) -> TrainBatch:
    """Values and log-probs with the weights of this step's start, then masks and advantages."""
    residency = parts.residency
    with log.timed("value_inference"), residency.scoring(Model.CRITIC):
        batch = batch.replace(values_BT=parts.critic.values(batch))
    with log.timed("policy_and_reference_logprobs"):
        with residency.scoring(Model.POLICY):
            batch = batch.replace(old_logprobs_BT=parts.policy.logprobs(batch))
        if run.use_reference:
            with residency.scoring(Model.REFERENCE):
                batch = batch.replace(ref_logprobs_BT=parts.policy.reference_logprobs(batch))
    log.add(parts.scoring())
    with log.timed("advantage_calculation"):
        batch, mismatch = mask_mismatched_sequences(batch, threshold=run.seq_logprob_error_threshold)
        log.add(mismatch)
        # Of the whole step; `train/global_valid_toks` is a mean over minibatches.
        log.add(
            {
                "train/total_valid_tokens": float(
                    trainable_mask(batch.response_mask_BT, batch.sample_mask_B).sum()
                )
            }
        )
        batch = parts.advantage.apply(batch)
        log.add(parts.advantage.metrics(batch))
    return batch


def _update(
    run: LoopSettings, schedule: AsyncSchedule, parts: Parts, step: int, batch: TrainBatch, log: StepLog
) -> None:
    """E epochs: a whole epoch of the critic, then of the policy, because they time-share the device."""
    critic_metrics: Metrics = {}
    policy_metrics: Metrics = {}
    with log.timed("update"):
        for epoch in range(run.ppo_epochs):
            minibatches = batch.minibatches(
                run.train_global_batch_size, shuffle=run.shuffle_minibatches, seed=(run.seed, step, epoch)
            )
            with log.timed("value_training"), parts.residency.training(Model.CRITIC):
                critic_metrics = parts.critic.update(minibatches)
            if schedule.trains_policy(step):
                # After the last epoch it is published, which needs it where it is.
                stays = epoch == run.ppo_epochs - 1
                with log.timed("policy_training"), parts.residency.training(Model.POLICY, stays=stays):
                    policy_metrics = parts.policy.update(minibatches)
    # As in the reference, the last epoch's metrics are the step's; policy keys are absent on frozen steps.
    log.add(critic_metrics)
    log.add(policy_metrics)
