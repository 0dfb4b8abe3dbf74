"""The numbers that follow from a configuration, and the combinations that are allowed (cases F1 to F8)."""

from __future__ import annotations

from typing import Any

import pytest
from composed import changed, experiment
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.config.algorithm_sections import ScheduleSection
from megatron_ppo.config.checks import derive
from megatron_ppo.config.layout import layout
from megatron_ppo.config.model_sections import ParallelismSection
from megatron_ppo.protocol.errors import ConfigError

NO_LEAD = {"schedule.warmup_generation_lead_steps": None}
AGE_0 = {**NO_LEAD, "schedule.max_trajectory_age_steps": 0}
NO_TRUNCATION = {
    "loss.truncated_importance_sampling_type": None,
    "loss.truncated_importance_sampling_ratio": None,
}


def test_defaults_are_age_one_no_lead_and_no_in_flight_updates() -> None:
    defaults = ScheduleSection()
    assert defaults.max_trajectory_age_steps == 1
    assert defaults.warmup_generation_lead_steps is None
    assert not defaults.in_flight_weight_updates
    assert not defaults.recompute_kv_cache_after_weight_updates


def test_lead_that_is_not_set_is_the_age() -> None:
    derived = derive(changed({**NO_LEAD, "schedule.max_trajectory_age_steps": 3}), 1)
    assert derived.schedule.lead == 3
    assert derive(changed(AGE_0), 1).schedule.lead == 0


ALLOWED: list[dict[str, Any]] = [
    {"schedule.recompute_kv_cache_after_weight_updates": True},
    {"schedule.max_trajectory_age_steps": 2},
    {**AGE_0, "inference.kv_cache_dtype": "fp8"},
    {**AGE_0, **NO_TRUNCATION, "loss.use_importance_sampling_correction": False},
    {
        **AGE_0,
        "loss.force_on_policy_ratio": True,
        "algorithm.ppo_epochs": 1,
        "algorithm.train_global_batch_size": 16,
    },
    {"validation.top_p": 0.9, "validation.temperature": 1.0},
    {"loss.reference_policy_kl_penalty": 0.1},
    {"inference.engine": {"swap_space": 0}},
    {**AGE_0, "run.deterministic": True, "collector.max_concurrent_groups": 4},
]


@pytest.mark.parametrize("changes", ALLOWED, ids=str)
def test_combination_is_allowed(changes: dict[str, Any]) -> None:
    derive(changed(changes), 1)


@pytest.mark.parametrize(
    ("changes", "fragment"),
    [
        (
            {"algorithm.ppo_epochs": 2, "algorithm.train_global_batch_size": 16},
            "needs algorithm.ppo_epochs=1, got 2",
        ),
        ({"algorithm.ppo_epochs": 1}, "needs algorithm.train_global_batch_size=16"),
    ],
)
def test_forced_ratio_needs_one_update_a_step(changes: dict[str, Any], fragment: str) -> None:
    with pytest.raises(ConfigError, match=fragment):
        derive(changed({**AGE_0, "loss.force_on_policy_ratio": True, **changes}), 1)


@pytest.mark.parametrize("key", ["inference.colocated", "inference.asynchronous"])
def test_what_is_not_supported_is_refused_at_age_zero_as_well(key: str) -> None:
    with pytest.raises(ConfigError, match="not supported"):
        derive(changed({**AGE_0, key: key == "inference.colocated"}), 1)


def test_reference_logprobs_are_computed_exactly_when_a_penalty_needs_them() -> None:
    skip = "algorithm.skip_reference_policy_logprobs_calculation"
    penalty = "loss.reference_policy_kl_penalty"
    assert not derive(changed({}), 1).needs_reference
    assert derive(changed({penalty: 0.1}), 1).needs_reference
    assert derive(changed({skip: False}), 1).needs_reference
    assert not derive(changed({skip: True}), 1).needs_reference


