"""A model folder is looked through before training: what is wrong with it is named, with file and tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.mcore.hf_preflight import INDEX, check_model_folder
from megatron_ppo.protocol.errors import ConfigError
from tests.unit.hf_folder import OF_EXPERTS, TINY_QWEN2, write_model_folder, write_safetensors

CONFIG: dict[str, Any] = {**TINY_QWEN2, "vocab_size": 60, "tie_word_embeddings": False}
MOE = {**CONFIG, **OF_EXPERTS}
SHARD = "model-00002-of-00003.safetensors"
NORM = "model.norm.weight"
DOWN = "model.layers.1.mlp.down_proj.weight"


def refusal(folder: Path) -> str:
    with pytest.raises(ConfigError) as error:
        check_model_folder(folder)
    return str(error.value)


def rewritten(folder: Path, change: Callable[[dict[str, tuple[int, ...]]], None], **options: Any) -> Path:
    """A folder of one file whose list of tensors is changed before it is written."""
    tensors = write_model_folder(folder, CONFIG)
    change(tensors)
    write_safetensors(folder / "model.safetensors", tensors, **options)
    return folder


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        {**CONFIG, "tie_word_embeddings": True},
        {**CONFIG, "architectures": ["LlamaForCausalLM"]},
        {**CONFIG, "architectures": ["Qwen3ForCausalLM"]},
        MOE,
        {**MOE, "mlp_only_layers": [0]},
        {**CONFIG, "architectures": ["Qwen2ForTokenClassification"], "id2label": {"0": "value"}},
    ],
    ids=["qwen2", "tied", "llama", "qwen3", "moe", "moe_mixed", "value"],
)
def test_a_complete_folder_of_every_family_passes(tmp_path: Path, config: dict[str, Any], files: int) -> None:
    write_model_folder(tmp_path, config, files=files)
    assert check_model_folder(tmp_path).num_layers == 2


@pytest.mark.parametrize("dtype", ["BF16", "F16"])
def test_every_floating_format_passes(tmp_path: Path, dtype: str) -> None:
    rewritten(tmp_path, lambda tensors: None, dtype=dtype)
    check_model_folder(tmp_path)


def test_a_tied_model_may_store_its_head_twice_and_old_rotary_constants_are_ignored(tmp_path: Path) -> None:
    config = {**CONFIG, "tie_word_embeddings": True}
    tensors = write_model_folder(tmp_path, config)
    extra = {"lm_head.weight": (60, 16), "model.layers.0.self_attn.rotary_emb.inv_freq": (2,)}
    write_safetensors(tmp_path / "model.safetensors", {**tensors, **extra})
    check_model_folder(tmp_path)


def test_a_truncated_shard_is_named_with_the_tensor_that_is_cut(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG, files=3)
    content = (tmp_path / SHARD).read_bytes()
    (tmp_path / SHARD).write_bytes(content[:-1])
    message = refusal(tmp_path)
    assert SHARD in message
    assert "truncated: tensor " in message
    assert f"the file has {len(content) - 1}" in message


@pytest.mark.parametrize("kept", [0, 5, 12])
def test_a_shard_whose_header_is_cut_is_named(tmp_path: Path, kept: int) -> None:
    write_model_folder(tmp_path, CONFIG, files=3)
    (tmp_path / SHARD).write_bytes((tmp_path / SHARD).read_bytes()[:kept])
    message = refusal(tmp_path)
    assert SHARD in message
    assert f"no complete safetensors file: it has {kept} bytes" in message


def test_a_file_that_is_no_safetensors_is_named(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"not json")
    assert "the safetensors header cannot be read" in refusal(tmp_path)


def test_an_absent_shard_is_named_with_the_index_that_names_it(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG, files=3)
    (tmp_path / SHARD).unlink()
    message = refusal(tmp_path)
    assert f"{tmp_path / INDEX} names {SHARD}, which is not in the folder" in message


def test_a_tensor_that_is_not_in_the_shard_of_the_index_is_named(tmp_path: Path) -> None:
    tensors = write_model_folder(tmp_path, CONFIG, files=3)
    part = {name: tensors[name] for name in list(tensors)[1::3]}
    lost = next(iter(part))
    del part[lost]
    write_safetensors(tmp_path / SHARD, part)
    assert f"{tmp_path / SHARD}: tensor {lost} is missing, although {INDEX}" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as an index"),
        ("{}", "cannot be read as an index"),
        ('{"weight_map": {"a": 1}}', "names of tensors to names of files"),
        ('{"weight_map": {"a": "../other.safetensors"}}', "not a file of this folder"),
    ],
)
def test_an_index_that_cannot_be_used_is_named(tmp_path: Path, content: str, words: str) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / INDEX).write_text(content)
    message = refusal(tmp_path)
    assert str(tmp_path / INDEX) in message
    assert words in message


def test_a_missing_tensor_is_named_with_its_shape(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.pop(DOWN))
    message = refusal(tmp_path)
    assert f"tensor {DOWN} [16, 24] of Qwen2ForCausalLM is missing" in message
    assert str(tmp_path) in message


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({DOWN: (16, 23)}))
    message = refusal(tmp_path)
    assert f"{tmp_path / 'model.safetensors'}: tensor {DOWN} has the shape [16, 23]" in message
    assert "config.json needs [16, 24]" in message


def test_a_head_dimension_that_the_weights_do_not_have_is_found(tmp_path: Path) -> None:
    write_model_folder(tmp_path, {**CONFIG, "head_dim": 8})
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    message = refusal(tmp_path)
    assert "self_attn.q_proj.weight has the shape [32, 16], config.json needs [16, 16]" in message
    assert "and 9 more of this folder" in message


def test_an_unexpected_tensor_is_named(tmp_path: Path) -> None:
    rewritten(tmp_path, lambda tensors: tensors.update({"model.layers.2.input_layernorm.weight": (16,)}))
    message = refusal(tmp_path)
    assert (
        "tensor model.layers.2.input_layernorm.weight is not part of a Qwen2ForCausalLM of 2 layers"
        in message
    )


@pytest.mark.parametrize("dtype", ["I64", "F8_E4M3"])
def test_a_tensor_that_is_not_in_a_floating_format_is_named(tmp_path: Path, dtype: str) -> None:
    rewritten(tmp_path, lambda tensors: None, dtype=dtype)
    assert f"has the format {dtype}; allowed: F64, F32, F16, BF16" in refusal(tmp_path)


def test_a_missing_expert_is_named(tmp_path: Path) -> None:
    tensors = write_model_folder(tmp_path, MOE)
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    write_safetensors(tmp_path / "model.safetensors", tensors)
    assert "tensor model.layers.1.mlp.experts.3.up_proj.weight [12, 16]" in refusal(tmp_path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / "model.safetensors").unlink()
    assert "has neither model.safetensors nor" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("tokenizer", "largest"),
    [
        ({"model": {"vocab": {"a": 0, "b": 60}}}, 60),
        ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": 61, "content": "<x>"}]}, 61),
        ({"model": {"type": "Unigram", "vocab": [["a", 0.0]] * 70}}, 69),
    ],
)
def test_a_tokenizer_with_more_ids_than_the_model_is_refused(
    tmp_path: Path, tokenizer: dict[str, Any], largest: int
) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    message = refusal(tmp_path)
    assert f"{tmp_path / 'tokenizer.json'} has the token id {largest}" in message
    assert "vocab_size=60" in message


def test_a_tokenizer_that_fits_or_is_of_another_format_passes(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG)
    check_model_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0, "b": 59}}}))
    check_model_folder(tmp_path)


def sentencepiece(pieces: int) -> bytes:
    """As sentencepiece writes it: a message per piece with text and score, then the trainer's settings."""
    piece = b"\x0a\x01a" + b"\x15\x00\x00\x80\xbf"
    return (b"\x0a" + bytes([len(piece)]) + piece) * pieces + b"\x12\xac\x02" + bytes(300)


