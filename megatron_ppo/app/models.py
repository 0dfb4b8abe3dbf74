"""Builds policy and critic on this rank from the configuration."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron_ppo.config.derived import Derived, ParallelSizes, TokenBudgets
from megatron_ppo.config.model_sections import SchedulerSection, TrainedModelSection
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.targets import build, resolve
from megatron_ppo.data.microbatch_plan import BatchPolicy, TokenBudget, fixed_size
from megatron_ppo.loop.checkpoint_folder import find_checkpoint
from megatron_ppo.loop.residency import STATIONARY, Model, Residency
from megatron_ppo.mcore.checkpoint import SUBFOLDER, ModelCheckpoints, load_weights
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.settings import (
    OptimizerSettings,
    OverlapSettings,
    RecomputeSettings,
    SchedulerSettings,
    TrainingSettings,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """The trained models of this rank."""

    policy: MegatronPolicy
    critic: MegatronCritic
    residency: Residency

    def store(self) -> ModelCheckpoints:
        """Saves and loads both, with optimizers and schedulers."""
        return ModelCheckpoints({"policy": self.policy, "critic": self.critic}, self.residency)


def build_models(
    config: RunConfig, derived: Derived, *, policy_folder: Path, critic_folder: Path, pad_token_id: int
) -> Models:
    """Both models with their own layouts and optimizers. Collective over all ranks."""
    timeout_s = config.cluster.process_group_timeout_s
    choice = config.cluster.offload_models
    moves = choice == "always" or (choice == "auto" and torch.cuda.is_available())
    residency = Residency()
    policy = resolve(config.policy.target)(
        model=policy_folder,
        parallel=_context(derived.policy, config.policy, timeout_s),
        loss=build(config.loss),
        temperature=config.inference.temperature,
        reference=derived.needs_reference,
        pad_token_id=pad_token_id,
        seed=config.run.seed,
        logprob_chunk_size=config.policy.logprob_chunk_size,
        training=_training(config.policy, derived.policy_scheduler_ticks, derived.policy_budgets),
    )
    residency.built(Model.POLICY, policy.residence if moves else STATIONARY)
    residency.built(Model.REFERENCE, policy.reference_residence if moves else STATIONARY)
    critic = resolve(config.critic.target)(
        model=critic_folder,
        parallel=_context(derived.critic, config.critic, timeout_s),
        value_loss=build(config.value_loss),
        pad_token_id=pad_token_id,
        seed=config.run.seed,
        training=_training(config.critic, derived.critic_scheduler_ticks, derived.critic_budgets),
    )
    if config.critic.warm_start is not None:
        checkpoint = find_checkpoint(Path(config.critic.warm_start))
        logger.info("the critic starts from %s", checkpoint)
        load_weights(checkpoint / SUBFOLDER, "critic", critic)
    residency.built(Model.CRITIC, critic.residence if moves else STATIONARY)
    return Models(policy=policy, critic=critic, residency=residency)


def _context(sizes: ParallelSizes, section: TrainedModelSection, timeout_s: float) -> ParallelContext:
    return ParallelContext.create(
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        virtual_pipeline_model_parallel_size=section.parallelism.virtual_pipeline_model_parallel_size,
        context_parallel_size=sizes.context,
        expert_model_parallel_size=section.parallelism.expert_model_parallel_size,
        sequence_parallel=section.parallelism.sequence_parallel,
        timeout_s=timeout_s,
    )


def _training(section: TrainedModelSection, ticks: int, budgets: TokenBudgets | None) -> TrainingSettings:
    train_batches, score_batches = _batches(section, budgets)
    return TrainingSettings(
        optimizer=OptimizerSettings(**section.optimizer.model_dump()),
        scheduler=_scheduler(section.scheduler, ticks),
        train_batches=train_batches,
        score_batches=score_batches,
        precision=section.precision,
        transformer_impl=section.transformer_impl,
        overlap=OverlapSettings(
            overlap_grad_reduce=section.overlap_grad_reduce,
            overlap_param_gather=section.overlap_param_gather,
            ddp_bucket_size=section.ddp_bucket_size,
        ),
        recompute=RecomputeSettings(**section.recompute.kwargs()),
        moe_aux_loss_coeff=section.moe_aux_loss_coeff,
    )


def _batches(section: TrainedModelSection, budgets: TokenBudgets | None) -> tuple[BatchPolicy, BatchPolicy]:
    """Of passes with and without gradient."""
    if budgets is None:
        return (
            fixed_size("train_micro_batch_size", section.train_micro_batch_size),
            fixed_size("logprob_batch_size", section.logprob_batch_size),
        )
    return (
        TokenBudget(tokens=budgets.train, packed=budgets.packed, multiple=budgets.multiple),
        TokenBudget(tokens=budgets.score, packed=budgets.packed, multiple=budgets.multiple),
    )


def _scheduler(section: SchedulerSection, ticks: int) -> SchedulerSettings:
    return SchedulerSettings(**{**section.model_dump(), "lr_decay_steps": ticks})
