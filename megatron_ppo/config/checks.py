"""The rules between sections, and the numbers that follow from the configuration.

Driven by `derive`, which every entry point calls before any worker, engine or process group exists. All
findings are reported together. Rules that live with a part (losses, optimizers, models, run directory) are
reached by dotted name; the modules named here import no torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar, cast

from pydantic import JsonValue

from megatron_ppo.config.batching import token_budgets
from megatron_ppo.config.derived import Derived, ModelFacts, ParallelSizes, TokenBudgets
from megatron_ppo.config.fault_checks import fault_problems
from megatron_ppo.config.layout import engine_problems, layout, padding_advice
from megatron_ppo.config.messages import config_error
from megatron_ppo.config.model_sections import ModelSource, ParallelismSection, TrainedModelSection
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.config.targets import build, resolve
from megatron_ppo.protocol.errors import CheckpointError, ConfigError

T = TypeVar("T")

_PREVIEW_STEPS = 10
_READ_FACTS = "megatron_ppo.warm_start.facts.model_facts"
_CHECK_FOLDER = "megatron_ppo.mcore.hf_preflight.check_model_folder"
_READ_MODEL = "megatron_ppo.mcore.hf_config.read_hf_config"
_OPTIMIZER = "megatron_ppo.mcore.settings.OptimizerSettings"
_SCHEDULER = "megatron_ppo.mcore.settings.SchedulerSettings"
_OVERLAP = "megatron_ppo.mcore.settings.OverlapSettings"
_RECOMPUTE = "megatron_ppo.mcore.settings.RecomputeSettings"
_CHECK_RUN_DIRECTORY = "megatron_ppo.telemetry.run_dir.check_base_dir"
_FIND_CHECKPOINT = "megatron_ppo.loop.checkpoint_folder.find_checkpoint"
_CHECK_CONTINUED_RUN = "megatron_ppo.telemetry.run_dir.check_continued_run"

# Names of keys, api_key and hf_token for example; `eos_token` and `max_tokens` are no secrets.
_SECRET = re.compile(
    r"(^|_)(api_?key|secret|secret_key|password|passwd|credentials?|private_key|access_key"
    r"|(auth|access|api|hf|bearer|refresh)_token)$",
    re.IGNORECASE,
)
# Arguments of vLLM that have a key of their own, and those that would falsify which weights sampled a token.
_RESERVED_ENGINE_ARGS: dict[str, str] = {
    "model": "set policy.model",
    "dtype": "set inference.dtype",
    "max_model_len": "set inference.max_model_len",
    "max_num_seqs": "set inference.max_num_seqs",
    "tensor_parallel_size": "set inference.tensor_parallel_size",
    "kv_cache_dtype": "set inference.kv_cache_dtype",
    "kv_cache_memory_bytes": "set inference.kv_cache_memory_bytes",
    "enforce_eager": "set inference.enforce_eager",
    "pipeline_parallel_size": "weight updates under running requests need 1",
    "speculative_config": "its tokens would not carry the log-probs of the policy",
    "logprobs_mode": "importance weights need processed_logprobs",
    "weight_transfer_config": "the refit sets it",
    "worker_extension_cls": "the refit sets it",
}


def derive(
    config: RunConfig, world_size: int | None = None, *, folders_may_be_absent: bool = False
) -> Derived:
    """Apply every rule between sections and compute the derived numbers.

    Args:
        world_size: trainer ranks; None takes WORLD_SIZE of torchrun, else `cluster.world_size`, else 1.
        folders_may_be_absent: a model folder that is not on this machine is taken to be as `expected` says, with a
            warning; for checks, never for a run.
    Raises: ConfigError that lists every finding.
    """
    findings = _Findings()
    for rule in (
        _staleness_problems,
        _sampling_problems,
        _loss_problems,
        _batch_problems,
        _unsupported_problems,
        _restore_problems,
        _determinism_problems,
        _watchdog_problems,
        _refit_problems,
        _secret_problems,
        fault_problems,
    ):
        findings.lines.extend(rule(config))
    schedule = findings.attempt(lambda: config.schedule.schedule(config.run.max_num_steps))
    findings.attempt(lambda: build(config.loss))
    findings.attempt(lambda: build(config.value_loss))
    for key, section in (("policy", config.policy), ("critic", config.critic)):
        findings.attempt(partial(_check_optimizer, config, key, section))
    findings.attempt(lambda: _check_run_directory(config))
    findings.attempt(lambda: _check_warm_start(config))
    ranks = findings.attempt(lambda: _world_size(config, world_size))
    facts_of = partial(model_facts, may_be_absent=folders_may_be_absent)
    policy_model = findings.attempt(lambda: facts_of(config.policy.model, key="policy.model"))
    critic_model = policy_model
    if config.critic.model != ModelSource():
        critic_model = findings.attempt(lambda: facts_of(config.critic.model, key="critic.model"))
    findings.lines.extend(_length_problems(config, policy_model, critic_model))
    if policy_model is not None:
        findings.lines.extend(engine_problems(config.inference.tensor_parallel_size, policy_model))
    for key, section, model in (
        ("policy", config.policy, policy_model),
        ("critic", config.critic, critic_model),
    ):
        findings.lines.extend(_expert_problems(key, section, model))
    layouts: list[ParallelSizes] = []
    budgets: list[TokenBudgets | None] = []
    for key, section, model in (
        ("policy", config.policy, policy_model),
        ("critic", config.critic, critic_model),
    ):
        findings.attempt(partial(_check_execution, key, section, model))
        if ranks is not None:
            sizes, problems = layout(
                section.parallelism, key=f"{key}.parallelism", world_size=ranks, model=model
            )
            findings.lines.extend(problems or _sharing_problems(config, key, section.parallelism, sizes))
            if not problems and model is not None:
                findings.attempt(partial(_check_cut, config, key, section, sizes))
            layouts.append(sizes)
        if ranks is not None and policy_model is not None:
            found, problems = token_budgets(
                section, sizes, key=key, max_model_len=_max_model_len(config, policy_model)
            )
            findings.lines.extend(problems)
            budgets.append(found)
    if findings.lines:
        raise config_error(list(dict.fromkeys(findings.lines)))
    assert (
        schedule is not None and policy_model is not None and critic_model is not None and len(layouts) == 2
    )
    sequences = config.algorithm.num_prompts_per_step * config.algorithm.num_generations_per_prompt
    return Derived(
        world_size=layouts[0].world_size,
        policy=layouts[0],
        critic=layouts[1],
        policy_budgets=budgets[0],
        critic_budgets=budgets[1],
        policy_model=policy_model,
        critic_model=critic_model,
        schedule=schedule,
        frontiers=tuple(
            schedule.frontier(step) for step in range(min(config.run.max_num_steps, _PREVIEW_STEPS))
        ),
        sequences_per_step=sequences,
        minibatches_per_epoch=sequences // config.algorithm.train_global_batch_size,
        buffer_capacity=schedule.capacity(config.algorithm.num_prompts_per_step),
        max_concurrent_groups=_concurrent_groups(config),
        max_model_len=_max_model_len(config, policy_model),
        validation_max_new_tokens=_validation_tokens(config),
        policy_scheduler_ticks=_scheduler_ticks(config, "policy", config.policy),
        critic_scheduler_ticks=_scheduler_ticks(config, "critic", config.critic),
        needs_reference=_needs_reference(config),
        run_directory=config.run.directory,
        warnings=(
            *_warnings(config),
            *filter(
                None,
                (
                    padding_advice("policy.parallelism", layouts[0], policy_model),
                    padding_advice("critic.parallelism", layouts[1], critic_model),
                ),
            ),
        ),
    )


class _Findings:
    """Collects problems; a failed attempt yields None and lets the other rules run."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def attempt(self, rule: Callable[[], T]) -> T | None:
        try:
            return rule()
        except ConfigError as error:
            self.lines.append(str(error))
            return None


