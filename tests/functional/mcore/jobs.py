"""What the Megatron workers run. Each function is one job of `worker_group`; it returns plain, picklable
data.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.data.microbatch_plan import BatchPolicy, FixedSize
from megatron_ppo.mcore.checkpoint import load_models, save_models
from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.parallel import ParallelContext, distributed_runtime
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.mcore.settings import (
    OptimizerSettings,
    OverlapSettings,
    SchedulerSettings,
    TrainingSettings,
)
from megatron_ppo.mcore.weight_export import hf_weight_metadata
from megatron_ppo.numerics.loss_settings import PolicyLossSettings
from megatron_ppo.protocol.errors import CheckpointError, ConfigError, NonFiniteError
from tests.functional.mcore.every_rank import weights_on_every_rank

Layout = dict[str, int | bool]

VOCAB = 64
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 192,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    # Short, so that with 64 positions every branch of the scaling is used.
    "original_max_position_embeddings": 32,
}
QWEN3_MOE = {
    "tie_word_embeddings": False,
    "head_dim": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
}
MODEL_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2_deep": ("Qwen2", {"tie_word_embeddings": False, "num_hidden_layers": 4}),
    "qwen2_tied": ("Qwen2", {"tie_word_embeddings": True}),
    # 61 is odd: the vocabulary is padded for two ranks.
    "qwen2_odd_vocab": ("Qwen2", {"tie_word_embeddings": False, "vocab_size": 61}),
    "qwen2_tied_deeper": ("Qwen2", {"tie_word_embeddings": True, "num_hidden_layers": 8}),
    "qwen3_deep": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 64, "num_hidden_layers": 4}),
    "qwen3": ("Qwen3", {"tie_word_embeddings": True, "head_dim": 64}),
    # Key/value heads that two ranks cannot share: zeros fill them up. With one of them, rank 1 has nothing else.
    "qwen2_three_kv": (
        "Qwen2",
        {"tie_word_embeddings": True, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96},
    ),
    "qwen3_one_kv": (
        "Qwen3",
        {"tie_word_embeddings": False, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32},
    ),
    "llama": ("Llama", {"tie_word_embeddings": False, "num_attention_heads": 4}),
    "qwen3_moe": ("Qwen3Moe", QWEN3_MOE),
    # The other order of softmax and choice, and layers of both kinds.
    "qwen3_moe_mixed": (
        "Qwen3Moe",
        {
            **QWEN3_MOE,
            "num_hidden_layers": 4,
            "norm_topk_prob": False,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_moe_deep": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0, 3], "num_hidden_layers": 4}),
    "llama3_rope": ("Llama", {"tie_word_embeddings": False, "rope_parameters": LLAMA3_ROPE}),
}


def make_model(*, folder: str, kind: str, max_shard_size: str = "5GB") -> None:
    """A random model whose weights are large enough to make logits differ, norms and biases included."""
    import transformers

    family, changes = MODEL_KINDS[kind]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **changes})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)
    model.save_pretrained(folder, max_shard_size=max_shard_size)


def with_stored_head(*, folder: str, copy: str, same: bool) -> None:
    """A copy of a tied model's folder that stores lm_head too, with the embedding's numbers or others."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(folder, copy, dirs_exist_ok=True)
    path = Path(copy) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone() + (0.0 if same else 1.0)
    save_file(tensors, path, metadata={"format": "pt"})


