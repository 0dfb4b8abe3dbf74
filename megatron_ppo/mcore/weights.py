"""Hugging Face safetensors to Megatron shards and back, one tensor at a time.

A `WeightMap` says for each of this rank's parameters which Hugging Face tensors it is made of and how it is
cut over the tensor group. Parameters go by the names of the whole model, whatever stage and chunk they are in
(see `named_parameters`). Loading reads only this rank's rows or columns; exporting gathers one parameter at
a time and splits it into full Hugging Face tensors. Round trips are bit-exact.

Layout of the fused parameters (Megatron's local layer spec):
    linear_qkv  per key/value head: its query heads, its key, its value; cut over TP by key/value heads.
    linear_fc1  per TP rank: its rows of gate, then its rows of up.

Shape legend: H hidden, D head dimension; K key/value heads, Q query heads per key/value head; V vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor

from megatron_ppo.mcore.hf_config import HFModelConfig
from megatron_ppo.mcore.parallel import ParallelContext
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.weights import TensorMeta

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_PLAIN = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
}
_BY_COLUMNS = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}


class HFWeights:
    """Read access to the safetensors of a model folder, whole or sharded with an index.

    Use as a context manager. Raises: ConfigError for a folder without safetensors or without a wanted tensor.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index, single = self.folder / "model.safetensors.index.json", self.folder / "model.safetensors"
        if index.is_file():
            self._file_of: dict[str, str] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        elif single.is_file():
            with safe_open(single, framework="pt") as opened:
                self._file_of = dict.fromkeys(opened.keys(), single.name)
        else:
            raise ConfigError(
                f"model folder {self.folder} has neither model.safetensors nor model.safetensors.index.json"
            )
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> HFWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def read(self, name: str, *, rows: slice | None = None, columns: slice | None = None) -> Tensor:
        """The tensor, or some of its rows or columns; only those bytes are read."""
        if name not in self._file_of:
            raise ConfigError(f"model folder {self.folder} has no tensor {name}")
        file = self._file_of[name]
        if file not in self._opened:
            self._opened[file] = self._stack.enter_context(safe_open(self.folder / file, framework="pt"))
        if rows is None and columns is None:
            tensor: Tensor = self._opened[file].get_tensor(name)
            return tensor
        view = self._opened[file].get_slice(name)
        part: Tensor = view[rows] if columns is None else view[:, columns]
        return part


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightMap:
    """How the model's parameters correspond to Hugging Face tensors, for this rank's shard."""

    model: HFModelConfig
    parallel: ParallelContext

    def load(self, name: str, source: HFWeights) -> Tensor:
        """This rank's shard of the parameter `name`, in the file's dtype. Raises: ConfigError for an unknown
        name.
        """
        layer = _LAYER.fullmatch(name)
        if layer is None:
            return self._load_outer(name, source)
        prefix, kind = f"model.layers.{layer[1]}.", layer[2]
        if kind in _PLAIN:
            return source.read(prefix + _PLAIN[kind])
        if kind in _BY_COLUMNS:
            return self._load_columns(prefix + _BY_COLUMNS[kind], source)
        if kind.startswith("self_attention.linear_qkv."):
            suffix = kind.rsplit(".", 1)[1]
            return self._load_qkv(prefix + "self_attn.", suffix, source)
        if kind == "mlp.linear_fc1.weight":
            rows = self._share(self.model.ffn_hidden_size)
            return torch.cat(
                [source.read(f"{prefix}mlp.{part}_proj.weight", rows=rows) for part in ("gate", "up")]
            )
        raise ConfigError(f"no Hugging Face tensor is known for the parameter {name}")

    def _load_outer(self, name: str, source: HFWeights) -> Tensor:
        if name == "decoder.final_layernorm.weight":
            return source.read("model.norm.weight")
        if name == "embedding.word_embeddings.weight":
            return self._load_vocabulary("model.embed_tokens.weight", source)
        if name == "output_layer.weight":
            return self._load_vocabulary(
                "model.embed_tokens.weight" if self.model.tied else "lm_head.weight", source
            )
        raise ConfigError(f"no Hugging Face tensor is known for the parameter {name}")

    def _share(self, size: int) -> slice:
        part = size // self.parallel.tp_size
        return slice(self.parallel.tp_rank * part, (self.parallel.tp_rank + 1) * part)

    def _load_vocabulary(self, name: str, source: HFWeights) -> Tensor:
        """[V / tp, H]; rows beyond the vocabulary are zero, and `vocab_parallel` never looks at their
        logits.
        """
        share = self._share(self.model.padded_vocab_size(self.parallel.tp_size))
        real = source.read(name, rows=slice(share.start, min(share.stop, self.model.vocab_size)))
        missing = share.stop - share.start - real.shape[0]
        return torch.nn.functional.pad(real, (0, 0, 0, missing))

    def _load_columns(self, name: str, source: HFWeights) -> Tensor:
        width = (
            self.model.ffn_hidden_size if "down_proj" in name else self.model.num_heads * self.model.head_dim
        )
        return source.read(name, columns=self._share(width))

    def _load_qkv(self, prefix: str, suffix: str, source: HFWeights) -> Tensor:
        model, groups = self.model, self._share(self.model.num_kv_heads)
        queries = model.num_heads // model.num_kv_heads
        parts = []
        for projection, heads in (("q", queries), ("k", 1), ("v", 1)):
            block = heads * model.head_dim
            rows = slice(groups.start * block, groups.stop * block)
            part = source.read(f"{prefix}{projection}_proj.{suffix}", rows=rows)
            parts.append(part.view(groups.stop - groups.start, block, *part.shape[1:]))
        fused = torch.cat(parts, dim=1)
        return fused.reshape(-1, *fused.shape[2:])