def model_facts(source: ModelSource, *, key: str, may_be_absent: bool = False) -> ModelFacts:
    """Sizes of the model that `source` names, read without loading it.

    Args:
        may_be_absent: take `expected` for a folder that does not exist.
    Raises: ConfigError naming `key` if neither or both of path and recipe are set, or if the folder is
        missing, cannot be mapped to Megatron, has torn, missing or misshapen weights or other sizes than expected.
    """
    if (source.path is None) == (source.recipe is None):
        seen = "neither" if source.path is None else "both"
        raise ConfigError(f"{key}: exactly one of {key}.path and {key}.recipe must be set, got {seen}")
    if source.recipe is not None:
        if source.expected is not None:
            raise ConfigError(
                f"{key}.expected: may be set with {key}.path only; a recipe has sizes of its own"
            )
        return cast(ModelFacts, resolve(_READ_FACTS)(build(source.recipe)))
    folder = Path(source.path or "")
    if not folder.exists() and may_be_absent and source.expected is not None:
        return source.expected
    if not folder.is_dir():
        raise ConfigError(f"{key}.path: got {str(folder)!r}, which is not an existing folder")
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{key}.path: {str(folder)!r} holds no *.safetensors file")
    try:
        if resolve(_CHECK_FOLDER)(folder).has_value_head and key != "critic.model":
            raise ConfigError(
                f"{str(folder)!r} holds a reward or value model; only critic.model.path may name one"
            )
        facts = cast(ModelFacts, resolve(_READ_FACTS)(folder))
    except ConfigError as error:
        raise ConfigError(f"{key}.path: {error}") from error
    if source.expected is not None:
        differing = [
            f"{name}={getattr(facts, name)!r} instead of {wanted!r}"
            for name, wanted in source.expected.model_dump().items()
            if getattr(facts, name) != wanted
        ]
        if differing:
            raise ConfigError(
                f"{key}.path: {str(folder)!r} has {', '.join(differing)}, as {key}.expected says"
            )
    return facts


