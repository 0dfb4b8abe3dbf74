"""Where the critic's output goes. A run does not show it when scoring and training read it equally late: the values
then know the token that they should be ignorant of, and explain more variance, not less.
"""

from __future__ import annotations

import torch

from megatron_ppo.data.batch import pack_groups
from megatron_ppo.mcore.critic import _values_before_tokens
from megatron_ppo.testing.fakes import make_group


def test_value_of_a_token_is_the_critics_output_one_position_before() -> None:
    batch = pack_groups([make_group(ordinal=0, target_step=0)], pad_token_id=0)
    rows, width = batch.token_ids_BT.shape
    output_BT1 = torch.arange(1.0, width + 1.0).expand(rows, width)[..., None]
    # Entry 0 has no state before it.
    expected = [float(position) for position in range(width)]
    assert _values_before_tokens(output_BT1, batch).tolist() == [expected] * rows
