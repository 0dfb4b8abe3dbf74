"""Maps the keys of an existing NeMo-RL style configuration (`ppo.*`, `loss_fn.*`, …) onto ours.

Driven by `scripts/convert_config.py`. Invariant: every key of the input is either mapped or reported.
The result is an overlay; `compose.validate` decides whether it is complete and allowed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

Converter = Callable[[Any], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """Attributes: values: our overlay, nested.   unmapped: input key -> why it has no counterpart here."""

    values: dict[str, Any]
    unmapped: dict[str, str]


def _same(value: Any) -> Any:
    return value


def _dtype(value: str) -> str:
    return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}.get(value, value)


def _precision(value: str) -> str:
    return {"float32": "fp32", "bfloat16": "bf16"}.get(value, value)


def _metric(value: str) -> str:
    return value.replace("val:", "validation/", 1).replace("train:", "train/", 1)


def _top_k(value: int | None) -> int:
    return 0 if value in (None, -1) else int(value or 0)


_SCHEDULE = (
    "max_trajectory_age_steps",
    "warmup_generation_lead_steps",
    "warmup_max_trajectory_age_steps",
    "in_flight_weight_updates",
    "recompute_kv_cache_after_weight_updates",
    "max_generation_failures",
)
_ALGORITHM = (
    "num_prompts_per_step",
    "num_generations_per_prompt",
    "ppo_epochs",
    "overlong_filtering",
    "seq_logprob_error_threshold",
    "skip_reference_policy_logprobs_calculation",
)
_ADVANTAGE = (
    "name",
    "gae_lambda",
    "gae_gamma",
    "gae_lambda_value",
    "gae_lambda_policy",
    "length_adaptive_alpha",
    "normalize_advantages",
)
_LOSS = (
    "ratio_clip_min",
    "ratio_clip_max",
    "ratio_clip_c",
    "disable_ppo_ratio",
    "force_on_policy_ratio",
    "sequence_level_importance_ratios",
    "use_cispo",
    "token_level_loss",
    "use_importance_sampling_correction",
    "truncated_importance_sampling_type",
    "truncated_importance_sampling_ratio",
    "truncated_importance_sampling_ratio_min",
    "reference_policy_kl_penalty",
    "reference_policy_kl_type",
    "kl_input_clamp_value",
    "kl_output_clamp_value",
    "use_kl_in_reward",
    "use_on_policy_kl_approximation",
    "positive_example_nll_weight",
)
_PARALLELISM = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
_BUDGET = ("enabled", "train_mb_tokens", "logprob_mb_tokens")
_OPTIMIZER = ("lr", "min_lr", "adam_beta1", "adam_beta2", "adam_eps", "weight_decay", "clip_grad")


def _rules() -> Iterator[tuple[str, str, Converter]]:
    """Input key, our key, value converter."""
    for group, nested in (("ppo", "async_ppo"), ("grpo", "async_grpo")):
        yield from ((f"{group}.{nested}.{key}", f"schedule.{key}", _same) for key in _SCHEDULE)
        yield from ((f"{group}.{key}", f"algorithm.{key}", _same) for key in _ALGORITHM)
        yield from ((f"{group}.adv_estimator.{key}", f"advantage.{key}", _same) for key in _ADVANTAGE)
        yield f"{group}.policy_training_start_step", "schedule.policy_training_start_step", _same
        yield f"{group}.max_generation_failures", "schedule.max_generation_failures", _same
        yield from ((f"{group}.{key}", f"run.{key}", _same) for key in ("seed", "max_num_steps"))
        yield f"{group}.max_num_epochs", "run.max_num_epochs", _same
        yield f"{group}.val_period", "validation.period", _same
        yield f"{group}.val_at_start", "validation.at_start", _same
        yield f"{group}.val_at_end", "validation.at_end", _same
        yield f"{group}.max_val_samples", "validation.max_samples", _same
        yield f"{group}.val_temperature", "validation.temperature", float
        yield f"{group}.val_top_p", "validation.top_p", float
        yield f"{group}.val_top_k", "validation.top_k", _top_k
    yield from ((f"loss_fn.{key}", f"loss.{key}", _same) for key in _LOSS)
    yield from ((f"value_loss_fn.{key}", f"value_loss.{key}", _same) for key in ("scale", "cliprange"))
    yield "checkpointing.save_period", "checkpoint.period", _same
    yield "checkpointing.keep_top_k", "checkpoint.keep_best", _same
    yield "checkpointing.metric_name", "checkpoint.metric", _metric
    yield "checkpointing.higher_is_better", "checkpoint.higher_is_better", _same
    yield "checkpointing.load_replay_buffer", "checkpoint.load_replay_buffer", _same
    yield (
        "ppo.async_ppo.drop_incomplete_targets_on_restore",
        "checkpoint.drop_incomplete_targets_on_restore",
        _same,
    )
    yield "checkpointing.checkpoint_dir", "run.dir", _same
    yield from _generation_rules("policy.generation")
    for model, ours in (("policy", "policy"), ("value", "critic"), ("critic", "critic")):
        yield from _model_rules(model, ours)
    yield "policy.train_global_batch_size", "algorithm.train_global_batch_size", _same


def _generation_rules(theirs: str) -> Iterator[tuple[str, str, Converter]]:
    yield f"{theirs}.backend", "inference.backend", _same
    yield f"{theirs}.max_new_tokens", "inference.max_new_tokens", _same
    yield f"{theirs}.temperature", "inference.temperature", float
    yield f"{theirs}.top_p", "inference.top_p", float
    yield f"{theirs}.top_k", "inference.top_k", _top_k
    yield f"{theirs}.colocated.enabled", "inference.colocated", _same
    yield f"{theirs}.vllm_cfg.async_engine", "inference.asynchronous", _same
    yield f"{theirs}.vllm_cfg.precision", "inference.dtype", _dtype
    yield f"{theirs}.vllm_cfg.kv_cache_dtype", "inference.kv_cache_dtype", _same
    yield f"{theirs}.vllm_cfg.tensor_parallel_size", "inference.tensor_parallel_size", _same
    yield f"{theirs}.vllm_cfg.max_model_len", "inference.max_model_len", _same
    yield f"{theirs}.vllm_cfg.enforce_eager", "inference.enforce_eager", _same


def _model_rules(theirs: str, ours: str) -> Iterator[tuple[str, str, Converter]]:
    yield f"{theirs}.model_name", f"{ours}.model.path", _same
    yield f"{theirs}.precision", f"{ours}.precision", _precision
    yield f"{theirs}.train_micro_batch_size", f"{ours}.train_micro_batch_size", _same
    yield f"{theirs}.logprob_batch_size", f"{ours}.logprob_batch_size", _same
    yield from (
        (f"{theirs}.dynamic_batching.{key}", f"{ours}.dynamic_batching.{key}", _same)
        for key in (*_BUDGET, "sequence_length_round")
    )
    yield from (
        (f"{theirs}.sequence_packing.{key}", f"{ours}.sequence_packing.{key}", _same) for key in _BUDGET
    )
    if ours == "policy":
        yield f"{theirs}.logprob_chunk_size", f"{ours}.logprob_chunk_size", _same
    yield f"{theirs}.max_grad_norm", f"{ours}.optimizer.clip_grad", float
    megatron = f"{theirs}.megatron_cfg"
    yield from ((f"{megatron}.{key}", f"{ours}.parallelism.{key}", _same) for key in _PARALLELISM)
    yield from ((f"{megatron}.optimizer.{key}", f"{ours}.optimizer.{key}", float) for key in _OPTIMIZER)
    yield f"{megatron}.scheduler.lr_decay_style", f"{ours}.scheduler.lr_decay_style", _same
    yield f"{megatron}.scheduler.lr_decay_iters", f"{ours}.scheduler.lr_decay_steps", _same
    yield f"{megatron}.scheduler.lr_warmup_iters", f"{ours}.scheduler.lr_warmup_steps", _same


# Keys whose counterpart is a behaviour; a prefix covers everything below it.
_REASONS: dict[str, str] = {
    "ppo.val_batch_size": "validation sends every prompt at once; the engine batches",
    "ppo.max_rollout_turns": "one turn",
    "ppo.use_dynamic_sampling": "not available",
    "ppo.reward_scaling": "not available",
    "ppo.reward_shaping": "not available",
    "checkpointing.enabled": "checkpoint.period 0 turns checkpoints off",
    "checkpointing.save_optimizer": "optimizers are always saved",
    "policy.generation.colocated.resources": "inference.replicas and tensor_parallel_size size the group",
    "policy.sequence_packing.algorithm": "sequences go into the fullest microbatch that has room, the longest first",
    "value.sequence_packing.algorithm": "as policy.sequence_packing.algorithm",
    "policy.tokenizer": "the tokenizer is the model folder's",
    "policy.max_total_sequence_length": "derived from data.max_prompt_tokens and inference.max_new_tokens",
    "data": "choose a task with data=…",
    "env": "the task brings its reward; see reward._target_",
    "logger": "see telemetry",
    "cluster": "torchrun sets the trainer ranks, inference.replicas the engines",
}


def convert(theirs: Mapping[str, Any]) -> Conversion:
    """Our overlay for a configuration in the reference's keys."""
    rules = {source: (target, converter) for source, target, converter in _rules()}
    values: dict[str, Any] = {}
    unmapped: dict[str, str] = {}
    for key, value in _leaves(theirs, ""):
        if key in ("ppo.async_ppo.enabled", "grpo.async_grpo.enabled"):
            if not value:  # synchronous training is age 0 here
                _set(values, "schedule.max_trajectory_age_steps", 0)
        elif key in rules:
            target, converter = rules[key]
            converted = value if value is None and converter is not _top_k else converter(value)
            synchronous = target == "schedule.max_trajectory_age_steps" and _is_synchronous(theirs)
            _set(values, target, 0 if synchronous else converted)
        else:
            unmapped[key] = _reason(key)
    return Conversion(values=values, unmapped=unmapped)


def _is_synchronous(theirs: Mapping[str, Any]) -> bool:
    for group, nested in (("ppo", "async_ppo"), ("grpo", "async_grpo")):
        section = (theirs.get(group) or {}).get(nested) or {}
        if section.get("enabled") is False:
            return True
    return False


def _leaves(values: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _set(values: dict[str, Any], key: str, value: Any) -> None:
    *parents, leaf = key.split(".")
    for parent in parents:
        values = values.setdefault(parent, {})
    values[leaf] = value


def _reason(key: str) -> str:
    canonical = key.replace("grpo.async_grpo", "ppo.async_ppo", 1)
    canonical = f"ppo.{canonical.removeprefix('grpo.')}" if canonical.startswith("grpo.") else canonical
    while canonical:
        if canonical in _REASONS:
            return _REASONS[canonical]
        canonical = canonical.rpartition(".")[0]
    return "no counterpart"