def _staleness_problems(config: RunConfig) -> Iterator[str]:
    if config.schedule.max_trajectory_age_steps <= 0:
        return
    why = f"with schedule.max_trajectory_age_steps={config.schedule.max_trajectory_age_steps} > 0"
    if not config.loss.use_importance_sampling_correction:
        yield (
            f"loss.use_importance_sampling_correction: got False; must be true {why}, "
            "because rollouts come from an older policy"
        )
    if config.loss.force_on_policy_ratio:
        yield f"loss.force_on_policy_ratio: got True; must be false {why}, where ratios are not 1"
    if config.inference.colocated:
        yield f"inference.colocated: got True; must be false {why}, because generation overlaps training"
    if not config.inference.asynchronous:
        yield f"inference.asynchronous: got False; must be true {why}, only AsyncLLM takes weights as it runs"
    if config.inference.kv_cache_dtype.startswith("fp8"):
        yield (
            f"inference.kv_cache_dtype: got {config.inference.kv_cache_dtype!r}; must be 'auto' {why}, "
            "because FP8 scales belong to one weight version"
        )


def _restore_problems(config: RunConfig) -> Iterator[str]:
    if config.checkpoint.drop_incomplete_targets_on_restore:
        yield (
            "checkpoint.drop_incomplete_targets_on_restore: got true, must be false: dropping the stored groups of a "
            "step only costs their generation, a resume generates the missing ones. "
            "checkpoint.load_replay_buffer=false generates all of them again"
        )


