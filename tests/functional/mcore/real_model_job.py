"""The job of test_real_layouts: a fixed batch of chain_sum prompts with their right answers as responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_ppo.data.batch import TrainBatch, pack_groups
from megatron_ppo.data.chain_sum import chain_sum_task, load_tokenizer
from megatron_ppo.protocol.trajectory import Completion, Trajectory, VersionSpan, logprob_array, token_array
from megatron_ppo.testing.fakes import make_group
from tests.functional.mcore.jobs import Layout, build, context, scored

PROMPTS = 8


def fixed_batch(folder: str) -> TrainBatch:
    """Right and wrong answers in turn, with advantages of both signs and returns of 1 and 0."""
    tokenizer = load_tokenizer(folder)
    task = chain_sum_task(tokenizer_dir=folder, num_train=PROMPTS, num_validation=1)
    groups = []
    for ordinal, example in enumerate(task.train):
        ids = tokenizer.encode(f" {int(example.answer) + ordinal % 2}\n").ids
        completion = Completion(
            token_ids=token_array(ids),
            logprobs=logprob_array([-1.0] * len(ids)),
            finish_reason="stop",
            spans=(VersionSpan(version=0, start=0, end=len(ids)),),
        )
        trajectory = Trajectory(
            prompt_token_ids=example.token_ids, completion=completion, reward=float(ordinal % 2 == 0)
        )
        groups.append(replace(make_group(ordinal=ordinal, target_step=0), trajectories=(trajectory,)))
    batch = pack_groups(groups, pad_token_id=task.pad_token_id)
    sign = torch.where(batch.reward_B > 0, 1.0, -0.5)[:, None]
    mask = batch.response_mask_BT
    return batch.replace(
        old_logprobs_BT=batch.generation_logprobs_BT,
        values_BT=torch.where(mask, 0.1, 0.0),
        advantages_BT=torch.where(mask, sign, 0.0),
        returns_BT=torch.where(mask, batch.reward_B[:, None], 0.0),
    )


def train_on_fixed_batch(*, kind: str, folder: str, layout: Layout) -> dict[str, Any]:
    """Loss, gradient norm and learning rate of two updates, and a score of the result, as plain numbers."""
    batch = fixed_batch(folder)
    with context(layout) as parallel:
        model = build(kind, folder, parallel, train_micro_batch_size=2, logprob_batch_size=4)
        steps = []
        for _ in range(2):
            metrics = model.update([batch])
            steps.append(
                {name: value for name, value in metrics.items() if name.endswith(("loss", "grad_norm"))}
            )
        after = scored(model, batch)
        return {"steps": steps, "score": float(after[batch.response_mask_BT].mean())}


def exact_first_step(*, folder: str) -> dict[str, float]:
    """The policy's first loss and gradient norm in float64, by transformers and the loss written out."""
    import transformers

    batch = fixed_batch(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    logits = model(batch.token_ids_BT).logits[:, :-1]
    logprobs = logits.log_softmax(-1).gather(-1, batch.token_ids_BT[:, 1:, None])[..., 0]
    assert batch.old_logprobs_BT is not None and batch.advantages_BT is not None
    # Old and generation log-probs are the same, so importance weights are 1.
    ratio = (logprobs - batch.old_logprobs_BT[:, 1:].double()).exp()
    advantages = batch.advantages_BT[:, 1:].double()
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.2))
    loss = losses[batch.response_mask_BT[:, 1:]].mean()
    loss.backward()
    squares = sum(float((parameter.grad**2).sum()) for parameter in model.parameters())
    return {"train/loss": float(loss.detach()), "train/grad_norm": squares**0.5}