def test_numbers_of_the_default_experiment() -> None:
    derived = derive(experiment("megatron_40step"), 2)
    assert str(derived.policy) == str(derived.critic) == "tp=2 pp=1 cp=1 dp=1"
    assert derived.frontiers == (1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert (derived.sequences_per_step, derived.minibatches_per_epoch) == (128, 4)
    assert derived.buffer_capacity == 64
    # 8 prompt tokens, 8 response tokens, and one more to score a finished sequence.
    assert derived.max_model_len == 17
    # The policy's schedule does not tick in the five frozen steps.
    assert (derived.policy_scheduler_ticks, derived.critic_scheduler_ticks) == (35, 40)
    assert derived.warnings == ()


def test_engine_limit_never_exceeds_the_context_of_the_model() -> None:
    derived = derive(changed({"inference.max_new_tokens": 248}), 1)
    assert derived.max_model_len == 256


def test_frontier_of_a_short_run_ends_with_its_last_target() -> None:
    assert derive(experiment("cpu_smoke"), 1).frontiers == (2, 2, 3, 3)


def test_age_above_one_gives_advice() -> None:
    two = {"schedule.max_trajectory_age_steps": 2}
    assert len(derive(changed(two), 1).warnings) == 2
    in_flight = derive(changed({**two, "schedule.in_flight_weight_updates": True}), 1)
    assert len(in_flight.warnings) == 1
    assert "biases" in in_flight.warnings[0]


def test_world_size_comes_from_the_launcher_then_from_the_configuration(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert derive(changed({})).world_size == 1
    assert derive(changed({"cluster.world_size": 2})).world_size == 2
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert derive(changed({})).world_size == 4


def test_policy_and_critic_may_have_different_layouts() -> None:
    derived = derive(changed({"critic.parallelism.tensor_model_parallel_size": 1}), 2)
    assert (str(derived.policy), str(derived.critic)) == ("tp=2 pp=1 cp=1 dp=1", "tp=1 pp=1 cp=1 dp=2")
    long = derive(
        changed(
            {
                "policy.parallelism.context_parallel_size": 2,
                "critic.parallelism.sequence_parallel": True,
                "critic.parallelism.tensor_model_parallel_size": 2,
            }
        ),
        4,
    )
    assert (str(long.policy), str(long.critic)) == ("tp=2 pp=1 cp=2 dp=1", "tp=2 pp=1 cp=1 dp=2")


def test_table_shows_every_number_once() -> None:
    rows = list(derive(experiment("cpu_smoke"), 2).rows())
    names = [name for name, _ in rows]
    assert len(names) == len(set(names)) == 17
    assert ("frontier at step 0, 1, …", "2, 2, 3, 3") in rows
    assert ("weight version at step 0, 1, …", "0, 0, 1, 2") in rows


class _Model:
    architecture, num_layers, hidden_size, vocab_size, context_length = "LlamaForCausalLM", 12, 96, 100, 64
    num_experts = moe_ffn_hidden_size = 0
    has_dense_layers = True

    def __init__(self, num_heads: int, num_kv_heads: int, ffn_hidden_size: int) -> None:
        self.num_heads, self.num_kv_heads, self.ffn_hidden_size = num_heads, num_kv_heads, ffn_hidden_size


@given(
    world_size=st.integers(1, 64),
    pipeline=st.sampled_from([1, 2, 3, 4]),
    kv_heads=st.integers(1, 8),
    heads_per_kv=st.integers(1, 4),
    ffn=st.sampled_from([96, 192, 1536]),
)
def test_automatic_tensor_size_is_the_largest_that_fits(
    world_size: int, pipeline: int, kv_heads: int, heads_per_kv: int, ffn: int
) -> None:
    model = _Model(kv_heads * heads_per_kv, kv_heads, ffn)
    section = ParallelismSection(pipeline_model_parallel_size=pipeline)
    sizes, problems = layout(section, key="p", world_size=world_size, model=model)
    assert (problems == []) == (world_size % pipeline == 0)
    if problems:
        return
    assert sizes.world_size == world_size
    ranks = world_size // pipeline
    fitting = [
        n
        for n in range(1, ranks + 1)
        if all(m % n == 0 for m in (ranks, kv_heads * heads_per_kv, kv_heads, ffn))
    ]
    assert sizes.tensor == max(fitting)


def test_a_key_that_does_nothing_and_a_tolerance_for_another_format_are_warned_about() -> None:
    recompute = {"schedule.recompute_kv_cache_after_weight_updates": True}
    (warning,) = derive(changed(recompute), 1).warnings
    assert "in_flight_weight_updates" in warning
    assert derive(changed({**recompute, "schedule.in_flight_weight_updates": True}), 1).warnings == ()
    bf16 = {"policy.precision": "bf16", "inference.dtype": "bfloat16"}
    (warning,) = derive(changed(bf16), 1).warnings
    assert "refit.probe_tolerance_nats=0.0001" in warning
    assert "policy.precision=bf16, inference.dtype=bfloat16" in warning
    assert derive(changed({**bf16, "refit.probe_tolerance_nats": 0.05}), 1).warnings == ()
    assert derive(changed({**bf16, "refit.probe": False}), 1).warnings == ()


def test_restarts_of_engines_that_could_not_save_the_run_are_warned_about() -> None:
    no_retries = {"collector.max_retries": 0}
    (warning,) = derive(changed(no_retries), 1).warnings
    assert "inference.max_engine_restarts=5 does not let the run survive" in warning
    for change in ({"schedule.max_generation_failures": 3}, {"inference.max_engine_restarts": 0}):
        assert derive(changed({**no_retries, **change}), 1).warnings == ()


def test_a_tensor_size_that_does_not_divide_the_kv_heads_is_allowed_and_its_cost_named() -> None:
    key = "policy.parallelism.tensor_model_parallel_size"
    derived = derive(changed({key: 2}, name="smollm2_135m_chain_sum"), 2)
    assert str(derived.policy) == "tp=2 pp=1 cp=1 dp=1"
    assert str(derived.critic) == "tp=1 pp=1 cp=1 dp=2"  # by itself nothing is padded
    (warning,) = (line for line in derived.warnings if key in line)
    assert "3 KV heads: zeros fill them up to 4" in warning
    assert "1.33 times" in warning


def test_a_deterministic_run_has_a_whole_step_in_flight_whatever_the_engine_has_room_for() -> None:
    changes = {**AGE_0, "algorithm.num_prompts_per_step": 32, "inference.max_num_seqs": 8}
    assert derive(changed(changes), 1).max_concurrent_groups == 2
    assert derive(changed({**changes, "run.deterministic": True}), 1).max_concurrent_groups == 32
