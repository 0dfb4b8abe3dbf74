"""Supervised warm start of a small Qwen2 model on imperfect demonstrations, in plain PyTorch.

Driven by `cache.prepare`. Invariant: the same recipe gives the same bytes on the same machine, whatever the
caller's random state and thread count; both are left as they were.

Shape legend: B demonstrations, T token positions (right-padded).
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM

from megatron_ppo.data import char_tokenizer as chars
from megatron_ppo.data.task import TaskExample, TaskSpec
from megatron_ppo.data.tasks import build_task
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.build import build_scorer
from megatron_ppo.warm_start.recipe import WarmStartRecipe
from megatron_ppo.warm_start.tokenizer_files import save_char_tokenizer

# Cosine floor as a share of the peak learning rate.
_LR_FLOOR = 0.1
_LOG_EVERY_STEPS = 100
# Generated for each of the two measurements: 1000 short answers, or some dozens of long ones.
_MEASURED_TOKENS = 6144

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class DemonstrationBatch:
    """token_ids_BT: int64. label_BT: int64, -100 on the prompt and on padding (not imitated)."""

    token_ids_BT: Tensor
    label_BT: Tensor


def build_sft_model(recipe: WarmStartRecipe, folder: Path) -> dict[str, float]:
    """Train the recipe's model and write it as a Hugging Face folder.

    Returns: what was measured: seconds, final loss, mean reward greedy (held-out prompts) and sampled at
        temperature 1 (training prompts).
    Raises: ConfigError for a task without demonstrator, or a vocabulary or context too small for it.
    """
    task = build_task(recipe.task)
    if task.demonstrate is None:
        raise ConfigError(
            f"recipe.task {recipe.task!r} has no demonstrator; it starts from a pretrained model"
        )
    longest = task.max_prompt_tokens + task.max_response_tokens
    if recipe.max_position_embeddings < longest:
        raise ConfigError(
            f"recipe.max_position_embeddings must be >= {longest} for task {recipe.task!r}, "
            f"got {recipe.max_position_embeddings}"
        )
    if recipe.vocab_size < len(chars.vocabulary()):
        raise ConfigError(f"recipe.vocab_size must be >= {len(chars.vocabulary())}, got {recipe.vocab_size}")
    started = time.monotonic()
    measured_prompts = max(1, _MEASURED_TOKENS // task.max_response_tokens)
    with _reproducible(recipe.sft_seed):
        model = Qwen2ForCausalLM(_hf_config(recipe))
        loss = train(model, task, recipe)
        greedy = mean_reward(model, task.validation[:measured_prompts], task, greedy=True)
        sampled = mean_reward(model, task.train[:measured_prompts], task, greedy=False)
    _save(model, folder)
    save_char_tokenizer(folder, context_length=recipe.max_position_embeddings)
    measured = {
        "seconds": round(time.monotonic() - started, 1),
        "final_loss_nats": loss,
        "greedy_validation_reward": greedy,
        "sampled_reward": sampled,
        "num_parameters": sum(p.numel() for p in model.parameters()),
    }
    logger.info("warm start %s: %s", recipe.label, measured)
    return measured


def train(model: Qwen2ForCausalLM, task: TaskSpec, recipe: WarmStartRecipe) -> float:
    """Run the recipe's optimizer steps.

    Returns: mean loss of the last tenth of them, in nats per response token; NaN for no steps.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.sft_lr, betas=(0.9, 0.95), weight_decay=recipe.sft_weight_decay
    )
    rng = random.Random(f"demonstrations/{recipe.sft_seed}")
    losses: list[float] = []
    model.train()
    for step in range(recipe.sft_steps):
        for group in optimizer.param_groups:
            group["lr"] = recipe.sft_lr * lr_factor(step, recipe)
        batch = demonstration_batch(task, rng, size=recipe.sft_batch_size)
        logits_BTV = model(batch.token_ids_BT, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV[:, :-1].flatten(0, 1), batch.label_BT[:, 1:].flatten(), ignore_index=-100
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.sft_clip_grad)
        optimizer.step()
        losses.append(loss.item())
        if (step + 1) % _LOG_EVERY_STEPS == 0:
            logger.info("warm start step %d of %d: loss %.3f nats", step + 1, recipe.sft_steps, losses[-1])
    model.eval()
    tail = losses[-max(1, len(losses) // 10) :]
    return sum(tail) / len(tail) if tail else math.nan


def lr_factor(step: int, recipe: WarmStartRecipe) -> float:
    """Linear warm-up, then a cosine from 1 to 0.1 at the last step. `step` counts from 0."""
    if step < recipe.sft_warmup_steps:
        return (step + 1) / recipe.sft_warmup_steps
    progress = (step - recipe.sft_warmup_steps) / max(1, recipe.sft_steps - recipe.sft_warmup_steps)
    return _LR_FLOOR + (1 - _LR_FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))


def demonstration_batch(task: TaskSpec, rng: random.Random, *, size: int) -> DemonstrationBatch:
    """`size` demonstrations of random training prompts.

    Raises: ConfigError for a task without demonstrator.
    """
    if task.demonstrate is None:
        raise ConfigError(f"task {task.name!r} has no demonstrator")
    rows: list[tuple[list[int], list[int]]] = []
    for _ in range(size):
        example = rng.choice(task.train)
        rows.append((list(example.token_ids), chars.encode_answer(task.demonstrate(rng, example))))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    token_ids = torch.full((size, width), task.pad_token_id, dtype=torch.int64)
    labels = torch.full((size, width), -100, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(rows):
        end = len(prompt) + len(answer)
        token_ids[row, :end] = torch.tensor(prompt + answer)
        labels[row, len(prompt) : end] = torch.tensor(answer)
    return DemonstrationBatch(token_ids_BT=token_ids, label_BT=labels)


@torch.no_grad()
def mean_reward(
    model: Qwen2ForCausalLM, examples: Sequence[TaskExample], task: TaskSpec, *, greedy: bool
) -> float:
    """Mean reward of the model's answers, by the task's own verifier; greedy or sampled at temperature 1."""
    scorer = build_scorer(task.reward.target, task.reward.kwargs)
    total = 0.0
    by_length: dict[int, list[Prompt]] = {}
    for index, example in enumerate(examples):
        by_length.setdefault(len(example.token_ids), []).append(example.prompt(index))
    # Prompts of one length need neither padding nor a mask.
    for group in by_length.values():
        prompt_BT = torch.tensor([list(prompt.token_ids) for prompt in group])
        for prompt, response in zip(group, _generate(model, prompt_BT, task, greedy=greedy), strict=True):
            total += scorer(prompt, response)
    return total / len(examples)


def _generate(model: Qwen2ForCausalLM, prompt_BT: Tensor, task: TaskSpec, *, greedy: bool) -> list[list[int]]:
    responses: list[list[int]] = [[] for _ in range(len(prompt_BT))]
    finished = [False] * len(prompt_BT)
    cache, input_BT = None, prompt_BT
    for _ in range(task.max_response_tokens + 1):
        output = model(input_BT, past_key_values=cache, use_cache=True)
        cache, logits_BV = output.past_key_values, output.logits[:, -1]
        if greedy:
            next_B = logits_BV.argmax(dim=-1)
        else:
            next_B = torch.multinomial(logits_BV.softmax(dim=-1), num_samples=1)[:, 0]
        for row, token in enumerate(next_B.tolist()):
            if not finished[row]:
                responses[row].append(token)
                finished[row] = token == task.eos_token_id
        if all(finished):
            break
        input_BT = next_B[:, None]
    return responses


def _save(model: Qwen2ForCausalLM, folder: Path) -> None:
    # Not save_pretrained: it draws a progress bar and stores its own version in the files.
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    ids = {"bos_token_id": chars.BOS_ID, "eos_token_id": chars.EOS_ID, "pad_token_id": chars.PAD_ID}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n", encoding="utf-8")


def _hf_config(recipe: WarmStartRecipe) -> Qwen2Config:
    return Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        vocab_size=recipe.vocab_size,
        hidden_size=recipe.hidden_size,
        intermediate_size=recipe.ffn_hidden_size,
        num_hidden_layers=recipe.num_layers,
        num_attention_heads=recipe.num_heads,
        num_key_value_heads=recipe.num_kv_heads,
        max_position_embeddings=recipe.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": recipe.rope_theta},
        tie_word_embeddings=recipe.tie_word_embeddings,
        use_sliding_window=False,
        bos_token_id=chars.BOS_ID,
        eos_token_id=chars.EOS_ID,
        pad_token_id=chars.PAD_ID,
        dtype="float32",
    )


@contextlib.contextmanager
def _reproducible(seed: int) -> Iterator[None]:
    """Own random state and one thread (the order of float sums depends on the thread count)."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