def _determinism_problems(config: RunConfig) -> Iterator[str]:
    """What would let the moment at which something happens decide what is computed."""
    if not config.run.deterministic:
        return
    schedule, prompts = config.schedule, config.algorithm.num_prompts_per_step
    why = "with run.deterministic"
    if schedule.max_trajectory_age_steps != 0:
        yield (
            f"schedule.max_trajectory_age_steps: got {schedule.max_trajectory_age_steps}; must be 0 {why}, or the "
            "speed of generation decides which weights sample a prompt"
        )
    if schedule.warmup_generation_lead_steps is not None:
        yield (
            f"schedule.warmup_generation_lead_steps: got {schedule.warmup_generation_lead_steps}; must be null {why}: "
            "steps that are generated ahead run in one batch, and after a resume they do not"
        )
    if schedule.in_flight_weight_updates:
        yield f"schedule.in_flight_weight_updates: got True; must be false {why}"
    if schedule.max_generation_failures != 0:
        yield (
            f"schedule.max_generation_failures: got {schedule.max_generation_failures}; must be 0 {why}: a prompt that "
            "is generated again without the others of its step is computed in another batch"
        )
    if config.inference.replicas != 1:
        yield f"inference.replicas: got {config.inference.replicas}; must be 1 {why}"
    groups = config.collector.max_concurrent_groups
    if groups is not None and groups < prompts:
        yield (
            f"collector.max_concurrent_groups: got {groups}; must be null or >= algorithm.num_prompts_per_step="
            f"{prompts} {why}, which submits whole steps"
        )


def _watchdog_problems(config: RunConfig) -> Iterator[str]:
    """The part's own limit, with its own message, comes before the watchdog's."""
    if config.watchdog.enabled and config.watchdog.refit_s <= config.refit.timeout_s:
        yield (
            f"watchdog.refit_s: got {config.watchdog.refit_s:g}; must be above refit.timeout_s = "
            f"{config.refit.timeout_s:g}, so that a refit that times out can say why"
        )


def _refit_problems(config: RunConfig) -> Iterator[str]:
    patience_s = config.refit.straggler_patience_s
    if patience_s is not None and patience_s >= config.refit.timeout_s:
        yield (
            f"refit.straggler_patience_s: got {patience_s:g}; must be null or below refit.timeout_s = "
            f"{config.refit.timeout_s:g}, after which the publication fails for all engines"
        )


def _unsupported_problems(config: RunConfig) -> Iterator[str]:
    if config.schedule.max_trajectory_age_steps <= 0:
        if config.inference.colocated:
            yield "inference.colocated: got True; must be false, it is not supported"
        if not config.inference.asynchronous:
            yield "inference.asynchronous: got False; must be true, the synchronous engine is not supported"
    if config.run.max_num_epochs != -1:
        yield (
            f"run.max_num_epochs: got {config.run.max_num_epochs}; must be -1 (endless): prompts are cycled "
            "and the length of the run is run.max_num_steps"
        )
    for name in config.inference.engine:
        if name in _RESERVED_ENGINE_ARGS:
            yield f"inference.engine.{name}: may not be set here: {_RESERVED_ENGINE_ARGS[name]}"


def _secret_problems(config: RunConfig) -> Iterator[str]:
    """The parts without a schema are the only place where one could stand. The value is not repeated."""
    for section, free in (
        ("inference.engine", config.inference.engine),
        ("reward.options", config.reward.options),
    ):
        for name in _secrets_in(free, section):
            yield (
                f"{name}: looks like a secret, which must not stand in a configuration: it is saved with the run; "
                "set the environment variable that its library reads"
            )


def _secrets_in(value: JsonValue, name: str) -> Iterator[str]:
    if isinstance(value, dict):
        for key, part in value.items():
            if isinstance(part, str) and part and _SECRET.search(key):
                yield f"{name}.{key}"
            else:
                yield from _secrets_in(part, f"{name}.{key}")
    elif isinstance(value, list):
        for position, part in enumerate(value):
            yield from _secrets_in(part, f"{name}[{position}]")


def _sampling_problems(config: RunConfig) -> Iterator[str]:
    reason = "truncated sampling biases the importance weights by the probability that it cuts off"
    if config.inference.top_p != 1.0:
        yield f"inference.top_p: got {config.inference.top_p}; must be 1.0, because {reason}"
    if config.inference.top_k != 0:
        yield f"inference.top_k: got {config.inference.top_k}; must be 0 (off), because {reason}"


