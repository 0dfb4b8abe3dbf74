"""TrainBatch: the padded tensors of one training step, and how groups become one.

Every [B, T] entry at position j concerns *token j*: its log-prob (from the logits at j - 1), the value of the
state before it, its advantage. Position 0 is never trained on.

Shape legend: B sequences, T token positions (right-padded).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_ppo.protocol.trajectory import PromptGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Sequences of one step. The same on every trainer rank; each rank computes its share and gathers.

    Attributes:
        token_ids_BT: int64; padding holds the pad token.
        length_B: int64; prompt + response tokens.
        response_mask_BT: bool; True on tokens that the policy sampled.
        sample_mask_B: bool; False excludes the sequence from every loss.
        generation_logprobs_BT: float32 nats, by the engine when sampled; 0 outside the response mask.
        reward_B: float32 reward units.   truncated_B: bool; the response hit the token limit.
        ordinal_B: int64; the prompt's position in the stream.
        old_logprobs_BT, ref_logprobs_BT, values_BT, advantages_BT, returns_BT: float32, filled in during the
            step; 0 outside the response mask.
    """

    token_ids_BT: Tensor
    length_B: Tensor
    response_mask_BT: Tensor
    sample_mask_B: Tensor
    generation_logprobs_BT: Tensor
    reward_B: Tensor
    truncated_B: Tensor
    ordinal_B: Tensor
    old_logprobs_BT: Tensor | None = None
    ref_logprobs_BT: Tensor | None = None
    values_BT: Tensor | None = None
    advantages_BT: Tensor | None = None
    returns_BT: Tensor | None = None

    def __len__(self) -> int:
        return int(self.token_ids_BT.shape[0])

    def replace(self, **fields: Tensor | None) -> TrainBatch:
        """A copy with some fields set."""
        return dataclasses.replace(self, **fields)

    def select(self, index_B: Tensor) -> TrainBatch:
        """The sequences at `index_B` (int64), trimmed to the longest of them."""
        width = int(self.length_B[index_B].max()) if len(index_B) else 0
        picked: dict[str, Tensor] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is not None:
                rows = value[index_B]
                picked[field.name] = rows[:, :width] if rows.dim() == 2 else rows
        return dataclasses.replace(self, **picked)

    def minibatches(self, size: int, *, shuffle: bool, seed: tuple[int, int, int]) -> list[TrainBatch]:
        """Consecutive minibatches of `size` sequences; shuffled by `seed` = (run seed, step, epoch) if asked.

        Raises: ValueError if `size` does not divide the batch.
        """
        if len(self) % size:
            raise ValueError(
                f"train_global_batch_size {size} does not divide the batch of {len(self)} sequences"
            )
        order = minibatch_order(len(self), shuffle=shuffle, seed=seed)
        return [self.select(part) for part in order.split(size)]


def minibatch_order(count: int, *, shuffle: bool, seed: tuple[int, int, int]) -> Tensor:
    """int64 [count]; the order in which sequences are visited in one epoch."""
    if not shuffle:
        return torch.arange(count)
    run_seed, step, epoch = seed
    # An own generator: the global one is shared with the model on CPU.
    generator = torch.Generator().manual_seed((run_seed * 1_000_003 + step) * 1_009 + epoch)
    return torch.randperm(count, generator=generator)


def pack_groups(groups: Sequence[PromptGroup], *, pad_token_id: int) -> TrainBatch:
    """Pad the trajectories of `groups`, in order, into one batch.

    Raises: ValueError for no groups.
    """
    trajectories = [(group.ordinal, t) for group in groups for t in group.trajectories]
    if not trajectories:
        raise ValueError("cannot pack an empty list of prompt groups")
    rows, width = len(trajectories), max(t.num_tokens for _, t in trajectories)
    token_ids = torch.full((rows, width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((rows, width), dtype=torch.bool)
    logprobs = torch.zeros((rows, width), dtype=torch.float32)
    for row, (_, trajectory) in enumerate(trajectories):
        prompt, completion = trajectory.prompt_token_ids, trajectory.completion
        start, end = len(prompt), trajectory.num_tokens
        token_ids[row, :start] = torch.tensor(prompt, dtype=torch.int64)
        token_ids[row, start:end] = torch.tensor(completion.token_ids, dtype=torch.int64)
        if trajectory.loss_mask is None:
            mask[row, start:end] = True
        else:
            mask[row, start:end] = torch.tensor(list(trajectory.loss_mask), dtype=torch.bool)
        logprobs[row, start:end] = torch.tensor(completion.logprobs, dtype=torch.float32)
    return TrainBatch(
        token_ids_BT=token_ids,
        length_B=torch.tensor([t.num_tokens for _, t in trajectories], dtype=torch.int64),
        response_mask_BT=mask,
        sample_mask_B=torch.ones(rows, dtype=torch.bool),
        generation_logprobs_BT=torch.where(mask, logprobs, 0.0),
        reward_B=torch.tensor([t.reward for _, t in trajectories], dtype=torch.float32),
        truncated_B=torch.tensor([t.completion.finish_reason == "length" for _, t in trajectories]),
        ordinal_B=torch.tensor([ordinal for ordinal, _ in trajectories], dtype=torch.int64),
    )


def scores_of_tokens(scores_N: Tensor, *, slot_BT: Tensor, length_B: Tensor) -> Tensor:
    """What a model said of each token: its output one position before.

    Args:
        scores_N: float32; outputs of a pass, in whatever order it has them.
        slot_BT: int64 [B, T - 1]; where the output at each position but the last stands in `scores_N`.
        length_B: tokens of each sequence.
    Returns: [B, T]; entry j is the output at position j - 1, 0 at j = 0 and beyond the sequence's end. Differentiable.
    """
    token = torch.arange(1, slot_BT.shape[1] + 1, device=scores_N.device)
    scores_BT = torch.where(token < length_B[:, None], scores_N[slot_BT], 0.0)
    return torch.nn.functional.pad(scores_BT, (1, 0))