def random_batch(*, rows: int = 8, width: int = 14, seed: int = 1, vocab: int = 61) -> TrainBatch:
    """Prompts of 4 tokens, responses of 3 to `width` - 4; old log-probs, those of the reference and the rest are
    plausible numbers. Every third reward is 0, so that not all sequences are positive examples.
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(scale: float) -> Tensor:
        return scale * torch.randn((rows, width), generator=generator)

    position = torch.arange(width)[None]
    length = torch.randint(7, width + 1, (rows,), generator=generator)
    mask = (position >= 4) & (position < length[:, None])
    token_ids = torch.randint(3, vocab, (rows, width), generator=generator)
    old = torch.where(mask, noise(0.3) - 3.0, 0.0)
    return TrainBatch(
        token_ids_BT=torch.where(position < length[:, None], token_ids, 0),
        length_B=length,
        response_mask_BT=mask,
        # One sequence is excluded from every loss.
        sample_mask_B=torch.arange(rows) != 2,
        generation_logprobs_BT=torch.where(mask, old + noise(0.1), 0.0),
        reward_B=torch.rand(rows, generator=generator) * (torch.arange(rows) % 3 > 0),
        truncated_B=torch.zeros(rows, dtype=torch.bool),
        ordinal_B=torch.arange(rows) + 100,
        old_logprobs_BT=old,
        values_BT=torch.where(mask, noise(0.2), 0.0),
        advantages_BT=torch.where(mask, noise(1.0), 0.0),
        returns_BT=torch.where(mask, noise(0.5), 0.0),
        ref_logprobs_BT=torch.where(mask, old + noise(0.2), 0.0),
    )


@contextmanager
def context(layout: Layout) -> Iterator[ParallelContext]:
    """A job's process group and one model's groups."""
    with distributed_runtime(timeout_s=60.0):
        yield ParallelContext.create(**layout, timeout_s=60.0)  # type: ignore[arg-type]


def settings(folder: str, **changes: Any) -> dict[str, Any]:
    """Keyword arguments common to policy and critic; `changes` also of the parts of `training`, by their own names.

    Adam's epsilon is large: where the true gradient is 0 (key biases), rounding noise would otherwise be scaled up to
    steps of the size of the learning rate, and layouts could not be compared.
    """
    return {
        "model": folder,
        "training": _training(**{name: changes.pop(name) for name in changes.keys() & _OF_TRAINING}),
        "pad_token_id": 0,
        **changes,
    }


_OF_TRAINING = {
    "train_micro_batch_size", "logprob_batch_size",
    *(field.name for field in dataclasses.fields(TrainingSettings)),
    *(field.name for field in dataclasses.fields(OverlapSettings)),
}  # fmt: skip


def _training(
    *, train_micro_batch_size: int = 4, logprob_batch_size: int = 3, **changes: Any
) -> TrainingSettings:
    overlap = {field.name for field in dataclasses.fields(OverlapSettings)} & changes.keys()
    return TrainingSettings(
        **{
            "optimizer": OptimizerSettings(lr=1e-4, adam_eps=1e-6, weight_decay=0.1, clip_grad=0.5),
            "scheduler": SchedulerSettings(lr_decay_steps=10, lr_decay_style="cosine"),
            "train_batches": FixedSize(sequences=train_micro_batch_size),
            "score_batches": FixedSize(sequences=logprob_batch_size),
            "overlap": OverlapSettings(**{name: changes.pop(name) for name in overlap}),
            **changes,
        }
    )


def build(
    kind: str, folder: str, parallel: ParallelContext, **changes: Any
) -> MegatronPolicy | MegatronCritic:
    """The policy or the critic; `changes` are further constructor arguments, such as `loss` or `value_loss`."""
    if kind == "critic":
        return MegatronCritic(parallel=parallel, **settings(folder, **changes))
    return MegatronPolicy(parallel=parallel, **settings(folder, **changes))


def full_parameters(model: MegatronPolicy | MegatronCritic) -> dict[str, Tensor]:
    """All weights in the Hugging Face layout, on every rank; a critic's head is `score`."""
    model.trained.flush()
    return _in_hugging_face_layout(model)


def _in_hugging_face_layout(model: MegatronPolicy | MegatronCritic) -> dict[str, Tensor]:
    trained = model.trained
    metadata = hf_weight_metadata(trained.model, trained.dtype, value_head=trained.value_head)
    return {
        meta.name: tensor.clone()
        for meta, tensor in zip(
            metadata, weights_on_every_rank(trained.chunks, trained.weight_map), strict=True
        )
    }


def scored(model: MegatronPolicy | MegatronCritic, batch: TrainBatch) -> Tensor:
    """Log-probs or values."""
    return model.logprobs(batch) if isinstance(model, MegatronPolicy) else model.values(batch)


def full_gradients(model: MegatronPolicy | MegatronCritic) -> dict[str, Tensor]:
    """Gradients as `full_parameters` gives the weights; only between the reduction and the optimizer step."""
    for module in model.trained.modules:
        for group in (*module.bucket_groups, *module.expert_parallel_bucket_groups):
            for bucket in group.buckets:
                # The distributed optimizer reduces each rank's shard only.
                size = group.intra_distributed_optimizer_instance_size
                shard = bucket.grad_data.chunk(size)[group.intra_distributed_optimizer_instance_rank].clone()
                shards = list(torch.empty_like(bucket.grad_data).chunk(size))
                dist.all_gather(shards, shard, group=group.intra_distributed_optimizer_instance_group)
                bucket.grad_data.copy_(torch.cat(shards))
    parameters = [parameter for chunk in model.trained.chunks for parameter in chunk.parameters()]
    weights = [parameter.data for parameter in parameters]
    for parameter in parameters:
        # Of the same type: another one would make autograd forget the hook that adds to main_grad.
        parameter.data = parameter.main_grad.to(parameter.dtype)  # type: ignore[attr-defined]
    try:
        return _in_hugging_face_layout(model)
    finally:
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.data = weight