def named_parameters(chunks: Sequence[Any]) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters of this rank's model chunks; layers are numbered as in the whole model, from 0."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            layer = _LAYER.fullmatch(name)
            if layer is not None:
                # Megatron counts the whole model's layers from 1.
                index = chunk.decoder.layers[int(layer[1])].layer_number - 1
                name = f"decoder.layers.{index}.{layer[2]}"
            yield name, parameter


def load_hf_weights(chunks: Sequence[Any], weight_map: WeightMap, folder: str | Path) -> None:
    """Fill every parameter of the model chunks, a value head only where the folder has one.

    Reads one tensor at a time.

    Raises: ConfigError if the folder lacks a tensor or has one of another shape.
    """
    with HFWeights(folder) as source, torch.no_grad():
        for name, parameter in named_parameters(chunks):
            if _is_value_head(name, parameter):
                if weight_map.model.has_value_head:
                    _load_value_head(name.rsplit(".", 1)[1], parameter, source)
                continue
            shard = weight_map.load(name, source)
            if shard.shape != parameter.shape:
                raise ConfigError(
                    f"model folder {folder}: shard of {name} has shape {tuple(shard.shape)}, "
                    f"config.json needs {tuple(parameter.shape)}"
                )
            parameter.copy_(shard)


def _is_value_head(name: str, parameter: Tensor) -> bool:
    return name == "output_layer.bias" or (name == "output_layer.weight" and parameter.shape[0] == 1)


def _load_value_head(kind: str, parameter: Tensor, source: HFWeights) -> None:
    """`score` of a reward or value model; one for whole sequences has no bias, and the critic's stays 0."""
    name = f"score.{kind}"
    if kind == "bias" and name not in source:
        return
    head = source.read(name)
    if head.shape != parameter.shape:
        raise ConfigError(
            f"model folder {source.folder}: {name} has shape {tuple(head.shape)}, "
            f"a value head needs {tuple(parameter.shape)}"
        )
    parameter.copy_(head)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Piece:
    """One Megatron parameter and the Hugging Face tensors that it holds, in order."""

    parameter: str
    layer: int | None
    outputs: tuple[tuple[str, tuple[int, ...]], ...]
    layout: str


def _pieces(model: HFModelConfig) -> list[_Piece]:
    """All parameters in the order of a forward pass; q, k, v and gate, up stay next to each other."""
    vocabulary, hidden = (model.vocab_size, model.hidden_size), (model.hidden_size,)
    pieces = [
        _Piece(
            parameter="embedding.word_embeddings.weight",
            layer=None,
            outputs=(("model.embed_tokens.weight", vocabulary),),
            layout="rows",
        )
    ]
    for layer in range(model.num_layers):
        pieces += _layer_pieces(model, layer)
    final = _Piece(
        parameter="decoder.final_layernorm.weight",
        layer=None,
        outputs=(("model.norm.weight", hidden),),
        layout="whole",
    )
    head = _Piece(
        parameter="output_layer.weight", layer=None, outputs=(("lm_head.weight", vocabulary),), layout="rows"
    )
    return [*pieces, final] if model.tied else [*pieces, final, head]


