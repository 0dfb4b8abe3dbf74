"""Core attention on torch's `scaled_dot_product_attention`: padded or packed, whole or cut over context ranks.

Megatron's local core attention refuses sequence and context parallelism and packed sequences, and is 2-4x
slower. Where Transformer Engine is present its attention does the same from the same arguments; the layout of
sequences is Megatron's (see `data.sequence_map`).

Invariant: a position attends to the positions of its own sequence up to itself, and to nothing else.

Imports `megatron.core`, so `platform.install()` must have run.

Shape legend: S positions on this rank, B rows (1 when packed), N heads, D head dimension; K positions of all
context ranks.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_ppo.data.sequence_map import zigzag_slots


class SDPACoreAttention(MegatronModule):
    """Causal attention by torch's fused kernel; grouped key/value heads are not expanded.

    Context ranks exchange keys and values whole (an all-gather, reduce-scatter in the backward pass), and each
    computes its own queries: simple, and what is exchanged is small beside the logits of the models that train
    on CPU.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        # Megatron's checkpoint code asks every module for its group, or else global state.
        self.tp_group = pg_collection.tp
        self.context = pg_collection.cp
        self.scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None = None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **_: object,
    ) -> Tensor:
        """[S, B, N * D] for [S, B, N, D], or [S, N * D] for packed [S, N, D].

        Padding is at the right of its sequence, so causality alone keeps it out of real positions.
        """
        if attention_mask is not None or attention_bias is not None:
            raise NotImplementedError("SDPACoreAttention is causal: it takes no mask and no bias")
        if packed_seq_params is None:
            lengths: tuple[int, ...] = (query.shape[0] * self.context.size(),)
            return self._attend(query, key, value, lengths).flatten(2)
        boundaries = packed_seq_params.cu_seqlens_q_padded.tolist()
        lengths = tuple(end - start for start, end in itertools.pairwise(boundaries))
        out_SBND = self._attend(*(x.unsqueeze(1) for x in (query, key, value)), lengths)
        return out_SBND.squeeze(1).flatten(1)

    def _attend(
        self, query_SBND: Tensor, key_SBND: Tensor, value_SBND: Tensor, lengths: tuple[int, ...]
    ) -> Tensor:
        """[S, B, N, D]; `lengths` are those of the sequences of the stream, before it was cut."""
        ranks, rank = self.context.size(), self.context.rank()
        if ranks > 1:
            key_SBND, value_SBND = self._whole(key_SBND, value_SBND, lengths)
        parts, start = [], 0
        for length in lengths:
            mine = query_SBND[start // ranks : (start + length) // ranks]
            keys, values = key_SBND[start : start + length], value_SBND[start : start + length]
            if ranks == 1:
                parts.append(self._causal(mine, keys, values))
            else:
                chunk = length // (2 * ranks)
                for query, at in ((mine[:chunk], rank), (mine[chunk:], 2 * ranks - 1 - rank)):
                    end = (at + 1) * chunk
                    parts.append(self._causal(query, keys[:end], values[:end]))
            start += length
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _whole(self, key_SBND: Tensor, value_SBND: Tensor, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of all context ranks, in the order of the stream."""
        slots = zigzag_slots(lengths, self.context.size()).to(key_SBND.device)
        both = torch.stack([key_SBND, value_SBND], dim=1)
        # Every rank's queries use every key, so the backward pass sums over ranks.
        whole = gather_from_sequence_parallel_region(
            both, tensor_parallel_output_grad=True, group=self.context
        )[slots]
        return whole[:, 0], whole[:, 1]

    def _causal(self, query_SBND: Tensor, key_KBND: Tensor, value_KBND: Tensor) -> Tensor:
        """[S, B, N, D]; the queries are those of the last S of the K positions."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query_SBND, key_KBND, value_KBND))
        queries, keys = query.shape[2], key.shape[2]
        mask = None
        if queries != keys:
            # `is_causal` would align the first query with the first key.
            mask = torch.ones((queries, keys), dtype=torch.bool, device=query.device).tril(keys - queries)
        out_BNSD = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return out_BNSD.permute(2, 0, 1, 3).contiguous()