def train(*, kind: str, folder: str, layout: Layout, steps: int = 3, **changes: Any) -> dict[str, Any]:
    """`steps` updates of one minibatch each; metrics of each, a gradient, all weights and scores.

    The gradient is a policy's first and a critic's second one: the critic's head starts at zero, and through it nothing
    reaches the backbone.
    """
    with context(layout) as parallel:
        model = build(kind, folder, parallel, **changes)
        before = scored(model, random_batch())
        gradients: list[dict[str, Tensor]] = []
        apply = model.trained._apply

        def keep_gradients(minibatch: TrainBatch) -> float:
            gradients.append(full_gradients(model))
            return apply(minibatch)

        kept = 1 if kind == "critic" and steps > 1 else 0
        metrics = []
        for step in range(steps):
            model.trained._apply = keep_gradients if step == kept else apply  # type: ignore[method-assign]
            metrics.append(model.update([random_batch(seed=step)]))
        return {
            "metrics": metrics,
            "gradients": gradients[0],
            "scores_before": before,
            "parameters": full_parameters(model),
            "scores": scored(model, random_batch()),
            "scoring": model.scoring_metrics(),
            "hash": model.parameters_hash(),
        }


def padding_after_training(*, kind: str, folder: str, layout: Layout) -> dict[str, float]:
    """Entries of this rank's padded key/value heads, and the largest of them after three steps with weight decay."""
    with context(layout) as parallel:
        model = build(kind, folder, parallel)
        for step in range(3):
            model.update([random_batch(seed=step)])
        shape = model.trained.model
        mine = shape.padded_kv_heads(parallel.tp_size) // parallel.tp_size
        real = min(max(shape.num_kv_heads - parallel.tp_rank * mine, 0), mine)
        padding = []
        for chunk in model.trained.chunks:
            for name, parameter in chunk.named_parameters():
                if "linear_qkv." in name:
                    padding.append(parameter.detach().unflatten(0, (mine, -1))[real:])
                elif name.endswith("linear_proj.weight"):
                    padding.append(parameter.detach().unflatten(1, (mine, -1))[:, real:])
        assert padding
        return {
            "entries": sum(part.numel() for part in padding),
            "largest": max((float(part.abs().max()) for part in padding if part.numel()), default=0.0),
        }


def rank_parameter_count(*, kind: str, folder: str, layout: Layout) -> int:
    """Parameters on this rank."""
    with context(layout) as parallel:
        model = build(kind, folder, parallel)
        return sum(p.numel() for chunk in model.trained.chunks for p in chunk.parameters())


def positions_fed(
    *, folder: str, layout: Layout, policies: dict[str, BatchPolicy]
) -> dict[str, tuple[list[int], list[int]]]:
    """Per way of batching: positions of this rank's microbatches as planned, and as all context ranks were fed."""
    with context(layout) as parallel:
        # Only now: the context has prepared this process for Megatron.
        from megatron_ppo.mcore.sequences import microbatches

        result = {}
        for name, policy in policies.items():
            trained = build("policy", folder, parallel, train_batches=policy).trained
            batch = random_batch()
            plan = trained._plan(batch, trained._train_batches, may_repeat=False)
            fed = microbatches(
                batch,
                plan.shares[parallel.dp_rank],
                parallel,
                policy=trained._train_batches,
                pad_token_id=0,
            )
            result[name] = (
                list(plan.positions[parallel.dp_rank]),
                [x.input_ids_SL.numel() * parallel.cp_size for x in fed],
            )
        return result


