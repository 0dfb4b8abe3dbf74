"""TrainBatch: packing groups, selecting rows, minibatches.

Shape legend: B sequences, T token positions.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.batch import TrainBatch, minibatch_order, pack_groups
from megatron_ppo.numerics.gae import place_terminal_reward
from megatron_ppo.protocol.trajectory import (
    Completion,
    FinishReason,
    PromptGroup,
    Trajectory,
    VersionSpan,
    logprob_array,
    token_array,
)

PAD = 99


def trajectory(
    prompt: list[int],
    response: list[int],
    *,
    reward: float = 0.0,
    finish: FinishReason = "stop",
    loss_mask: bytes | None = None,
) -> Trajectory:
    """The log-prob of each response token is minus its id."""
    completion = Completion(
        token_ids=token_array(response),
        logprobs=logprob_array([-float(token) for token in response]),
        finish_reason=finish,
        spans=(VersionSpan(version=0, start=0, end=len(response)),),
    )
    return Trajectory(
        prompt_token_ids=token_array(prompt), completion=completion, reward=reward, loss_mask=loss_mask
    )


def group(ordinal: int, *trajectories: Trajectory) -> PromptGroup:
    return PromptGroup(
        ordinal=ordinal,
        target_step=0,
        opened_at_step=0,
        trajectories=trajectories,
        started_at=0.0,
        finished_at=1.0,
    )


def three_sequences() -> TrainBatch:
    return pack_groups(
        [
            group(
                7,
                trajectory([1, 2], [3, 4, 5], reward=1.0),
                trajectory([1, 2], [6], reward=-0.5, finish="length"),
            ),
            group(4, trajectory([8], [9, 10])),
        ],
        pad_token_id=PAD,
    )


def test_packing_pads_on_the_right_and_keeps_the_order_of_groups() -> None:
    batch = three_sequences()
    assert batch.token_ids_BT.tolist() == [[1, 2, 3, 4, 5], [1, 2, 6, PAD, PAD], [8, 9, 10, PAD, PAD]]
    assert batch.length_B.tolist() == [5, 3, 3]
    assert batch.ordinal_B.tolist() == [7, 7, 4]
    assert batch.reward_B.tolist() == [1.0, -0.5, 0.0]
    assert batch.truncated_B.tolist() == [False, True, False]
    assert batch.sample_mask_B.tolist() == [True, True, True]
    assert len(batch) == 3


def test_packing_marks_response_tokens_and_aligns_their_logprobs() -> None:
    batch = three_sequences()
    assert batch.response_mask_BT.tolist() == [
        [False, False, True, True, True],
        [False, False, True, False, False],
        [False, True, True, False, False],
    ]
    assert batch.generation_logprobs_BT.tolist() == [
        [0.0, 0.0, -3.0, -4.0, -5.0],
        [0.0, 0.0, -6.0, 0.0, 0.0],
        [0.0, -9.0, -10.0, 0.0, 0.0],
    ]
    assert batch.token_ids_BT.dtype == torch.int64
    assert batch.generation_logprobs_BT.dtype == batch.reward_B.dtype == torch.float32
    assert batch.response_mask_BT.dtype == batch.truncated_B.dtype == torch.bool


def test_tool_turns_are_outside_the_mask_and_the_reward_goes_to_the_last_sampled_token() -> None:
    batch = pack_groups(
        [group(0, trajectory([1], [2, 3, 4, 5], reward=2.0, loss_mask=b"\x01\x00\x01\x00"))], pad_token_id=PAD
    )
    assert batch.response_mask_BT.tolist() == [[False, True, False, True, False]]
    assert batch.generation_logprobs_BT.tolist() == [[0.0, -2.0, 0.0, -4.0, 0.0]]
    assert place_terminal_reward(batch.reward_B, batch.response_mask_BT).tolist() == [
        [0.0, 0.0, 0.0, 2.0, 0.0]
    ]


def test_packing_no_groups_is_refused() -> None:
    with pytest.raises(ValueError, match="empty list"):
        pack_groups([], pad_token_id=PAD)


def test_selection_is_trimmed_to_its_longest_sequence_in_every_field() -> None:
    batch = three_sequences()
    batch = batch.replace(values_BT=batch.token_ids_BT.float())
    picked = batch.select(torch.tensor([2, 1]))
    assert picked.token_ids_BT.tolist() == [[8, 9, 10], [1, 2, 6]]
    assert picked.values_BT is not None
    assert picked.values_BT.tolist() == [[8.0, 9.0, 10.0], [1.0, 2.0, 6.0]]
    assert picked.ordinal_B.tolist() == [4, 7]
    assert picked.reward_B.tolist() == [0.0, -0.5]
    assert picked.returns_BT is None
    for field in dataclasses.fields(picked):
        value = getattr(picked, field.name)
        if value is not None:
            assert value.shape == ((2, 3) if field.name.endswith("_BT") else (2,)), field.name


def test_selecting_nothing_gives_an_empty_batch() -> None:
    empty = three_sequences().select(torch.tensor([], dtype=torch.int64))
    assert len(empty) == 0
    assert empty.token_ids_BT.shape == (0, 0)


def test_unshuffled_minibatches_are_consecutive() -> None:
    batch = pack_groups([group(n, trajectory([n], [n])) for n in range(6)], pad_token_id=PAD)
    parts = batch.minibatches(2, shuffle=False, seed=(0, 0, 0))
    assert [part.ordinal_B.tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]


def test_size_that_does_not_divide_the_batch_is_refused() -> None:
    with pytest.raises(
        ValueError, match="train_global_batch_size 2 does not divide the batch of 3 sequences"
    ):
        three_sequences().minibatches(2, shuffle=False, seed=(0, 0, 0))


@settings(max_examples=40, deadline=None)
@given(
    size=st.integers(1, 4),
    parts=st.integers(1, 5),
    seed=st.tuples(st.integers(0, 100), st.integers(0, 100), st.integers(0, 5)),
)
def test_shuffled_minibatches_visit_every_sequence_once(
    size: int, parts: int, seed: tuple[int, int, int]
) -> None:
    count = size * parts
    batch = pack_groups([group(n, trajectory([n], [n])) for n in range(count)], pad_token_id=PAD)
    minibatches = batch.minibatches(size, shuffle=True, seed=seed)
    assert [len(part) for part in minibatches] == [size] * parts
    visited = [ordinal for part in minibatches for ordinal in part.ordinal_B.tolist()]
    assert sorted(visited) == list(range(count))
    assert visited == minibatch_order(count, shuffle=True, seed=seed).tolist()


def test_order_depends_on_run_seed_step_and_epoch_and_on_nothing_else() -> None:
    state = torch.get_rng_state()
    order = minibatch_order(64, shuffle=True, seed=(1, 2, 3)).tolist()
    assert minibatch_order(64, shuffle=True, seed=(1, 2, 3)).tolist() == order
    for other in ((2, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert minibatch_order(64, shuffle=True, seed=other).tolist() != order
    assert torch.equal(torch.get_rng_state(), state)  # the global generator belongs to the models