def _loss_problems(config: RunConfig) -> Iterator[str]:
    algorithm, loss = config.algorithm, config.loss
    penalty = loss.reference_policy_kl_penalty
    if algorithm.skip_reference_policy_logprobs_calculation and penalty > 0:
        yield (
            "algorithm.skip_reference_policy_logprobs_calculation: got True; must be false or null with "
            f"loss.reference_policy_kl_penalty={penalty}, which needs them"
        )
    if not loss.force_on_policy_ratio:
        return
    if algorithm.ppo_epochs != 1:
        yield (
            f"loss.force_on_policy_ratio: got True; needs algorithm.ppo_epochs=1, got "
            f"{algorithm.ppo_epochs}: from the second epoch on the ratio is not 1"
        )
    sequences = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    if algorithm.train_global_batch_size != sequences:
        yield (
            f"loss.force_on_policy_ratio: got True; needs algorithm.train_global_batch_size={sequences} (one "
            f"update per step), got {algorithm.train_global_batch_size}"
        )


def _batch_problems(config: RunConfig) -> Iterator[str]:
    algorithm = config.algorithm
    sequences = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    if sequences % algorithm.train_global_batch_size:
        yield (
            f"algorithm.train_global_batch_size: got {algorithm.train_global_batch_size}; must divide "
            f"num_prompts_per_step * num_generations_per_prompt = {sequences}"
        )
    if config.schedule.policy_training_start_step >= config.run.max_num_steps:
        yield (
            f"schedule.policy_training_start_step: got {config.schedule.policy_training_start_step}; must be "
            f"< run.max_num_steps={config.run.max_num_steps}, else the policy is never trained"
        )


def _sharing_problems(
    config: RunConfig, key: str, parallelism: ParallelismSection, sizes: ParallelSizes
) -> Iterator[str]:
    algorithm = config.algorithm
    sequences = algorithm.num_prompts_per_step * algorithm.num_generations_per_prompt
    if sequences % sizes.data:
        yield (
            f"num_prompts_per_step * num_generations_per_prompt = {sequences} must be divisible by the "
            f"{key}'s data-parallel size, got {sizes.data}"
        )
    elif algorithm.train_global_batch_size % sizes.data:
        yield (
            f"algorithm.train_global_batch_size: got {algorithm.train_global_batch_size}; must be divisible "
            f"by the {key}'s data-parallel size {sizes.data}"
        )
    else:
        share = algorithm.train_global_batch_size // sizes.data
        interleaved = (parallelism.virtual_pipeline_model_parallel_size or 1) > 1
        if interleaved and share < sizes.pipeline:
            yield (
                f"{key}.parallelism.virtual_pipeline_model_parallel_size: got "
                f"{parallelism.virtual_pipeline_model_parallel_size}; needs at least as many sequences per minibatch "
                f"and data-parallel rank as stages, got {share} sequences and {sizes.pipeline} stages"
            )


def _length_problems(
    config: RunConfig, policy: ModelFacts | None, critic: ModelFacts | None
) -> Iterator[str]:
    prompt = config.data.max_prompt_tokens
    wanted = {
        "inference.max_new_tokens": config.inference.max_new_tokens,
        "validation.max_new_tokens": _validation_tokens(config),
    }
    limits = [
        (f"the context of {name}.model", model.context_length)
        for name, model in (("policy", policy), ("critic", critic))
        if model is not None
    ]
    if config.inference.max_model_len is not None:
        limits.append(("inference.max_model_len", config.inference.max_model_len))
    if policy is not None and (config.inference.max_model_len or 0) > policy.context_length:
        yield (
            f"inference.max_model_len: got {config.inference.max_model_len}; must be <= "
            f"{policy.context_length}, the context of policy.model"
        )
    for key, new in wanted.items():
        for what, limit in limits:
            if prompt + new > limit:
                yield (
                    f"data.max_prompt_tokens + {key}: got {prompt} + {new} = {prompt + new}; must be <= "
                    f"{limit}, {what}"
                )
    if policy is not None and critic is not None and critic.vocab_size < policy.vocab_size:
        yield (
            f"critic.model: got a vocabulary of {critic.vocab_size}; must be >= the policy's "
            f"{policy.vocab_size}"
        )


