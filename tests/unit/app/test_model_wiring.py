"""What the configuration says of a layout and of how a model runs reaches the models. Builds none of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron_ppo.app import models
from megatron_ppo.config.checks import derive
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.data.microbatch_plan import FixedSize, TokenBudget
from megatron_ppo.loop.residency import STATIONARY
from megatron_ppo.mcore.settings import (
    OptimizerSettings,
    OverlapSettings,
    RecomputeSettings,
    SchedulerSettings,
    TrainingSettings,
)
from tests.unit.config.composed import changed
from tests.unit.hf_folder import OF_EXPERTS, TINY_QWEN2, write_model_folder

RANKS = 8
POLICY: dict[str, Any] = {
    "model.recipe.num_layers": 4,
    "parallelism.tensor_model_parallel_size": 2,
    "parallelism.pipeline_model_parallel_size": 2,
    "parallelism.virtual_pipeline_model_parallel_size": 2,
    "parallelism.context_parallel_size": 2,
    "parallelism.sequence_parallel": True,
    "sequence_packing.enabled": True,
    "sequence_packing.train_mb_tokens": 200,
    "sequence_packing.logprob_mb_tokens": 400,
    "recompute.granularity": "full",
    "recompute.method": "block",
    "recompute.num_layers": 1,
    "precision": "bf16",
    "transformer_impl": "local",
    "overlap_grad_reduce": True,
    "overlap_param_gather": True,
    "ddp_bucket_size": 12345,
    "logprob_chunk_size": 7,
    "train_micro_batch_size": 3,
    "logprob_batch_size": 5,
    "optimizer.lr": 1e-3,
    "optimizer.min_lr": 1e-4,
    "optimizer.adam_beta1": 0.8,
    "optimizer.adam_beta2": 0.9,
    "optimizer.adam_eps": 1e-6,
    "optimizer.weight_decay": 0.2,
    "optimizer.clip_grad": 0.3,
    "scheduler.lr_decay_style": "cosine",
    "scheduler.lr_warmup_steps": 2,
    "scheduler.lr_decay_steps": 9,
}
CRITIC: dict[str, Any] = {
    "parallelism.tensor_model_parallel_size": 1,
    "parallelism.expert_model_parallel_size": 4,
    "recompute.granularity": "selective",
    "recompute.modules": ["core_attn", "moe"],
    "moe_aux_loss_coeff": 0.25,
    "overlap_grad_reduce": True,
    "dynamic_batching.enabled": True,
    "dynamic_batching.sequence_length_round": 16,
    "dynamic_batching.train_mb_tokens": 320,
    "dynamic_batching.logprob_mb_tokens": 640,
}


def config_of(tmp_path: Path, **further: Any) -> RunConfig:
    write_model_folder(tmp_path / "experts", {**TINY_QWEN2, **OF_EXPERTS})
    return changed(
        {
            **{f"policy.{key}": value for key, value in POLICY.items()},
            **{f"critic.{key}": value for key, value in CRITIC.items()},
            "critic.model.path": str(tmp_path / "experts"),
            "cluster.process_group_timeout_s": 77.0,
            "run.seed": 5,
            "inference.temperature": 0.7,
            "inference.max_new_tokens": 8,
            "loss.reference_policy_kl_penalty": 0.1,
            "loss.ratio_clip_max": 0.28,
            "value_loss.cliprange": 0.5,
            **further,
        }
    )


def passed(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Keyword arguments of both models, with those of their `ParallelContext` under `parallel`."""
    seen: dict[str, dict[str, Any]] = {}

    def building(dotted: str) -> Any:
        def build(**kwargs: Any) -> Any:
            seen[dotted.rpartition(".")[2]] = kwargs
            return SimpleNamespace(residence=STATIONARY, reference_residence=STATIONARY)

        return build

    monkeypatch.setattr(models, "resolve", building)
    monkeypatch.setattr(models.ParallelContext, "create", lambda **sizes: sizes)
    models.build_models(
        config,
        derive(config, RANKS),
        policy_folder=Path("policy"),
        critic_folder=Path("critic"),
        pad_token_id=3,
    )
    return seen


