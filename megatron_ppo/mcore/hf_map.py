"""Which Hugging Face tensors each Megatron parameter is made of, and how they are cut over the tensor group.

One table for every direction: loading, exporting, the metadata of a refit, and the check of a model folder before
anything starts. Standard library only.

Names are those of Megatron's local layer spec; `canonical_name` translates Transformer Engine's.

Layout of the fused parameters:
    linear_qkv  per key/value head: its query heads, its key, its value; cut over TP by key/value heads.
    linear_fc1  per TP rank: its rows of gate, then its rows of up.

Invariant: the order of `weight_pieces` is that of a forward pass and depends on the model alone, so every rank and
every receiver of weights agrees on it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron_ppo.mcore.hf_config import HFModelConfig

# whole: the same on every rank.  rows: of the padded vocabulary.  columns: of the second matrix of a pair.
Cut = Literal["whole", "rows", "columns", "qkv", "gate_up"]
Shape = tuple[int, ...]

_FUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPiece:
    """One Megatron parameter and the Hugging Face tensors that it holds.

    Attributes:
        parameter: Megatron's name; within the layer if `layer` is given, within the expert if `expert` is.
        layer: 0-based, counted over the whole model.   expert: 0-based, counted over all experts of the layer.
        outputs: names and full shapes of the tensors, in the order in which the parameter holds them.
        last_stage: whether a piece outside the layers lives on the last pipeline stage.
    """

    parameter: str
    outputs: tuple[tuple[str, Shape], ...]
    cut: Cut
    layer: int | None = None
    expert: int | None = None
    last_stage: bool = False

    @property
    def name(self) -> str:
        """Megatron's name, with layers and experts numbered as in the whole model."""
        inside = self.parameter
        if self.expert is not None:
            inside = f"mlp.experts.local_experts.{self.expert}.{inside}"
        return inside if self.layer is None else f"decoder.layers.{self.layer}.{inside}"


def weight_pieces(model: HFModelConfig, *, value_head: bool = False) -> list[WeightPiece]:
    """All parameters in the order of a forward pass; q, k, v and gate, up stay next to each other.

    Args:
        value_head: end in the critic's `score` instead of the language-model head.
    """
    vocabulary, hidden = (model.vocab_size, model.hidden_size), (model.hidden_size,)
    pieces = [
        WeightPiece(
            parameter="embedding.word_embeddings.weight",
            outputs=(("model.embed_tokens.weight", vocabulary),),
            cut="rows",
        )
    ]
    for layer in range(model.num_layers):
        pieces += _layer_pieces(model, layer)
    pieces.append(_outer("decoder.final_layernorm.weight", "model.norm.weight", hidden, "whole"))
    if value_head:
        pieces.append(_outer("output_layer.weight", "score.weight", (1, model.hidden_size), "whole"))
        pieces.append(_outer("output_layer.bias", "score.bias", (1,), "whole"))
    elif not model.tied:
        pieces.append(_outer("output_layer.weight", "lm_head.weight", vocabulary, "rows"))
    return pieces


def canonical_name(inside: str) -> str:
    """What the local spec calls the parameter of a layer that Transformer Engine's spec calls `inside`.

    Transformer Engine fuses a norm into the linear layer behind it, which then holds the norm's weight. Layers with
    experts keep the norm before the router apart. All other names are the same.
    """
    return _FUSED_NORMS.get(inside, inside)


def tied_head_piece(model: HFModelConfig) -> WeightPiece:
    """The last pipeline stage's copy of tied embeddings: loaded, never exported."""
    vocabulary = (model.vocab_size, model.hidden_size)
    return _outer("output_layer.weight", "model.embed_tokens.weight", vocabulary, "rows")


def expected_tensors(model: HFModelConfig, *, value_head: bool = False) -> dict[str, Shape]:
    """Names and shapes of the tensors that a folder of this model has."""
    return dict(output for piece in weight_pieces(model, value_head=value_head) for output in piece.outputs)