def _layer_pieces(model: HFModelConfig, layer: int) -> list[_Piece]:
    hidden, head_dim, ffn = model.hidden_size, model.head_dim, model.ffn_hidden_size
    rows = {
        "q": model.num_heads * head_dim,
        "k": model.num_kv_heads * head_dim,
        "v": model.num_kv_heads * head_dim,
    }

    def piece(parameter: str, layout: str, outputs: dict[str, tuple[int, ...]]) -> _Piece:
        named = tuple((f"model.layers.{layer}.{name}", shape) for name, shape in outputs.items())
        return _Piece(parameter=parameter, layer=layer, outputs=named, layout=layout)

    def whole(parameter: str, size: int) -> _Piece:
        return piece(parameter, "whole", {_PLAIN[parameter]: (size,)})

    def columns(parameter: str, width: int) -> _Piece:
        return piece(parameter, "columns", {_BY_COLUMNS[parameter]: (hidden, width)})

    weights = {f"self_attn.{name}_proj.weight": (size, hidden) for name, size in rows.items()}
    biases = {f"self_attn.{name}_proj.bias": (size,) for name, size in rows.items()}
    gate_up = {f"mlp.{name}_proj.weight": (ffn, hidden) for name in ("gate", "up")}
    return [
        whole("input_layernorm.weight", hidden),
        piece("self_attention.linear_qkv.weight", "qkv", dict(weights)),
        *([piece("self_attention.linear_qkv.bias", "qkv", dict(biases))] if model.qkv_bias else []),
        *([whole(f"self_attention.{x}_layernorm.weight", head_dim) for x in "qk"] if model.qk_norm else []),
        columns("self_attention.linear_proj.weight", rows["q"]),
        whole("pre_mlp_layernorm.weight", hidden),
        piece("mlp.linear_fc1.weight", "gate_up", dict(gate_up)),
        columns("mlp.linear_fc2.weight", ffn),
    ]


def hf_weight_metadata(model: HFModelConfig, dtype: torch.dtype) -> tuple[TensorMeta, ...]:
    """Names and full shapes in the order of `export_hf_weights`."""
    name = str(dtype).removeprefix("torch.")
    return tuple(
        TensorMeta(name=hf_name, shape=shape, dtype=name)
        for piece in _pieces(model)
        for hf_name, shape in piece.outputs
    )


def export_hf_weights(chunks: Sequence[Any], weight_map: WeightMap) -> Iterator[Tensor]:
    """Full Hugging Face tensors, the same on every rank, in the order of `hf_weight_metadata`.

    Collective over all ranks of the model: each parameter is gathered over its stage's tensor group, then
    sent to the other pipeline stages. At most one parameter is held in full. What needs no gathering is yielded
    as a view of the parameter, which the next update changes.
    """
    parameters = {name: p.detach() for name, p in named_parameters(chunks)}
    dtype = next(iter(parameters.values())).dtype
    parallel, model = weight_map.parallel, weight_map.model
    for piece in _pieces(model):
        name, stage = piece.parameter, 0
        if piece.layer is not None:
            stage = parallel.stage_of_layer(piece.layer, model.num_layers)
            name = f"decoder.layers.{piece.layer}.{piece.parameter}"
        elif piece.layout == "whole" or piece.parameter == "output_layer.weight":
            stage = parallel.pp_size - 1
        full: list[Tensor] = []
        if stage == parallel.pp_rank:
            shards = _gather(parameters[name], parallel, whole=piece.layout == "whole")
            full = _split(shards, piece, model)
        for index, (_, shape) in enumerate(piece.outputs):
            yield _from_stage(full[index] if full else None, shape, stage, parallel, dtype)


def _gather(shard: Tensor, parallel: ParallelContext, *, whole: bool) -> list[Tensor]:
    if whole or parallel.tp_size == 1:
        return [shard]
    shards = [torch.empty_like(shard) for _ in range(parallel.tp_size)]
    dist.all_gather(shards, shard.contiguous(), group=parallel.tensor)
    return shards


def _split(shards: list[Tensor], piece: _Piece, model: HFModelConfig) -> list[Tensor]:
    if piece.layout == "whole":
        return shards
    if piece.layout == "columns":
        return [_joined(shards, dim=1)]
    if piece.layout == "rows":
        return [_joined(shards)[: piece.outputs[0][1][0]]]
    if piece.layout == "gate_up":
        halves = [shard.chunk(2) for shard in shards]
        return [_joined([half[part] for half in halves]) for part in (0, 1)]
    fused = _joined(shards)
    blocks = fused.view(model.num_kv_heads, -1, *fused.shape[1:])
    queries = model.num_heads // model.num_kv_heads * model.head_dim
    parts = blocks.split([queries, model.head_dim, model.head_dim], dim=1)
    return [part.reshape(-1, *fused.shape[1:]) for part in parts]


def _joined(shards: list[Tensor], dim: int = 0) -> Tensor:
    # torch.cat copies even a single tensor, and without tensor parallelism that would be most of an export.
    return shards[0] if len(shards) == 1 else torch.cat(shards, dim=dim)


def _from_stage(
    tensor: Tensor | None,
    shape: tuple[int, ...],
    stage: int,
    parallel: ParallelContext,
    dtype: torch.dtype,
) -> Tensor:
    if parallel.pp_size == 1:
        assert tensor is not None
        return tensor.contiguous()
    if tensor is None:
        tensor = torch.empty(shape, dtype=dtype, device=parallel.device)
    tensor = tensor.contiguous()
    dist.broadcast(tensor, src=parallel.stage_ranks()[stage], group=parallel.pipeline)
    return tensor
