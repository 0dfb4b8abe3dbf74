"""Writes small Hugging Face model folders without torch: headers as safetensors has them, weights all zero."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path

from megatron_ppo.mcore.hf_config import map_hf_config
from megatron_ppo.mcore.hf_map import expected_tensors

Shape = tuple[int, ...]
TINY_QWEN2: Mapping[str, object] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 24,
    "vocab_size": 64,
    "max_position_embeddings": 64,
}
OF_EXPERTS: Mapping[str, object] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
}
"""What makes TINY_QWEN2 a model of experts."""


def write_safetensors(path: Path, tensors: Mapping[str, Shape], *, dtype: str = "F32") -> None:
    """A complete file of zeros."""
    size = {"F32": 4, "BF16": 2, "F16": 2, "I64": 8, "F8_E4M3": 1}[dtype]
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in tensors.items():
        start, end = end, end + prod(shape) * size
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    raw = json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + bytes(end))


def write_model_folder(folder: Path, config: Mapping[str, object], *, files: int = 1) -> dict[str, Shape]:
    """config.json and all weights that it needs, in `files` files with an index, or in one without.

    A config that cannot be mapped gets a file without tensors. Returns: names and shapes of the tensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    try:
        model = map_hf_config(config, source="config.json")
        tensors = expected_tensors(model, value_head=model.has_value_head)
    except Exception:
        tensors = {}
    if files == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return tensors
    names = list(tensors)
    weight_map = {}
    for number in range(files):
        file = f"model-{number + 1:05d}-of-{files:05d}.safetensors"
        part = names[number::files]
        write_safetensors(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return tensors
