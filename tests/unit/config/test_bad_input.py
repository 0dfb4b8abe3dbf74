"""Every kind of bad input ends in one message with the key, the value seen and the value allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from composed import changed

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import compose_values, load
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_dir import open_run
from tests.unit.hf_folder import write_model_folder

QWEN2: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 64,
    "max_position_embeddings": 32,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}


def refusal(changes: dict[str, Any], world_size: int = 1) -> str:
    """The message that a configuration with these changes is refused with."""
    with pytest.raises(ConfigError) as caught:
        derive(changed(changes), world_size)
    return str(caught.value)


def composition_refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(words)
    return str(caught.value)


BAD_VALUES: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"checkpoint.drop_incomplete_targets_on_restore": True},
        ["checkpoint.drop_incomplete_targets_on_restore", "got true", "must be false", "load_replay_buffer"],
    ),
    (
        {"run.deterministic": True, "schedule.in_flight_weight_updates": True},
        [
            "schedule.max_trajectory_age_steps: got 1; must be 0 with run.deterministic",
            "schedule.warmup_generation_lead_steps: got 2; must be null",
            "schedule.in_flight_weight_updates: got True; must be false",
        ],
    ),
    (
        {
            "run.deterministic": True,
            "schedule.max_trajectory_age_steps": 0,
            "schedule.warmup_generation_lead_steps": None,
            "schedule.max_generation_failures": 2,
            "inference.replicas": 2,
            "collector.max_concurrent_groups": 3,
        },
        [
            "schedule.max_generation_failures: got 2; must be 0",
            "inference.replicas: got 2; must be 1",
            "collector.max_concurrent_groups: got 3; must be null or >= algorithm.num_prompts_per_step=4",
        ],
    ),
    (
        {"watchdog.refit_s": 100.0, "refit.timeout_s": 120.0},
        ["watchdog.refit_s", "got 100", "refit.timeout_s = 120"],
    ),
    (
        {"refit.straggler_patience_s": 120.0, "refit.timeout_s": 120.0},
        ["refit.straggler_patience_s", "got 120", "null or below refit.timeout_s = 120"],
    ),
    (
        {"refit.straggler_patience_s": 0.0},
        ["refit.straggler_patience_s", "got 0.0", "must be greater than 0"],
    ),
    ({"schedule.max_trajectory_age_steps": -1}, ["schedule.max_trajectory_age_steps", "-1", ">= 0"]),
    (
        {"schedule.max_trajectory_age_steps": 3, "schedule.warmup_generation_lead_steps": 2},
        ["schedule.warmup_generation_lead_steps", "got 2", ">= 3"],
    ),
    (
        {"schedule.policy_training_start_step": 0},
        ["schedule.warmup_generation_lead_steps=2", "policy_training_start_step > 0", "got 0"],
    ),
    (
        {"schedule.warmup_max_trajectory_age_steps": 3},
        ["schedule", "warmup_generation_lead_steps=2", "warmup_max_trajectory_age_steps=3", "same value"],
    ),
    (
        {"schedule.policy_training_start_step": 4},
        ["schedule.policy_training_start_step", "got 4", "< run.max_num_steps=4"],
    ),
    (
        {
            "loss.use_importance_sampling_correction": False,
            "loss.truncated_importance_sampling_type": None,
            "loss.truncated_importance_sampling_ratio": None,
        },
        [
            "loss.use_importance_sampling_correction",
            "got False",
            "must be true",
            "max_trajectory_age_steps=1",
        ],
    ),
    ({"loss.force_on_policy_ratio": True}, ["loss.force_on_policy_ratio", "got True", "must be false"]),
    ({"run.seed": 2**32}, ["run.seed", "got 4294967296", "4294967295"]),  # more would overflow torch's seed
    ({"data.seed": 2**32}, ["data.seed", "4294967295"]),
    ({"validation.seed": 2**32}, ["validation.seed", "4294967295"]),
    ({"inference.colocated": True}, ["inference.colocated", "got True", "must be false"]),
    ({"inference.backend": "sglang"}, ["inference.backend", "'sglang'", "allowed: 'vllm'"]),
    ({"inference.asynchronous": False}, ["inference.asynchronous", "got False", "must be true"]),
    ({"inference.kv_cache_dtype": "fp8"}, ["inference.kv_cache_dtype", "'fp8'", "'auto'"]),
    ({"algorithm.ppo_epochs": 0}, ["algorithm.ppo_epochs", "got 0", "greater than or equal to 1"]),
    (
        {"algorithm.train_global_batch_size": 7},
        ["algorithm.train_global_batch_size", "got 7", "divide", "16"],
    ),
    (
        {"inference.max_new_tokens": 249},
        ["max_prompt_tokens", "inference.max_new_tokens", "257", "<= 256", "policy.model"],
    ),
    ({"validation.max_new_tokens": 300}, ["validation.max_new_tokens", "308", "<= 256"]),
    ({"inference.max_model_len": 300}, ["inference.max_model_len", "got 300", "<= 256"]),
    ({"inference.max_model_len": 10}, ["inference.max_new_tokens", "16", "<= 10", "inference.max_model_len"]),
    ({"inference.top_p": 0.9}, ["inference.top_p", "got 0.9", "must be 1.0", "importance weights"]),
    ({"inference.top_k": 5}, ["inference.top_k", "got 5", "must be 0"]),
    ({"inference.temperature": 0.0}, ["inference.temperature", "got 0.0", "greater than 0"]),
    (
        {
            "algorithm.skip_reference_policy_logprobs_calculation": True,
            "loss.reference_policy_kl_penalty": 0.1,
        },
        [
            "algorithm.skip_reference_policy_logprobs_calculation",
            "got True",
            "reference_policy_kl_penalty=0.1",
        ],
    ),
    (
        {"policy.model.path": "/nowhere/model", "policy.model.recipe": None},
        ["policy.model.path", "/nowhere/model", "folder"],
    ),
    ({"policy.model.path": "/nowhere/model"}, ["policy.model", "exactly one", "got both"]),
    ({"policy.model.recipe": None}, ["policy.model", "exactly one", "got neither"]),
    ({"policy.model.recipe.num_heads": 3}, ["num_heads", "64"]),
    (
        {"policy.model.recipe._target_": "a.b.C"},
        ["policy.model.recipe._target_", "'a.b.C'", "allowed", "WarmStartRecipe"],
    ),
    ({"data.task": "sort"}, ["data.task", "'sort'", "allowed", "sort3_5"]),
    ({"advantage._target_": "a.GAE"}, ["advantage._target_", "'a.GAE'", "megatron_ppo.loop.advantage.GAE"]),
    ({"run.max_num_epochs": 3}, ["run.max_num_epochs", "got 3", "-1"]),
    ({"run.resume": "/nowhere/run"}, ["run.resume", "/nowhere/run", "auto", "never"]),
    ({"run.name": "a/b"}, ["run.name", "'a/b'", "pattern"]),
    ({"critic.optimizer.min_lr": 1.0}, ["critic.optimizer.min_lr", "1.0", "lr=0.001"]),
    (
        {"policy.scheduler.lr_warmup_steps": 6},
        ["policy.scheduler.lr_warmup_steps", "got 6", "lr_decay_steps=6"],
    ),
    (
        {"policy.overlap_param_gather": True},
        ["policy.overlap_param_gather", "needs overlap_grad_reduce=true"],
    ),
    ({"critic.ddp_bucket_size": 100}, ["critic.ddp_bucket_size", "got 100", "overlap_grad_reduce=false"]),
    ({"policy.recompute.granularity": "full"}, ["policy.recompute.method", "must be set"]),
    (
        {"policy.recompute.granularity": "some"},
        ["policy.recompute.granularity", "'some'", "allowed", "'full'"],
    ),
    ({"loss.ratio_clip_c": 0.5}, ["loss.ratio_clip_c", "0.5", "> 1"]),
    ({"value_loss.cliprange": -1.0}, ["value_loss.cliprange", "-1.0", "> 0"]),
    ({"inference.engine": {"model": "x"}}, ["inference.engine.model", "policy.model"]),
    ({"inference.engine": {"pipeline_parallel_size": 2}}, ["inference.engine.pipeline_parallel_size", "1"]),
    ({"inference.engine": {"hf_token": "hf_abc"}}, ["inference.engine.hf_token", "secret", "environment"]),
    (
        {
            "reward._target_": "megatron_ppo.rewards.exact_match.ExactMatch",
            "reward.options": {"judge": [{"API_KEY": "abc"}]},
        },
        ["reward.options.judge[0].API_KEY", "secret"],
    ),
    ({"checkpoint.metric": "accuracy"}, ["checkpoint.metric", "'accuracy'", "(train|validation)/"]),
    ({"gates.g": {"metric": "m", "op": "~", "value": 1}}, ["gates.g.op", "'~'", "'<='"]),
    (
        {"gates.g": {"metric": "m", "op": "<", "value": 1, "steps": [5, 2]}},
        ["gates.g", "[5, 2]", "first <= last"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "fragments"), BAD_VALUES, ids=[str(changes) for changes, _ in BAD_VALUES]
)
def test_bad_value_is_refused_with_key_value_and_what_is_allowed(
    changes: dict[str, Any], fragments: list[str]
) -> None:
    message = refusal(changes)
    assert [fragment for fragment in fragments if fragment not in message] == []


BAD_LAYOUTS: list[tuple[dict[str, Any], int, list[str]]] = [
    (
        {"policy.parallelism.tensor_model_parallel_size": 2},
        3,
        ["policy.parallelism", "2 ranks", "3, the world size"],
    ),
    ({"critic.parallelism.data_parallel_size": 2}, 1, ["critic.parallelism", "2 ranks", "1, the world size"]),
    (
        {"policy.parallelism.tensor_model_parallel_size": 4, "policy.model.recipe.ffn_hidden_size": 190},
        4,
        ["tensor_model_parallel_size", "got 4", "MLP width 190"],
    ),
    (
        {"policy.parallelism.pipeline_model_parallel_size": 4},
        4,
        ["pipeline_model_parallel_size", "got 4", "2 layers"],
    ),
    ({"policy.parallelism.sequence_parallel": True}, 1, ["sequence_parallel", "got True", "> 1"]),
    (
        {"policy.parallelism.context_parallel_size": 2},
        3,
        ["policy.parallelism", "context 2", "2 ranks", "3, the world size"],
    ),
    (
        {"critic.parallelism.expert_model_parallel_size": 2},
        2,
        ["expert_model_parallel_size", "got 2", "has no experts"],
    ),
    (
        {"policy.parallelism.virtual_pipeline_model_parallel_size": 2},
        1,
        [
            "policy.parallelism.virtual_pipeline_model_parallel_size",
            "got 2",
            "pipeline_model_parallel_size > 1, got 1",
        ],
    ),
    (
        {
            "critic.parallelism.pipeline_model_parallel_size": 2,
            "critic.parallelism.virtual_pipeline_model_parallel_size": 2,
        },
        2,
        ["critic.parallelism.virtual_pipeline_model_parallel_size", "got 2", "divide the model's 2 layers"],
    ),
    (
        {
            "policy.model.recipe.num_layers": 4,
            "policy.parallelism.pipeline_model_parallel_size": 2,
            "policy.parallelism.virtual_pipeline_model_parallel_size": 2,
            "algorithm.train_global_batch_size": 1,
        },
        2,
        ["policy.parallelism.virtual_pipeline_model_parallel_size", "got 1 sequences and 2 stages"],
    ),
    (
        {
            "policy.parallelism.pipeline_model_parallel_size": 2,
            "policy.recompute.granularity": "full",
            "policy.recompute.method": "block",
            "policy.recompute.num_layers": 2,
        },
        2,
        ["policy.recompute.num_layers", "got 2", "must be <= 1", "pipeline chunk"],
    ),
    (
        {
            "policy.parallelism.tensor_model_parallel_size": 1,
            "algorithm.num_prompts_per_step": 3,
            "algorithm.num_generations_per_prompt": 3,
            "algorithm.train_global_batch_size": 9,
        },
        2,
        ["num_prompts_per_step * num_generations_per_prompt = 9", "policy's data-parallel size", "got 2"],
    ),
    (
        {"critic.parallelism.tensor_model_parallel_size": 1, "algorithm.train_global_batch_size": 1},
        2,
        ["algorithm.train_global_batch_size", "got 1", "critic's data-parallel size 2"],
    ),
    ({"cluster.world_size": 4}, 2, ["cluster.world_size", "got 4", "2"]),
    (
        {"inference.tensor_parallel_size": 3},
        1,
        [
            "inference.tensor_parallel_size: got 3; must divide the model's number of heads 2",
            "number of KV heads 2, or be a multiple of it",
            "vocabulary, filled up to a multiple of 64, 64",
        ],
    ),
    (
        {"inference.tensor_parallel_size": 2, "policy.model.recipe.ffn_hidden_size": 191},
        1,
        ["inference.tensor_parallel_size: got 2; must divide the model's MLP width 191"],
    ),
]


@pytest.mark.parametrize(
    ("changes", "ranks", "fragments"), BAD_LAYOUTS, ids=[str(case[0]) for case in BAD_LAYOUTS]
)
def test_layout_that_does_not_fit_is_refused(
    changes: dict[str, Any], ranks: int, fragments: list[str]
) -> None:
    message = refusal(changes, ranks)
    assert [fragment for fragment in fragments if fragment not in message] == []


def test_an_engine_that_cannot_share_out_the_heads_of_smollm2_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"inference\.tensor_parallel_size: got 2; .*number of heads 9"):
        derive(changed({"inference.tensor_parallel_size": 2}, name="smollm2_135m_chain_sum"), 1)


@pytest.mark.parametrize(("kv_heads", "tensor"), [(4, 2), (2, 4), (1, 4)])
def test_an_engine_may_give_several_ranks_the_same_kv_head(
    tmp_path: Path, kv_heads: int, tensor: int
) -> None:
    folder = _folder(tmp_path / "m", num_key_value_heads=kv_heads)
    derive(changed({**_use(folder), "inference.tensor_parallel_size": tensor}), 1)


@pytest.mark.parametrize("value", ["", "two", "0", "-2"])
def test_world_size_of_the_environment_must_be_a_number(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("WORLD_SIZE", value)
    with pytest.raises(ConfigError, match="WORLD_SIZE in the environment"):
        derive(changed({}))


def test_all_problems_are_reported_together() -> None:
    message = refusal({"inference.top_p": 0.5, "inference.top_k": 3, "run.max_num_epochs": 2})
    assert message.startswith("bad configuration, 3 problems:")
    assert message.count("\n") == 3


def test_all_findings_of_the_schema_are_reported_together() -> None:
    message = refusal({"algorithm.ppo_epochs": 0, "policy.optimizer.lr": -1.0, "run.max_num_steps": 0})
    assert message.startswith("bad configuration, 3 problems:")


MISSPELT = [
    ("schedule.max_trajectory_age_step=1", "did you mean schedule.max_trajectory_age_steps?"),
    ("schedules.max_trajectory_age_steps=1", "did you mean schedule.max_trajectory_age_steps?"),
    ("shedule.x=1", "did you mean schedule?"),  # codespell:ignore shedule
    ("+experimentt=cpu_smoke", "did you mean experiment?"),  # codespell:ignore experimentt
    ("algorithm.gae_lambda=1", "did you mean advantage.gae_lambda?"),
    ("+schedule.max_age=1", "schedule has: max_trajectory_age_steps"),
    ("+policy.optimizer.learning_rate=1", "policy.optimizer has: lr"),
    ("+policy.model.recipe.sft_step=3", "did you mean policy.model.recipe.sft_steps?"),
    ("+experiment=cpu_smok", "did you mean cpu_smoke?"),
    ("experiment=cpu_smoke", "write +experiment=cpu_smoke"),
    ("data=sort", "available: chain_sum, count_long, gsm8k, sort3_5"),
    ("loss=[", "loss=["),
]


@pytest.mark.parametrize(("word", "fragment"), MISSPELT)
def test_misspelt_key_is_refused_with_a_suggestion(word: str, fragment: str) -> None:
    message = composition_refusal(*(["+experiment=cpu_smoke"] if "experiment=" not in word else []), word)
    assert message.startswith("bad configuration: ")
    if fragment != "loss=[":
        assert fragment in message
    assert "\n" not in message


def test_misspelt_key_inside_a_gate_is_named_by_its_full_path() -> None:
    message = refusal({"gates.g": {"metric": "m", "op": "<", "value": 1, "step": [1, 2]}})
    assert "gates.g.step: unknown key" in message


def test_choosing_nothing_says_what_there_is() -> None:
    assert "data: must be chosen; available: chain_sum, count_long, gsm8k, sort3_5" in composition_refusal()


def test_every_mandatory_key_is_named_when_none_is_set() -> None:
    message = composition_refusal("data=sort3_5", "model@policy.model=sort3_5_tiny")
    for key in ("run.name", "run.max_num_steps", "inference.max_new_tokens"):
        assert f"{key}: must be set" in message


def _folder(path: Path, **changes: Any) -> Path:
    write_model_folder(path, {**QWEN2, **changes})
    return path


def _use(folder: Path) -> dict[str, Any]:
    return {"policy.model.path": str(folder), "policy.model.recipe": None}


def test_model_folder_gives_sizes_and_context(tmp_path: Path) -> None:
    derived = derive(changed(_use(_folder(tmp_path / "m"))), 4)
    assert str(derived.policy) == "tp=2 pp=1 cp=1 dp=2"
    assert derived.policy_model.context_length == 32


@pytest.mark.parametrize(
    ("changes", "fragments"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"max_position_embeddings": 12}, ["<= 12", "policy.model"]),
        ({"vocab_size": None}, ["vocab_size"]),
    ],
)
def test_model_that_cannot_be_used_is_refused(
    tmp_path: Path, changes: dict[str, Any], fragments: list[str]
) -> None:
    message = refusal(_use(_folder(tmp_path / "m", **changes)))
    assert [fragment for fragment in fragments if fragment not in message] == []


def test_model_folder_without_config_or_weights_is_refused(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "safetensors" in refusal(_use(empty))
    (empty / "model.safetensors").write_bytes(b"")
    assert "config.json" in refusal(_use(empty))
    (empty / "config.json").write_text("{")
    assert "JSON" in refusal(_use(empty))


EXPECTED = {
    "architecture": "Qwen2ForCausalLM", "num_layers": 4, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2,
    "head_dim": 16, "ffn_hidden_size": 128, "vocab_size": 64, "context_length": 32, "tie_word_embeddings": False,
}  # fmt: skip


def test_folder_with_other_sizes_than_expected_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    facts = derive(changed(_use(folder)), 1).policy_model
    expected = {name: getattr(facts, name) for name in EXPECTED}
    assert derive(changed({**_use(folder), "policy.model.expected": expected}), 1).policy_model == facts
    message = refusal({**_use(folder), "policy.model.expected": {**expected, "num_layers": 99}})
    assert f"num_layers={facts.num_layers} instead of 99, as policy.model.expected says" in message


def test_absent_folder_is_refused_for_a_run_and_taken_as_expected_for_a_check() -> None:
    config = changed({**_use(Path("/nowhere/model")), "policy.model.expected": EXPECTED})
    with pytest.raises(ConfigError, match=r"policy\.model\.path: got '/nowhere/model'"):
        derive(config, 1)
    derived = derive(config, 1, folders_may_be_absent=True)
    assert derived.policy_model.num_layers == 4
    assert any("/nowhere/model is not on this machine" in warning for warning in derived.warnings)
    without = changed(_use(Path("/nowhere/model")))
    with pytest.raises(ConfigError, match="not an existing folder"):
        derive(without, 1, folders_may_be_absent=True)


def test_expected_sizes_of_a_recipe_are_refused() -> None:
    assert "policy.model.expected: may be set with policy.model.path only" in refusal(
        {"policy.model.expected": EXPECTED}
    )


def test_a_torn_weight_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    message = refusal(_use(folder))
    assert [
        part for part in ("policy.model.path", str(file), "truncated: tensor") if part not in message
    ] == []


MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 36,
}


@pytest.mark.parametrize(
    ("changes", "ranks", "fragments"),
    [
        ({"expert_model_parallel_size": 2}, 1, ["expert_model_parallel_size: got 2", "1 data-parallel"]),
        ({"expert_model_parallel_size": 4}, 4, ["expert_model_parallel_size: got 4", "6 experts"]),
        ({"tensor_model_parallel_size": 2}, 2, ["sequence_parallel: got False", "experts"]),
    ],
)
def test_a_layout_that_experts_cannot_have_is_refused(
    tmp_path: Path, changes: dict[str, Any], ranks: int, fragments: list[str]
) -> None:
    settings = {f"policy.parallelism.{key}": value for key, value in changes.items()}
    if "tensor_model_parallel_size" not in changes:
        settings["policy.parallelism.tensor_model_parallel_size"] = 1
    message = refusal({**_use(_folder(tmp_path / "m", **MOE)), **settings}, ranks)
    assert [fragment for fragment in fragments if fragment not in message] == []


def test_a_pipeline_stage_without_experts_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", **MOE, mlp_only_layers=[0])
    message = refusal({**_use(folder), "policy.parallelism.pipeline_model_parallel_size": 2}, 2)
    assert "policy.parallelism.pipeline_model_parallel_size=2 leaves stage 0 without a layer" in message


def test_expert_settings_without_experts_are_refused(tmp_path: Path) -> None:
    settings = {"policy.parallelism.expert_model_parallel_size": 2, "policy.moe_aux_loss_coeff": 0.1}
    message = refusal({**_use(_folder(tmp_path / "m")), **settings}, 2)
    assert "policy.parallelism.expert_model_parallel_size: got 2; must be 1" in message
    assert "policy.moe_aux_loss_coeff: got 0.1; must be 0" in message


def test_the_width_of_dense_layers_counts_where_there_are_any(tmp_path: Path) -> None:
    settings = {
        "policy.parallelism.tensor_model_parallel_size": 2,
        "policy.parallelism.sequence_parallel": True,
        "critic.parallelism.tensor_model_parallel_size": 1,
    }
    # Every layer has experts, of width 36: the odd number is no size of anything.
    all_experts = _folder(tmp_path / "all", **MOE, intermediate_size=127)
    assert derive(changed({**_use(all_experts), **settings}), 2).policy.tensor == 2
    some = _folder(tmp_path / "some", **MOE, intermediate_size=127, mlp_only_layers=[0])
    assert "tensor_model_parallel_size: got 2; must divide the model's MLP width 127" in refusal(
        {**_use(some), **settings}, 2
    )


def test_experts_are_shared_out_where_they_fit(tmp_path: Path) -> None:
    settings = {
        "policy.parallelism.expert_model_parallel_size": 2,
        "policy.parallelism.tensor_model_parallel_size": 1,
        "critic.parallelism.tensor_model_parallel_size": 1,
    }
    derived = derive(changed({**_use(_folder(tmp_path / "m", **MOE)), **settings}), 2)
    assert str(derived.policy) == "tp=1 pp=1 cp=1 dp=2 ep=2"


def test_critic_with_a_smaller_vocabulary_is_refused(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", vocab_size=40)
    message = refusal({"critic.model.path": str(folder)})
    assert "critic.model" in message
    assert "40" in message
    assert "64" in message


def test_a_reward_model_is_for_the_critic_only(tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", architectures=["Qwen2ForTokenClassification"], id2label={"0": "LABEL_0"})
    message = refusal(_use(folder))
    assert "policy.model.path" in message and "only critic.model.path" in message
    assert derive(changed({"critic.model.path": str(folder)}), 1).critic_model.vocab_size == 64


def test_a_critic_cannot_start_from_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "not an existing folder" in refusal({"critic.warm_start": str(tmp_path / "nowhere")})
    message = refusal({"critic.warm_start": str(tmp_path)})
    assert "critic.warm_start" in message and "holds no complete checkpoint" in message


def test_directory_of_another_experiment_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    message = refusal({"run.dir": str(tmp_path)})
    assert str(tmp_path) in message
    assert "empty" in message


def test_continuing_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    message = refusal({"run.resume": str(tmp_path)})
    assert [part for part in ("run.resume", str(tmp_path), "run.json") if part not in message] == []


def test_continuing_a_run_of_another_experiment_is_refused(tmp_path: Path) -> None:
    with open_run(tmp_path, name="other", config={}, resume="never") as run:
        message = refusal({"run.resume": str(run.directory.path)})
    assert "'other'" in message
    assert "run.name='cpu_smoke'" in message


def test_replacing_free_entries_as_a_whole_says_how_to_add_one() -> None:
    message = composition_refusal("+experiment=cpu_smoke", "inference.engine={block_size: 32}")
    assert "+inference.engine.NAME=VALUE" in message
    config = load(["+experiment=cpu_smoke", "+inference.engine.block_size=32"])
    assert config.inference.engine == {"block_size": 32}


def test_composition_leaves_no_file_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    compose_values(["+experiment=cpu_smoke"])
    assert list(tmp_path.iterdir()) == []


def test_the_value_of_a_secret_is_not_repeated_and_tokens_of_text_are_no_secrets() -> None:
    with pytest.raises(ConfigError) as refused:
        derive(changed({"inference.engine": {"hf_token": "hf_abc123"}}))
    assert "hf_abc123" not in str(refused.value)
    derive(changed({"inference.engine": {"max_num_batched_tokens": 512, "eos_token": "</s>"}}))