def _check_cut(config: RunConfig, key: str, section: TrainedModelSection, sizes: ParallelSizes) -> None:
    """What only the whole config.json tells of a layout, such as which layers have experts."""
    path = (config.policy.model if section.model == ModelSource() else section.model).path
    if path is None or not Path(path).is_dir():
        return
    try:
        resolve(_READ_MODEL)(path).check_parallelism(
            tensor_model_parallel_size=sizes.tensor,
            pipeline_model_parallel_size=sizes.pipeline,
            virtual_pipeline_model_parallel_size=section.parallelism.virtual_pipeline_model_parallel_size
            or 1,
            expert_model_parallel_size=sizes.expert,
            sequence_parallel=section.parallelism.sequence_parallel,
        )
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error


def _expert_problems(key: str, section: TrainedModelSection, model: ModelFacts | None) -> Iterator[str]:
    if section.moe_aux_loss_coeff > 0 and model is not None and model.num_experts == 0:
        yield (
            f"{key}.moe_aux_loss_coeff: got {section.moe_aux_loss_coeff}; must be 0, {model.architecture} has no "
            "experts"
        )
    if "moe" in section.recompute.modules and model is not None and model.num_experts == 0:
        yield (
            f"{key}.recompute.modules: got {section.recompute.modules}; must be without 'moe', "
            f"{model.architecture} has no experts"
        )


def _world_size(config: RunConfig, given: int | None) -> int:
    configured = config.cluster.world_size
    if given is None and "WORLD_SIZE" in os.environ:
        text = os.environ["WORLD_SIZE"]
        if not text.isdigit() or int(text) < 1:
            raise ConfigError(f"WORLD_SIZE in the environment: got {text!r}; must be a whole number >= 1")
        given = int(text)
    if given is not None and configured is not None and given != configured:
        raise ConfigError(
            f"cluster.world_size: got {configured}; must be {given}, the number of ranks started"
        )
    return given or configured or 1


def _scheduler_ticks(config: RunConfig, key: str, section: TrainedModelSection) -> int:
    frozen = config.schedule.policy_training_start_step if key == "policy" else 0
    trained = max(1, (config.run.max_num_steps - frozen) * config.algorithm.ppo_epochs)
    return section.scheduler.lr_decay_steps or trained


def _check_optimizer(config: RunConfig, key: str, section: TrainedModelSection) -> None:
    ticks = _scheduler_ticks(config, key, section)
    try:
        resolve(_OPTIMIZER)(**section.optimizer.kwargs())
        resolve(_SCHEDULER)(**{**section.scheduler.kwargs(), "lr_decay_steps": ticks})
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error


