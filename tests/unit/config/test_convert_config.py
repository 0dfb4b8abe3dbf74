"""The keys of an existing configuration are mapped to ours or reported, none is lost."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.config.compose import CONFIG_DIR
from megatron_ppo.config.convert import _rules, convert
from megatron_ppo.config.messages import known_keys

THEIRS: dict[str, Any] = {
    "ppo": {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 2,
        "ppo_epochs": 1,
        "max_num_steps": 10,
        "max_num_epochs": -1,
        "policy_training_start_step": 2,
        "val_period": 5,
        "val_batch_size": 16,
        "async_ppo": {
            "enabled": True,
            "max_trajectory_age_steps": 2,
            "warmup_max_trajectory_age_steps": 3,
            "in_flight_weight_updates": True,
            "drop_incomplete_targets_on_restore": False,
        },
        "adv_estimator": {"name": "gae", "gae_lambda": 0.9},
    },
    "loss_fn": {"ratio_clip_min": 0.1, "use_importance_sampling_correction": True},
    "value_loss_fn": {"cliprange": 0.5},
    "checkpointing": {"enabled": True, "metric_name": "val:accuracy", "keep_top_k": 3},
    "policy": {
        "model_name": "/models/x",
        "precision": "bfloat16",
        "train_global_batch_size": 8,
        "logprob_chunk_size": 1024,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 4096, "algorithm": "first_fit"},
        "megatron_cfg": {"tensor_model_parallel_size": 2, "optimizer": {"lr": 1e-6}},
        "generation": {
            "top_k": None,
            "max_new_tokens": 64,
            "vllm_cfg": {"async_engine": True, "precision": "bfloat16"},
        },
    },
    "value": {
        "dynamic_batching": {"enabled": True, "logprob_mb_tokens": 8192, "sequence_length_round": 32},
        "megatron_cfg": {"optimizer": {"lr": 1e-5}, "scheduler": {"lr_warmup_iters": 4}},
    },
    "cluster": {"num_nodes": 1},
}


def test_values_land_under_our_keys() -> None:
    ours = convert(THEIRS).values
    assert ours["algorithm"] == {
        "num_prompts_per_step": 8,
        "num_generations_per_prompt": 2,
        "ppo_epochs": 1,
        "train_global_batch_size": 8,
    }
    assert ours["schedule"] == {
        "policy_training_start_step": 2,
        "max_trajectory_age_steps": 2,
        "warmup_max_trajectory_age_steps": 3,
        "in_flight_weight_updates": True,
    }
    assert ours["policy"] == {
        "model": {"path": "/models/x"},
        "precision": "bf16",
        "parallelism": {"tensor_model_parallel_size": 2},
        "optimizer": {"lr": 1e-6},
        "logprob_chunk_size": 1024,
        "sequence_packing": {"enabled": True, "train_mb_tokens": 4096},
    }
    assert ours["critic"] == {
        "optimizer": {"lr": 1e-5},
        "scheduler": {"lr_warmup_steps": 4},
        "dynamic_batching": {"enabled": True, "logprob_mb_tokens": 8192, "sequence_length_round": 32},
    }
    assert ours["inference"] == {"top_k": 0, "max_new_tokens": 64, "asynchronous": True, "dtype": "bfloat16"}
    assert ours["checkpoint"] == {
        "metric": "validation/accuracy",
        "keep_best": 3,
        "drop_incomplete_targets_on_restore": False,
    }


def test_keys_without_counterpart_are_reported_with_a_reason() -> None:
    unmapped = convert(THEIRS).unmapped
    assert set(unmapped) == {
        "ppo.val_batch_size",
        "checkpointing.enabled",
        "cluster.num_nodes",
        "policy.sequence_packing.algorithm",
    }
    assert unmapped["checkpointing.enabled"] == "checkpoint.period 0 turns checkpoints off"


def test_async_off_becomes_age_zero() -> None:
    off = convert({"ppo": {"async_ppo": {"max_trajectory_age_steps": 4, "enabled": False}}})
    assert off.values == {"schedule": {"max_trajectory_age_steps": 0}}


def test_every_rule_ends_at_a_key_of_the_schema() -> None:
    assert {target for _, target, _ in _rules()} - set(known_keys()) == set()


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(), min_size=1))
def test_unknown_keys_are_all_reported(section: dict[str, int]) -> None:
    conversion = convert({"ppo": dict(section), "other": dict(section)})
    assert conversion.values == {}
    assert set(conversion.unmapped) == {f"{top}.{key}" for top in ("ppo", "other") for key in section}


def test_script_writes_an_overlay_and_lists_the_rest(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(THEIRS))
    done = subprocess.run(
        [sys.executable, "scripts/convert_config.py", str(file)],
        cwd=CONFIG_DIR.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.startswith("# @package _global_\n")
    overlay = yaml.safe_load(done.stdout)
    assert overlay["run"] == {"max_num_steps": 10, "max_num_epochs": -1, "name": "recipe"}
    assert "not mapped: cluster.num_nodes: " in done.stderr
