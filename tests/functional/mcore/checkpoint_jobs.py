"""What the Megatron workers run for tests of checkpoints and of where a critic starts. See `jobs`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_ppo.mcore.critic import MegatronCritic
from megatron_ppo.mcore.policy import MegatronPolicy
from megatron_ppo.protocol.errors import ConfigError
from tests.functional.mcore.jobs import SHAPE, Layout, context, random_batch, settings


def make_reward_model(*, folder: str, kind: str) -> None:
    """A random Qwen2 with one label: `TokenClassification` has a bias in its head, `SequenceClassification` none."""
    import transformers

    config = transformers.Qwen2Config(**SHAPE, num_labels=1, pad_token_id=0)
    torch.manual_seed(0)
    model = getattr(transformers, f"Qwen2For{kind}")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter)) if parameter.dim() == 1 else parameter.mul_(4.0)
    model.save_pretrained(folder)


def value_difference(*, folder: str, layout: Layout) -> dict[str, float]:
    """Largest |difference| of the critic's values to transformers' scores of the tokens before; and their size."""
    import transformers
    from transformers.modeling_outputs import ModelOutput

    with context(layout) as parallel:
        batch = random_batch()
        mine = MegatronCritic(parallel=parallel, **settings(folder)).values(batch)
        config = transformers.AutoConfig.from_pretrained(folder)
        model = getattr(transformers, config.architectures[0]).from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            hidden: ModelOutput = model.model(input_ids=batch.token_ids_BT)
            scores_BT: Tensor = model.score(hidden.last_hidden_state)[..., 0]
        theirs = torch.where(batch.response_mask_BT, scores_BT.roll(1, dims=1), 0.0)
        return {"difference": float((mine - theirs).abs().max()), "size": float(theirs.abs().max())}


def policy_error(*, folder: str) -> str:
    """The message that a policy refuses the folder with."""
    with context({}) as parallel:
        try:
            MegatronPolicy(parallel=parallel, **settings(folder))
        except ConfigError as error:
            return str(error)
    return "no error"


def head_error(*, folder: str, changes: dict[str, Any]) -> str:
    """The message that a critic refuses the folder with, after tensors of its file were replaced or dropped (None)."""
    from pathlib import Path

    from safetensors.torch import load_file, save_file

    path = Path(folder) / "model.safetensors"
    kept = {name: tensor for name, tensor in {**load_file(path), **changes}.items() if tensor is not None}
    save_file(kept, path)
    with context({}) as parallel:
        try:
            MegatronCritic(parallel=parallel, **settings(folder))
        except ConfigError as error:
            return str(error)
    return "no error"