def _check_execution(key: str, section: TrainedModelSection, model: ModelFacts | None) -> None:
    """The rules of overlap and recomputation, which change no result."""
    try:
        resolve(_OVERLAP)(
            overlap_grad_reduce=section.overlap_grad_reduce,
            overlap_param_gather=section.overlap_param_gather,
            ddp_bucket_size=section.ddp_bucket_size,
        )
        recompute = resolve(_RECOMPUTE)(**section.recompute.kwargs())
        stages = section.parallelism.pipeline_model_parallel_size
        chunks = stages * (section.parallelism.virtual_pipeline_model_parallel_size or 1)
        if model is not None and model.num_layers % chunks == 0:
            recompute.check_layers(model.num_layers // chunks)
    except ConfigError as error:
        raise ConfigError(f"{key}.{error}") from error


def _check_run_directory(config: RunConfig) -> None:
    if config.run.resume in ("auto", "never"):
        resolve(_CHECK_RUN_DIRECTORY)(config.run.directory, name=config.run.name)
    elif not Path(config.run.resume).is_dir():
        raise ConfigError(
            f"run.resume: got {config.run.resume!r}; allowed: auto, never, or the folder of an existing run"
        )
    else:
        resolve(_CHECK_CONTINUED_RUN)(Path(config.run.resume), name=config.run.name)


def _check_warm_start(config: RunConfig) -> None:
    path = config.critic.warm_start
    if path is None:
        return
    if not Path(path).is_dir():
        raise ConfigError(f"critic.warm_start: got {path!r}, which is not an existing folder")
    try:
        resolve(_FIND_CHECKPOINT)(Path(path))
    except CheckpointError as error:
        raise ConfigError(f"critic.warm_start: {error}") from error


def _concurrent_groups(config: RunConfig) -> int:
    if config.collector.max_concurrent_groups is not None:
        return config.collector.max_concurrent_groups
    if config.run.deterministic:  # whole steps; what the engine has no room for waits inside
        return config.algorithm.num_prompts_per_step
    running = config.inference.replicas * config.inference.max_num_seqs
    return max(1, running // config.algorithm.num_generations_per_prompt)


def _max_model_len(config: RunConfig, policy: ModelFacts) -> int:
    if config.inference.max_model_len is not None:
        return config.inference.max_model_len
    longest = config.data.max_prompt_tokens + max(config.inference.max_new_tokens, _validation_tokens(config))
    # One more, because scoring a finished sequence asks the engine for one further token.
    return min(longest + 1, policy.context_length)


def _validation_tokens(config: RunConfig) -> int:
    return config.validation.max_new_tokens or config.inference.max_new_tokens


def _needs_reference(config: RunConfig) -> bool:
    skip = config.algorithm.skip_reference_policy_logprobs_calculation
    return config.loss.reference_policy_kl_penalty > 0 if skip is None else not skip


def _warnings(config: RunConfig) -> Iterator[str]:
    for key, source in (("policy.model", config.policy.model), ("critic.model", config.critic.model)):
        if source.path is not None and not Path(source.path).exists():
            yield (
                f"{key}.path={source.path} is not on this machine: taken to be as {key}.expected says; a run needs it"
            )
    schedule, age = config.schedule, config.schedule.max_trajectory_age_steps
    if schedule.recompute_kv_cache_after_weight_updates and not schedule.in_flight_weight_updates:
        yield (
            "schedule.recompute_kv_cache_after_weight_updates=true does nothing without "
            "schedule.in_flight_weight_updates: no request is running during an update"
        )
    formats = {"policy.precision": config.policy.precision, "inference.dtype": config.inference.dtype}
    low = [f"{key}={value}" for key, value in formats.items() if value not in ("fp32", "float32")]
    if low and config.refit.probe and config.refit.probe_tolerance_nats < 1e-3:
        yield (
            f"refit.probe_tolerance_nats={config.refit.probe_tolerance_nats} is meant for float32; with "
            f"{', '.join(low)} the same-version probe is likely to end the run"
        )
    if config.inference.max_engine_restarts and not (
        config.collector.max_retries or schedule.max_generation_failures
    ):
        yield (
            f"inference.max_engine_restarts={config.inference.max_engine_restarts} does not let the run survive an "
            "engine's death with collector.max_retries=0 and schedule.max_generation_failures=0: the responses that "
            "die with it are failures"
        )
    silent_s = config.inference.liveness_deadline_s * config.inference.liveness_misses
    patience_s = config.inference.request_deadline_s * (1 + config.collector.max_retries)
    if silent_s > patience_s and not schedule.max_generation_failures:
        yield (
            f"inference.liveness_deadline_s={config.inference.liveness_deadline_s} times "
            f"inference.liveness_misses={config.inference.liveness_misses} is longer than the {patience_s:.0f} s after "
            "which a group has used up its attempts (inference.request_deadline_s, collector.max_retries): an engine "
            "that hangs ends the run before it is built again"
        )
    if age > 1:
        yield (
            f"schedule.max_trajectory_age_steps={age} > 1: advantages are estimated on rollouts of a policy "
            "that is several updates old, which biases them"
        )
        if not config.schedule.in_flight_weight_updates:
            yield (
                f"schedule.max_trajectory_age_steps={age} > 1 without schedule.in_flight_weight_updates: "
                "every publish waits for running requests, so there is no gain in speed"
            )
