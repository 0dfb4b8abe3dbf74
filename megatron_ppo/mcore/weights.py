"""Hugging Face safetensors to Megatron shards, one tensor at a time; `weight_export` is the way back.

A `WeightMap` says which of `hf_map`'s pieces live on this rank. Parameters go by the names of the whole model,
whatever stage, chunk and expert rank they are in (see `named_parameters`). Loading reads only this rank's rows or
columns. Round trips are bit-exact.

Shape legend: H hidden, D head dimension; K key/value heads, Q query heads per key/value head; V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.hf_files import HFWeights
from megatron_ppo.mcore.hf_map import WeightPiece, canonical_name, tied_head_piece, weight_pieces
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.protocol.errors import ConfigError

_HEAD = "lm_head.weight"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.(.+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How the model's parameters correspond to Hugging Face tensors, for this rank's shard.

    Attributes:
        value_head: the module ends in a scalar head (the critic).
    """

    model: HFModelConfig
    parallel: ParallelContext
    value_head: bool = False

    def pieces(self) -> list[WeightPiece]:
        """All pieces of the model, in the order of export."""
        return weight_pieces(self.model, value_head=self.value_head)

    def stage_of(self, piece: WeightPiece) -> int:
        """The pipeline stage that holds the piece."""
        if piece.layer is not None:
            return self.parallel.stage_of_layer(piece.layer, self.model.num_layers)
        return self.parallel.pp_size - 1 if piece.last_stage else 0

    def owner_of(self, piece: WeightPiece) -> int | None:
        """Rank in the expert group that holds the piece; None if every rank of the stage does."""
        if piece.expert is None or self.parallel.ep_size == 1:
            return None
        assert self.model.experts is not None
        return piece.expert // (self.model.experts.num_experts // self.parallel.ep_size)

    def loadable_pieces(self) -> dict[str, WeightPiece]:
        """Pieces by Megatron's names, with the last stage's own copy of tied embeddings."""
        pieces = {piece.name: piece for piece in self.pieces()}
        if self.model.tied and not self.value_head:
            head = tied_head_piece(self.model)
            pieces[head.name] = head
        return pieces

    def load(self, piece: WeightPiece, source: HFWeights) -> Tensor:
        """This rank's shard of the piece, in the file's dtype."""
        if piece.cut == "qkv":
            return self._load_qkv(piece, source)
        names = [name for name, _ in piece.outputs]
        shape = piece.outputs[0][1]
        if piece.cut == "whole":
            return source.read(names[0])
        if piece.cut == "rows":
            return self._load_vocabulary(names[0], source)
        if piece.cut == "columns":
            return self._load_columns(piece, source)
        return torch.cat([source.read(name, rows=self._share(shape[0])) for name in names])

    def _share(self, size: int) -> slice:
        part = size // self.parallel.tp_size
        return slice(self.parallel.tp_rank * part, (self.parallel.tp_rank + 1) * part)

    def _load_vocabulary(self, name: str, source: HFWeights) -> Tensor:
        """[V / tp, H]; rows beyond the vocabulary are zero, and `vocab_parallel` never looks at their
        logits.
        """
        share = self._share(self.model.padded_vocab_size(self.parallel.tp_size))
        rows = slice(share.start, min(share.stop, self.model.vocab_size))
        real = source.read(name, rows=rows)
        stored_twice = self.model.tied and not self.value_head and _HEAD in source
        # transformers unties heads of other values, against config.json: the model would not be what its file says.
        if stored_twice and not torch.equal(source.read(_HEAD, rows=rows), real):
            raise ConfigError(
                f"model folder {source.folder}: config.json says tie_word_embeddings, but {_HEAD} and {name} "
                "have different values"
            )
        missing = share.stop - share.start - real.shape[0]
        return torch.nn.functional.pad(real, (0, 0, 0, missing))

    def _load_columns(self, piece: WeightPiece, source: HFWeights) -> Tensor:
        ((name, (_, width)),) = piece.outputs
        if piece.parameter != "self_attention.linear_proj.weight":
            return source.read(name, columns=self._share(width))
        model, tp = self.model, self.parallel.tp_size
        share = self._share(model.padded_heads(tp) * model.head_dim)
        real = source.read(name, columns=_within(share, width))
        return torch.nn.functional.pad(real, (0, share.stop - share.start - real.shape[1]))

    def _load_qkv(self, piece: WeightPiece, source: HFWeights) -> Tensor:
        """Key/value heads of this rank one after another; the padding, if any, is zero and comes last."""
        model = self.model
        share = self._share(model.padded_kv_heads(self.parallel.tp_size))
        groups = _within(share, model.num_kv_heads)
        parts = []
        for name, shape in piece.outputs:
            block = shape[0] // model.num_kv_heads
            part = source.read(name, rows=slice(groups.start * block, groups.stop * block))
            parts.append(part.view(groups.stop - groups.start, block, *part.shape[1:]))
        fused = torch.cat(parts, dim=1)
        rows = fused.reshape(-1, *fused.shape[2:])
        missing = (share.stop - share.start) * fused.shape[1] - rows.shape[0]
        return torch.nn.functional.pad(rows, (0, 0) * (rows.dim() - 1) + (0, missing))


def _within(share: slice, size: int) -> slice:
    """The part of a share that really exists."""
    return slice(min(share.start, size), min(share.stop, size))


def named_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank's model chunks, named as in the local layer spec.

    Layers and experts are numbered as in the whole model, from 0.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            match = _LAYER.fullmatch(name)
            if match is not None:
                layer = chunk.decoder.layers[int(match[1])]
                # Megatron counts the whole model's layers from 1.
                inside = canonical_name(_with_global_expert(match[2], layer))
                name = f"decoder.layers.{layer.layer_number - 1}.{inside}"
            yield name, parameter


def _with_global_expert(name: str, layer: Any) -> str:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return name
    return f"mlp.experts.local_experts.{layer.mlp.local_expert_indices[int(match[1])]}.{match[2]}"


def load_hf_weights(chunks: Sequence[Any], weight_map: WeightMap, folder: str | Path) -> None:
    """Fill every parameter of the model chunks, a value head only where the folder has one.

    Reads one tensor at a time.

    Raises: ConfigError if the folder lacks a tensor or has one of another shape.
    """
    pieces = weight_map.loadable_pieces()
    with HFWeights(folder) as source, torch.no_grad():
        for name, parameter in named_parameters(chunks):
            piece = pieces.get(name)
            if piece is None:
                raise ConfigError(f"no Hugging Face tensor is known for the parameter {name}")
            if _keeps_its_start(piece, weight_map.model, source):
                continue
            shard = weight_map.load(piece, source)
            if shard.shape != parameter.shape:
                tensors = ", ".join(hf_name for hf_name, _ in piece.outputs)
                raise ConfigError(
                    f"model folder {folder}: this rank's part of {tensors} has shape {tuple(shard.shape)}, "
                    f"the model needs {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)
            del shard  # before the next one is read


def _keeps_its_start(piece: WeightPiece, model: HFModelConfig, source: HFWeights) -> bool:
    hf_name = piece.outputs[0][0]
    if not hf_name.startswith("score."):
        return False
    # Reward models of the ...ForSequenceClassification kind have no bias.
    return not model.has_value_head or (hf_name == "score.bias" and hf_name not in source)