def test_every_key_of_a_layout_and_of_execution_reaches_the_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = passed(config_of(tmp_path), monkeypatch)
    policy, critic = seen["MegatronPolicy"], seen["MegatronCritic"]
    assert policy.pop("loss").ratio_clip_max == 0.28
    assert policy == {
        "model": Path("policy"),
        "parallel": {
            "tensor_model_parallel_size": 2,
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "context_parallel_size": 2,
            "expert_model_parallel_size": 1,
            "sequence_parallel": True,
            "timeout_s": 77.0,
        },
        "temperature": 0.7,
        "reference": True,
        "pad_token_id": 3,
        "seed": 5,
        "logprob_chunk_size": 7,
        "training": TrainingSettings(
            optimizer=OptimizerSettings(
                lr=1e-3,
                min_lr=1e-4,
                adam_beta1=0.8,
                adam_beta2=0.9,
                adam_eps=1e-6,
                weight_decay=0.2,
                clip_grad=0.3,
            ),
            scheduler=SchedulerSettings(lr_decay_style="cosine", lr_warmup_steps=2, lr_decay_steps=9),
            # Two ranks of context in zigzag, of two tensor ranks each: lengths are multiples of 8.
            train_batches=TokenBudget(tokens=200, packed=True, multiple=8),
            score_batches=TokenBudget(tokens=400, packed=True, multiple=8),
            precision="bf16",
            transformer_impl="local",
            overlap=OverlapSettings(
                overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=12345
            ),
            recompute=RecomputeSettings(granularity="full", method="block", num_layers=1),
            moe_aux_loss_coeff=0.0,
        ),
    }
    assert critic.pop("value_loss").cliprange == 0.5
    assert critic["model"] == Path("critic")
    assert critic["parallel"] == {
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "virtual_pipeline_model_parallel_size": None,
        "context_parallel_size": 1,
        "expert_model_parallel_size": 4,
        "sequence_parallel": False,
        "timeout_s": 77.0,
    }
    training = critic["training"]
    assert training.train_batches == TokenBudget(tokens=320, packed=False, multiple=16)
    assert training.score_batches == TokenBudget(tokens=640, packed=False, multiple=16)
    assert training.recompute == RecomputeSettings(granularity="selective", modules=("core_attn", "moe"))
    assert (training.moe_aux_loss_coeff, training.precision) == (0.25, "fp32")
    assert training.overlap == OverlapSettings(overlap_grad_reduce=True)
    assert (critic["pad_token_id"], critic["seed"]) == (3, 5)


def test_without_a_token_budget_microbatches_are_of_as_many_sequences_as_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = {f"policy.sequence_packing.{key}": None for key in ("train_mb_tokens", "logprob_mb_tokens")}
    config = config_of(tmp_path, **whole, **{"policy.sequence_packing.enabled": False})
    training = passed(config, monkeypatch)["MegatronPolicy"]["training"]
    assert (training.train_batches, training.score_batches) == (
        FixedSize(sequences=3),
        FixedSize(sequences=5),
    )


def test_the_keys_of_this_test_are_all_that_there_are(tmp_path: Path) -> None:
    """Otherwise a key that is added to a section and forgotten on its way would not be noticed here."""
    section = config_of(tmp_path).policy
    nested = {
        f"{name}.{key}"
        for name in ("parallelism", "optimizer", "scheduler", "recompute", "sequence_packing")
        for key in getattr(section, name).model_dump()
    }
    groups = {"model", "parallelism", "optimizer", "scheduler", "recompute"}
    flat = section.kwargs().keys() - groups - {"dynamic_batching", "sequence_packing"}
    elsewhere = {
        "parallelism.data_parallel_size": "what is left over",
        "parallelism.expert_model_parallel_size": "the critic's",
        "recompute.modules": "the critic's",
        "moe_aux_loss_coeff": "the critic's",
    }
    assert (nested | flat) - POLICY.keys() - elsewhere.keys() == set()


def test_a_critic_without_warm_start_loads_no_checkpoint_and_one_with_it_loads_the_critic_of_that_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded: list[tuple[Path, str]] = []
    monkeypatch.setattr(models, "load_weights", lambda path, name, model: loaded.append((path, name)))
    monkeypatch.setattr(models, "find_checkpoint", lambda path: path / "checkpoints" / "step_2")
    passed(config_of(tmp_path), monkeypatch)
    assert loaded == []
    monkeypatch.setattr("megatron_ppo.loop.checkpoint_folder.find_checkpoint", lambda path: path)
    run = tmp_path / "run"
    run.mkdir()
    passed(config_of(tmp_path, **{"critic.warm_start": str(run)}), monkeypatch)
    assert loaded == [(run / "checkpoints" / "step_2" / models.SUBFOLDER, "critic")]
