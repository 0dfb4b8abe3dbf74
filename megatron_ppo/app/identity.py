"""The traits of a run that its checkpoints record, and what a change of each means for a resume.

Driven by `app.job` on rank 0, once data and model folders are there. Content is compared and not only its name: another
dataset, tokenizer or model under the same path is noticed.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ppo.config.derived import Derived, ModelFacts
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.task import TaskSpec, digest_examples
from megatron_ppo.loop.identity import Trait
from megatron_ppo.mcore.hf_digest import digest_model_folder

_OTHER_PROMPTS = (
    "an ordinal would be another prompt, so that prompts would be trained twice or never; start a new run"
)
_OTHER_FUNCTION = "the saved weights would be used as another function; start a new run"


def run_identity(
    config: RunConfig,
    derived: Derived,
    *,
    task: TaskSpec,
    policy_folder: Path,
    critic_folder: Path,
    digests: Path | None = None,
) -> dict[str, Trait]:
    """Traits by name.

    Args:
        digests: file that keeps those of the models' weights, which take long to compute.
    Raises: ConfigError for a model folder that cannot be read.
    """
    policy = digest_model_folder(policy_folder, cache=digests)
    reference = derived.needs_reference
    traits = {
        "run.seed": Trait(
            value=str(config.run.seed), because="the order of prompts comes from it; start a new run"
        ),
        **_step_traits(config),
        # Where the data lies and how it is named does not matter as long as it is the same data.
        "data": Trait(
            value=str(sorted(config.data.model_dump().items())),
            because="its training prompts decide",
            refused=False,
        ),
        "data.train": Trait(value=digest_examples(task.train), because=_OTHER_PROMPTS),
        "data.validation": Trait(
            value=digest_examples(task.validation),
            because="but validation results before and after it cannot be compared",
            refused=False,
        ),
        "policy.model": Trait(value=_named(derived.policy_model), because=_OTHER_FUNCTION),
        "policy.model.config": Trait(value=policy.config, because=_OTHER_FUNCTION),
        "policy.model.tokenizer": Trait(
            value=policy.tokenizer, because="the policy was trained on other tokens; start a new run"
        ),
        "policy.model.content": Trait(
            value=policy.weights,
            because="the reference model of the KL term is read from there; bring the old files back"
            if reference
            else "because the policy's weights come from the checkpoint",
            refused=reference,
        ),
        "critic.model": Trait(value=_named(derived.critic_model), because=_OTHER_FUNCTION),
    }
    if critic_folder != policy_folder:
        critic = digest_model_folder(critic_folder, cache=digests)
        traits["critic.model.config"] = Trait(value=critic.config, because=_OTHER_FUNCTION)
        traits["critic.model.content"] = Trait(
            value=critic.weights,
            because="because the critic's weights come from the checkpoint",
            refused=False,
        )
    return traits


def _step_traits(config: RunConfig) -> dict[str, Trait]:
    """What a step is made of: the buffer sorts restored groups by it, so that a change loses no prompt."""
    algorithm, schedule = config.algorithm, config.schedule
    return {
        "schedule.max_trajectory_age_steps": Trait(
            value=str(schedule.max_trajectory_age_steps),
            because="saved groups that are older than it allows are generated again",
            refused=False,
        ),
        "algorithm.num_prompts_per_step": Trait(
            value=str(algorithm.num_prompts_per_step),
            because="steps that hold saved groups are filled up, or their surplus is generated again",
            refused=False,
        ),
        "algorithm.num_generations_per_prompt": Trait(
            value=str(algorithm.num_generations_per_prompt),
            # With saved groups of the other size it does not: the buffer refuses those.
            because="unless groups of the other size are to be restored",
            refused=False,
        ),
    }


def _named(facts: ModelFacts) -> str:
    # The family: a reward model's folder holds the same backbone as the language model's.
    return f"{facts.architecture.split('For')[0]}/{facts.num_layers}x{facts.hidden_size}/{facts.vocab_size}"
