"""Where the critic's output goes. A run does not show it when scoring and training read it equally late: the values
then know the token that they should be ignorant of, and explain more variance, not less.
"""

from __future__ import annotations

import torch

from megatron_ppo.data.batch import pack_groups, scores_of_tokens
from megatron_ppo.testing.fakes import make_group


def test_value_of_a_token_is_the_critics_output_one_position_before() -> None:
    batch = pack_groups([make_group(ordinal=0, target_step=0)], pad_token_id=0)
    rows, width = batch.token_ids_BT.shape
    # Both sequences fill the batch; their outputs are 1, 2, … by position.
    output_N = torch.arange(1.0, width + 1.0).repeat(rows)
    slot_BT = torch.arange(rows * width).view(rows, width)[:, :-1]
    # Entry 0 has no state before it.
    expected = [float(position) for position in range(width)]
    seen = scores_of_tokens(output_N, slot_BT=slot_BT, length_B=batch.length_B)
    assert seen.tolist() == [expected] * rows