@pytest.mark.parametrize(
    ("name", "largest_of"),
    [
        ("vocab.json", lambda largest: json.dumps({"a": 0, "b": largest}).encode()),
        ("added_tokens.json", lambda largest: json.dumps({"<x>": largest}).encode()),
        (
            "tokenizer_config.json",
            lambda largest: json.dumps({"added_tokens_decoder": {largest: {"content": "<x>"}}}).encode(),
        ),
        ("tokenizer.model", lambda largest: sentencepiece(largest + 1)),
        ("tokenizer.model", lambda largest: b"IQ== 0\nIg== %d\n" % largest),
    ],
)
def test_a_vocabulary_of_an_older_format_is_compared_as_well(
    tmp_path: Path, name: str, largest_of: Callable[[int], bytes]
) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / name).write_bytes(largest_of(59))
    check_model_folder(tmp_path)
    (tmp_path / name).write_bytes(largest_of(60))
    assert f"{tmp_path / name} has the token id 60" in refusal(tmp_path)
    # Where there is a tokenizer.json, transformers reads that one and none of these.
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": 0}}}))
    check_model_folder(tmp_path)


@pytest.mark.parametrize("kept", [1, 5, 700])
def test_a_cut_sentencepiece_model_is_named(tmp_path: Path, kept: int) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(50)[:kept])
    assert "tokenizer.model cannot be read as a tokenizer" in refusal(tmp_path)


def test_a_tokenizer_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    write_model_folder(tmp_path, CONFIG)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert "tokenizer.json cannot be read as a tokenizer" in refusal(tmp_path)