def train_both(
    *,
    folder: str,
    policy_layout: Layout,
    critic_layout: Layout,
    critic_changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Policy and critic on the same ranks, each with its own layout, taking turns."""
    with distributed_runtime(timeout_s=60.0):
        groups = [ParallelContext.create(**x, timeout_s=60.0) for x in (policy_layout, critic_layout)]  # type: ignore[arg-type]
        policy, critic = (
            build("policy", folder, groups[0]),
            build("critic", folder, groups[1], **critic_changes or {}),
        )
        metrics = []
        for step in range(3):
            batch = random_batch(seed=step)
            batch = batch.replace(values_BT=critic.values(batch), old_logprobs_BT=policy.logprobs(batch))  # type: ignore[union-attr]
            metrics += [critic.update([batch]), policy.update([batch])]
        return {
            "metrics": metrics,
            "policy": full_parameters(policy),
            "critic": full_parameters(critic),
            "values": scored(critic, random_batch()),
        }


def logit_difference(*, folder: str, layout: Layout) -> float:
    """Largest |difference| of any logit to transformers; for layouts of one pipeline stage."""
    import transformers

    with context(layout) as parallel:
        # Only now: the context has prepared this process for Megatron.
        from megatron.core.tensor_parallel import gather_from_tensor_model_parallel_region

        policy = MegatronPolicy(parallel=parallel, **settings(folder))
        token_ids = random_batch(rows=3, width=64).token_ids_BT
        position_ids = torch.arange(64).expand_as(token_ids)
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            (model,) = policy.trained.chunks
            part = model(input_ids=token_ids, position_ids=position_ids, attention_mask=None)
            mine = gather_from_tensor_model_parallel_region(part, group=parallel.tensor)
            theirs = reference(token_ids).logits
        return float((mine[..., : theirs.shape[-1]] - theirs).abs().max())


def logprob_and_entropy_difference(*, folder: str, layout: Layout, temperature: float) -> dict[str, float]:
    """Largest |difference| of log-probs to transformers, and of the reported entropy."""
    import transformers

    with context(layout) as parallel:
        policy = MegatronPolicy(parallel=parallel, **settings(folder, temperature=temperature))
        batch = random_batch()
        mine = policy.logprobs(batch)
        at_one = policy.logprobs(batch, temperature=1.0)
        entropy = policy.update([batch])["train/entropy"]
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            logits = reference(batch.token_ids_BT).logits[:, :-1].double()
    target = batch.token_ids_BT[:, 1:, None]
    mask = batch.response_mask_BT[:, 1:]
    kept = (batch.response_mask_BT & batch.sample_mask_B[:, None])[:, 1:]

    def difference(scores: Tensor, used: float) -> float:
        expected = (logits / used).log_softmax(-1).gather(-1, target)[..., 0]
        return float((scores[:, 1:] - torch.where(mask, expected, 0.0)).abs().max())

    logp = (logits / temperature).log_softmax(-1)
    expected_entropy = float(-(logp.exp() * logp).sum(-1)[kept].mean())
    return {
        "logprobs": difference(mine, temperature),
        "at_one": difference(at_one, 1.0),
        "entropy": abs(entropy - expected_entropy),
        "first_column": float(mine[:, 0].abs().max()),
    }


def export_mismatches(*, folder: str, layout: Layout) -> list[str]:
    """Names that differ in any bit, name, shape or dtype from the files that the weights came from: as every rank
    has them, and as streamed to rank 0.
    """
    from safetensors.torch import load_file

    files: dict[str, Tensor] = {}
    for path in Path(folder).glob("*.safetensors"):
        files |= load_file(path)
    with context(layout) as parallel:
        policy = MegatronPolicy(parallel=parallel, **settings(folder))
        wrong, metadata, streamed = [], policy.weight_metadata(), []
        gathered = weights_on_every_rank(policy.trained.chunks, policy.trained.weight_map)
        for meta, tensor in zip(metadata, gathered, strict=True):
            expected = files[meta.name]
            same = torch.equal(tensor, expected) and meta.shape == tuple(expected.shape)
            if not same or meta.dtype != "float32":
                wrong.append(meta.name)
        for index, tensor in enumerate(policy.full_weights()):
            streamed.append(metadata[index].name)
            if not torch.equal(tensor, files[streamed[-1]]):
                wrong.append(f"{streamed[-1]} as streamed")
        if streamed != ([meta.name for meta in metadata] if dist.get_rank() == 0 else []):
            wrong.append(f"streamed {streamed}")
        return wrong + sorted(set(files) - {meta.name for meta in metadata})


def save(*, folder: str, checkpoint: str, policy_layout: Layout, critic_layout: Layout) -> dict[str, Any]:
    """Two critic updates, none of the policy (warm-up); save; then the metrics and weights of going on."""
    with distributed_runtime(timeout_s=60.0):
        policy, critic = _pair(folder, policy_layout, critic_layout)
        for step in range(2):
            critic.update([random_batch(seed=step)])
        before = policy.parameters_hash()
        save_models(Path(checkpoint), {"policy": policy, "critic": critic})
        saved_unchanged = policy.parameters_hash() == before
        return {**_go_on(policy, critic), "saved_unchanged": saved_unchanged}


def resume(*, folder: str, checkpoint: str, policy_layout: Layout, critic_layout: Layout) -> dict[str, Any]:
    """Load into fresh models, after disturbing them, and go on."""
    with distributed_runtime(timeout_s=60.0):
        policy, critic = _pair(folder, policy_layout, critic_layout)
        policy.update([random_batch(seed=99)])
        load_models(Path(checkpoint), {"policy": policy, "critic": critic})
        return _go_on(policy, critic)


def _pair(folder: str, policy_layout: Layout, critic_layout: Layout) -> tuple[MegatronPolicy, MegatronCritic]:
    groups = [ParallelContext.create(**x, timeout_s=60.0) for x in (policy_layout, critic_layout)]  # type: ignore[arg-type]
    policy = MegatronPolicy(parallel=groups[0], **settings(folder))
    return policy, MegatronCritic(parallel=groups[1], **settings(folder))


def _go_on(policy: MegatronPolicy, critic: MegatronCritic) -> dict[str, Any]:
    metrics = []
    for step in (2, 3):
        metrics += [critic.update([random_batch(seed=step)]), policy.update([random_batch(seed=step)])]
    return {
        "metrics": metrics,
        "policy": full_parameters(policy),
        "critic": full_parameters(critic),
        "adam_steps": [adam_steps(model) for model in (policy, critic)],
    }


def adam_steps(model: MegatronPolicy | MegatronCritic) -> set[float]:
    """Adam's step counters of this rank's parameters."""
    return {
        float(state["step"])
        for chained in model.trained.optimizer.chained_optimizers
        for state in chained.optimizer.state.values()
    }


def load_error(*, folder: str, checkpoint: str) -> str:
    """The message of CheckpointError when models of another shape load a checkpoint."""
    with context({}) as parallel:
        policy = MegatronPolicy(parallel=parallel, **settings(folder))
        try:
            load_models(Path(checkpoint), {"policy": policy})
        except CheckpointError as error:
            return str(error)
    return "no error"


def spoilt_update(*, kind: str, folder: str, layout: Layout, spoil: str, **changes: Any) -> dict[str, Any]:
    """An update whose second minibatch is bad: what was raised, and whether the bad one left the weights
    alone.
    """
    with context(layout) as parallel:
        model = build(kind, folder, parallel, **changes)
        good, bad = random_batch(seed=0), random_batch(seed=1)
        clean = build(kind, folder, parallel, **changes)
        clean.update([good])
        if spoil == "gradient":
            # Every loss is finite, and the squared norm of the gradient overflows.
            bad = bad.replace(advantages_BT=bad.advantages_BT * 1e30)  # type: ignore[operator]
        else:
            field = "returns_BT" if kind == "critic" else "advantages_BT"
            tensor = getattr(bad, field).clone()
            tensor[5, 5] = math.nan if spoil == "nan" else math.inf
            bad = bad.replace(**{field: tensor})
        error, ordinals = "none", ()
        try:
            model.update([good, bad])
        except NonFiniteError as raised:
            error, ordinals = str(raised), raised.ordinals
        recovered = model.update([random_batch(seed=2)])
        clean.trained.scheduler.step(-1)
        expected = clean.update([random_batch(seed=2)])
        return {
            "error": error,
            "ordinals": ordinals,
            "same_as_clean": model.parameters_hash() == clean.parameters_hash(),
            "metrics": (recovered, expected),
        }


def reference_is_frozen(*, folder: str, layout: Layout, **changes: Any) -> dict[str, Any]:
    """Reference log-probs before and after updates, next to the policy's."""
    with context(layout) as parallel:
        loss = PolicyLossSettings(reference_policy_kl_penalty=0.1)
        policy = MegatronPolicy(parallel=parallel, **settings(folder, reference=True, loss=loss, **changes))
        batch = random_batch()
        initial = policy.logprobs(batch)
        batch = batch.replace(ref_logprobs_BT=policy.reference_logprobs(batch))
        metrics = policy.update([batch])
        return {
            "initial": initial,
            "reference_before": batch.ref_logprobs_BT,
            "reference_after": policy.reference_logprobs(batch),
            "policy_after": policy.logprobs(batch),
            "metrics": metrics,
        }


def hashes(*, folder: str, layout: Layout) -> dict[str, str]:
    """Hash at the start, after scoring, after a critic update, after a policy update with a tiny learning
    rate.
    """
    with context(layout) as parallel:
        tiny = OptimizerSettings(lr=1e-7)
        policy = MegatronPolicy(parallel=parallel, **settings(folder, optimizer=tiny))
        critic = MegatronCritic(parallel=parallel, **settings(folder))
        batch, found = random_batch(), {"start": policy.parameters_hash()}
        policy.logprobs(batch)
        found["scored"] = policy.parameters_hash()
        critic.update([batch])
        found["critic_updated"] = policy.parameters_hash()
        policy.update([batch])
        found["updated"] = policy.parameters_hash()
        return found


def score_rows(*, kind: str, folder: str, layout: Layout, rows: int) -> Tensor:
    """Scores of the first `rows` sequences; any number of them."""
    with context(layout) as parallel:
        model = build(kind, folder, parallel)
        return scored(model, random_batch().select(torch.arange(rows)))


def layout_error(*, folder: str, layout: Layout) -> str:
    """The message of ConfigError for a layout that does not fit."""
    try:
        with context(layout) as parallel:
            MegatronPolicy(parallel=parallel, **settings(folder))
    except ConfigError as error:
        return str(error)
    return "no error"


def shim_leaves_torch_alone() -> dict[str, bool]:
    """Things that patched torch factories could break for other libraries in the same process."""
    with distributed_runtime():
        with torch.device("meta"):
            meta = torch.empty(2).is_meta and torch.zeros(2).is_meta
        group_size = dist.get_world_size()
    return {
        "device context": meta,
        "cpu type": torch.ones(1, dtype=torch.int64).type() == "torch.LongTensor",
        "cast": torch.ones(1).type(torch.float64).dtype == torch.float64,
        "no cuda": not torch.cuda.is_available(),
        "job ended": group_size >= 1 and not dist.is_initialized(),
    }


def threads_left_by_jobs(*, folder: str, jobs: int, **changes: Any) -> list[int]:
    """Threads of this process after each of several jobs that trained both models."""

    def job() -> None:
        with distributed_runtime(timeout_s=60.0):
            batch = random_batch()
            parallel = ParallelContext.create(timeout_s=60.0)
            for kind in ("policy", "critic"):
                build(kind, folder, parallel, **changes).update([batch])

    counts = []
    for _ in range(jobs):
        job()
        gc.collect()
        counts.append(len(os.listdir("/proc/self/task")))
    return counts


def rank_and_size() -> tuple[int, int, int]:
    """This rank, the job's size, and the sum of all ranks by a collective."""
    with distributed_runtime(timeout_s=60.0) as runtime:
        total = torch.tensor(runtime.rank)
        dist.all_reduce(total)
        return runtime.rank, runtime.world_size, int(total)


def balancing_gradients(*, folder: str, coefficient: float) -> dict[str, dict[str, Tensor]]:
    """What the load-balancing loss adds to the gradients, and the same by transformers' formula and autograd.

    One microbatch of the whole minibatch, so that both see the same tokens.
    """
    import transformers
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    with_loss, without = (
        train(
            kind="policy", folder=folder, layout={}, steps=1, train_micro_batch_size=8, moe_aux_loss_coeff=x
        )["gradients"]
        for x in (coefficient, 0.0)
    )
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logits = model(random_batch(seed=0).token_ids_BT, output_router_logits=True).router_logits
    experts, chosen = model.config.num_local_experts, model.config.num_experts_per_tok
    # Theirs counts a token once per expert that it is sent to and averages over layers' tokens; Megatron's divides by
    # that number and sums over layers.
    loss = sum(load_balancing_loss_func((layer,), experts, chosen) for layer in logits) / chosen
    (coefficient * loss).backward()
    names = [name for name in with_loss if name.endswith("mlp.gate.weight")]
    parameters = dict(model.named_parameters())
    return {
        "added": {name: with_loss[name] - without[name] for name in with_loss},
        "expected": {name: parameters[name].grad for name in names},
    }