def _outer(parameter: str, hf_name: str, shape: Shape, cut: Cut) -> WeightPiece:
    return WeightPiece(parameter=parameter, outputs=((hf_name, shape),), cut=cut, last_stage=True)


def _layer_pieces(model: HFModelConfig, layer: int) -> list[WeightPiece]:
    experts = model.experts
    mlp = (
        [_mlp_piece_router(model, layer), *_expert_pieces(model, layer)]
        if experts is not None and layer in experts.layers
        else _mlp_pieces(model, layer, width=model.ffn_hidden_size)
    )
    return [*_attention_pieces(model, layer), *mlp]


def _attention_pieces(model: HFModelConfig, layer: int) -> list[WeightPiece]:
    hidden, head_dim = model.hidden_size, model.head_dim
    rows = {
        "q": model.num_heads * head_dim,
        "k": model.num_kv_heads * head_dim,
        "v": model.num_kv_heads * head_dim,
    }
    prefix = f"model.layers.{layer}."

    def piece(parameter: str, cut: Cut, outputs: dict[str, Shape]) -> WeightPiece:
        named = tuple((prefix + name, shape) for name, shape in outputs.items())
        return WeightPiece(parameter=parameter, layer=layer, outputs=named, cut=cut)

    weights: dict[str, Shape] = {f"self_attn.{x}_proj.weight": (size, hidden) for x, size in rows.items()}
    biases: dict[str, Shape] = {f"self_attn.{x}_proj.bias": (size,) for x, size in rows.items()}
    pieces = [
        piece("input_layernorm.weight", "whole", {"input_layernorm.weight": (hidden,)}),
        piece("self_attention.linear_qkv.weight", "qkv", weights),
    ]
    if model.qkv_bias:
        pieces.append(piece("self_attention.linear_qkv.bias", "qkv", biases))
    if model.qk_norm:
        pieces += [
            piece(
                f"self_attention.{x}_layernorm.weight", "whole", {f"self_attn.{x}_norm.weight": (head_dim,)}
            )
            for x in "qk"
        ]
    projection: dict[str, Shape] = {"self_attn.o_proj.weight": (hidden, rows["q"])}
    pieces.append(piece("self_attention.linear_proj.weight", "columns", projection))
    pieces.append(piece("pre_mlp_layernorm.weight", "whole", {"post_attention_layernorm.weight": (hidden,)}))
    return pieces


def _mlp_pieces(
    model: HFModelConfig, layer: int, *, width: int, expert: int | None = None
) -> list[WeightPiece]:
    hidden, inside = model.hidden_size, "" if expert is None else f"experts.{expert}."
    prefix, megatron = f"model.layers.{layer}.mlp.{inside}", "mlp." if expert is None else ""
    gate_up = tuple((f"{prefix}{x}_proj.weight", (width, hidden)) for x in ("gate", "up"))
    down = ((f"{prefix}down_proj.weight", (hidden, width)),)
    return [
        WeightPiece(
            parameter=f"{megatron}linear_fc1.weight",
            layer=layer,
            expert=expert,
            outputs=gate_up,
            cut="gate_up",
        ),
        WeightPiece(
            parameter=f"{megatron}linear_fc2.weight",
            layer=layer,
            expert=expert,
            outputs=down,
            cut="columns",
        ),
    ]


def _mlp_piece_router(model: HFModelConfig, layer: int) -> WeightPiece:
    assert model.experts is not None
    router = ((f"model.layers.{layer}.mlp.gate.weight", (model.experts.num_experts, model.hidden_size)),)
    return WeightPiece(parameter="mlp.router.weight", layer=layer, outputs=router, cut="whole")


def _expert_pieces(model: HFModelConfig, layer: int) -> list[WeightPiece]:
    assert model.experts is not None
    return [
        piece
        for expert in range(model.experts.num_experts)
        for piece in _mlp_pieces(model, layer, width=model.experts.ffn_hidden_size, expert=expert)
    ]
