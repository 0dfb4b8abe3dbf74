"""Token budgets: resolved from lengths and layout, and refused where a sequence would not fit."""

from __future__ import annotations

from typing import Any

import pytest
from composed import changed, experiment

from megatron_ppo.config.batching import token_budgets
from megatron_ppo.config.checks import derive
from megatron_ppo.config.derived import ParallelSizes, TokenBudgets
from megatron_ppo.config.model_sections import CriticSection, PolicySection
from megatron_ppo.protocol.errors import ConfigError

ONE = ParallelSizes(tensor=1, pipeline=1, context=1, data=1)


def budgets(sizes: ParallelSizes = ONE, **section: Any) -> tuple[TokenBudgets | None, list[str]]:
    return token_budgets(PolicySection(**section), sizes, key="policy", max_model_len=100)


def test_fixed_sizes_have_no_budget() -> None:
    assert budgets() == (None, [])
    derived = derive(experiment("cpu_smoke"), 1)
    assert derived.policy_budgets is None and derived.critic_budgets is None
    assert not any("budgets" in name for name, _ in derived.rows())


def test_a_budget_that_is_not_set_holds_as_many_of_the_longest_sequences_as_the_fixed_size() -> None:
    padded, problems = budgets(
        dynamic_batching={"enabled": True}, train_micro_batch_size=4, logprob_batch_size=8
    )
    assert problems == []
    assert padded == TokenBudgets(train=4 * 128, score=8 * 128, packed=False, multiple=64)
    packed, _ = budgets(sequence_packing={"enabled": True}, train_micro_batch_size=4, logprob_batch_size=8)
    assert packed == TokenBudgets(train=400, score=800, packed=True, multiple=1)


def test_lengths_are_rounded_up_to_what_the_layout_can_cut() -> None:
    # Two chunks per context rank, each cut over two tensor ranks: 8. Rounding to 12 besides: 24.
    sizes = ParallelSizes(tensor=2, pipeline=1, context=2, data=1)
    layout = {"parallelism": {"sequence_parallel": True}}
    packed, _ = budgets(sizes, sequence_packing={"enabled": True}, train_micro_batch_size=1, **layout)
    assert packed is not None and (packed.multiple, packed.train) == (8, 104)
    dynamic = {"enabled": True, "sequence_length_round": 12}
    padded, _ = budgets(sizes, dynamic_batching=dynamic, train_micro_batch_size=1, **layout)
    assert padded is not None and (padded.multiple, padded.train) == (24, 120)


def test_a_budget_smaller_than_the_longest_sequence_is_refused_with_its_key() -> None:
    _, problems = budgets(
        dynamic_batching={"enabled": True, "train_mb_tokens": 127, "logprob_mb_tokens": 128}
    )
    assert len(problems) == 1
    assert "policy.dynamic_batching.train_mb_tokens: got 127; must be >= 128" in problems[0]
    assert "inference.max_model_len = 100 tokens, rounded up to a multiple of 64" in problems[0]
    changes = {
        "critic.sequence_packing": {"enabled": True, "logprob_mb_tokens": 7},
        "inference.max_model_len": 40,
    }
    with pytest.raises(ConfigError, match=r"critic.sequence_packing.logprob_mb_tokens: got 7; must be >= 40"):
        derive(changed(changes), 1)


def test_a_microbatch_is_not_both_padded_and_packed() -> None:
    changes = {"policy.dynamic_batching.enabled": True, "policy.sequence_packing.enabled": True}
    with pytest.raises(ConfigError, match=r"policy.sequence_packing.enabled: got True; must be false with"):
        derive(changed(changes), 1)


@pytest.mark.parametrize("key", ["dynamic_batching.train_mb_tokens", "logprob_chunk_size"])
def test_sizes_are_positive(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy.{key}"):
        changed({f"policy.{key}": 0})


def test_the_critic_has_no_vocabulary_to_compute_in_chunks() -> None:
    assert "logprob_chunk_size" not in CriticSection.model_fields


def test_budgets_are_shown_with_the_derived_numbers() -> None:
    rows = dict(derive(changed({"policy.sequence_packing.enabled": True}), 1).rows())
    assert "packed, lengths in multiples of 1" in rows["policy_budgets"]
    assert "critic_budgets" not in rows


def test_the_reference_job_trains_its_critic_in_dynamic_batches() -> None:
    derived = derive(experiment("qwen2.5_1.5b_gsm8k_2n8g"), 8, folders_may_be_absent=True)
    assert derived.critic_budgets is not None and not derived.critic_budgets.packed
    assert derived.critic_budgets.train >= derived.max_model_len
