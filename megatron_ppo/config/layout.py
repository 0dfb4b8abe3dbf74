"""How a model is laid out over the trainer ranks: resolves the automatic sizes and checks that they fit."""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ppo.config.derived import ModelFacts, ParallelSizes
from megatron_ppo.config.model_sections import ParallelismSection

_ENGINE_VOCABULARY_MULTIPLE = 64  # vLLM's DEFAULT_VOCAB_PADDING_SIZE


def layout(
    section: ParallelismSection, *, key: str, world_size: int, model: ModelFacts | None
) -> tuple[ParallelSizes, list[str]]:
    """Sizes of every axis, and what is wrong with them.

    Args:
        key: dotted key of the section, for messages.   model: None skips what depends on the model.
    """
    pipeline, context = section.pipeline_model_parallel_size, section.context_parallel_size
    tensor = section.tensor_model_parallel_size
    if tensor is None:
        tensor = _largest_tensor_size(section, world_size, model)
    data = section.data_parallel_size or max(1, world_size // (tensor * pipeline * context))
    experts = section.expert_model_parallel_size
    sizes = ParallelSizes(tensor=tensor, pipeline=pipeline, context=context, data=data, expert=experts)
    problems = []
    if sizes.world_size != world_size:
        problems.append(
            f"{key}: tensor {tensor} * pipeline {pipeline} * context {context} * data {data} = "
            f"{sizes.world_size} ranks; must be {world_size}, the world size"
        )
    if section.sequence_parallel and tensor == 1:
        problems.append(
            f"{key}.sequence_parallel: got True; needs tensor_model_parallel_size > 1, got {tensor}"
        )
    virtual = section.virtual_pipeline_model_parallel_size or 1
    if virtual > 1 and pipeline == 1:
        problems.append(
            f"{key}.virtual_pipeline_model_parallel_size: got {virtual}; needs "
            "pipeline_model_parallel_size > 1, got 1: chunks take turns over the stages of a pipeline"
        )
    problems += _expert_problems(section, key, context * data, model)
    if model is not None:
        if model.num_experts and tensor > 1 and not section.sequence_parallel:
            problems.append(
                f"{key}.sequence_parallel: got False; must be true for a model with experts at "
                f"tensor_model_parallel_size {tensor}: experts take every tensor rank's tokens as different ones"
            )
        problems += _misfits(key, tensor, pipeline, model)
        if virtual > 1 and model.num_layers % pipeline == 0 and model.num_layers % (pipeline * virtual):
            problems.append(
                f"{key}.virtual_pipeline_model_parallel_size: got {virtual}; pipeline {pipeline} * chunks {virtual} "
                f"must divide the model's {model.num_layers} layers"
            )
    return sizes, problems


def padding_advice(key: str, sizes: ParallelSizes, model: ModelFacts) -> str | None:
    """What a tensor size that does not divide the KV heads costs; None for one that does."""
    padded = -(-model.num_kv_heads // sizes.tensor) * sizes.tensor
    if padded == model.num_kv_heads:
        return None
    return (
        f"{key}.tensor_model_parallel_size={sizes.tensor} does not divide the model's {model.num_kv_heads} KV heads: "
        f"zeros fill them up to {padded}, which changes no result and makes attention "
        f"{padded / model.num_kv_heads:.2f} times as large"
    )


def engine_problems(tensor: int, model: ModelFacts) -> Iterator[str]:
    """Why vLLM could not cut the model over `tensor` ranks of an engine; the trainer's padding is not known to it.

    Key/value heads may also be fewer than the ranks: vLLM then gives several ranks the same one.
    """
    key = f"inference.tensor_parallel_size: got {tensor}; must divide the model's"
    vocabulary = -(-model.vocab_size // _ENGINE_VOCABULARY_MULTIPLE) * _ENGINE_VOCABULARY_MULTIPLE
    for name, count in (
        ("number of heads", model.num_heads),
        *_mlp_widths(model),
        (f"vocabulary, filled up to a multiple of {_ENGINE_VOCABULARY_MULTIPLE},", vocabulary),
    ):
        if count % tensor:
            yield f"{key} {name} {count}"
    if model.num_kv_heads % tensor and tensor % model.num_kv_heads:
        yield f"{key} number of KV heads {model.num_kv_heads}, or be a multiple of it"


def _largest_tensor_size(section: ParallelismSection, world_size: int, model: ModelFacts | None) -> int:
    """The largest size that divides the ranks that are left, the heads, the KV heads and the MLPs: without padding."""
    taken = (
        section.pipeline_model_parallel_size
        * section.context_parallel_size
        * (section.data_parallel_size or 1)
    )
    ranks = world_size // taken if world_size % taken == 0 else 1
    if model is None:
        return ranks
    if model.num_experts and not section.sequence_parallel:
        return 1
    wanted = (
        ranks,
        model.num_heads,
        model.num_kv_heads,
        *(width for _, width in _mlp_widths(model)),
    )
    return max(size for size in range(1, ranks + 1) if all(number % size == 0 for number in wanted))


def _expert_problems(
    section: ParallelismSection, key: str, copies: int, model: ModelFacts | None
) -> Iterator[str]:
    experts = section.expert_model_parallel_size
    if experts == 1:
        return
    name = f"{key}.expert_model_parallel_size: got {experts}"
    if model is not None and model.num_experts == 0:
        yield f"{name}; must be 1, {model.architecture} has no experts"
        return
    if copies % experts:
        yield f"{name}; must divide the {copies} data-parallel ranks (context-parallel ones included)"
    if model is not None and model.num_experts % experts:
        yield f"{name}; must divide the model's {model.num_experts} experts"


def _mlp_widths(model: ModelFacts) -> Iterator[tuple[str, int]]:
    """Of the MLPs that the model has. Where all layers have experts, the dense width is no size of anything."""
    if model.has_dense_layers:
        yield "MLP width", model.ffn_hidden_size
    if model.num_experts:
        yield "expert width", model.moe_ffn_hidden_size


def _misfits(key: str, tensor: int, pipeline: int, model: ModelFacts) -> list[str]:
    problems = [
        f"{key}.tensor_model_parallel_size: got {tensor}; must divide the model's {name} {count}"
        for name, count in _mlp_widths(model)
        if count % tensor
    ]
    if model.num_layers % pipeline:
        problems.append(
            f"{key}.pipeline_model_parallel_size: got {pipeline}; must divide the model's "
            f"{model.num_layers} layers"
        )
    return problems
