"""Other content under the same path of a model is noticed, the same content elsewhere is not."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from megatron_ppo.mcore import hf_digest
from megatron_ppo.mcore.hf_digest import ModelDigests, digest_model_folder
from tests.unit.hf_folder import write_model_folder

CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 96,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def digests(
    folder: Path, *, files: int = 1, tokenizer: str = '{"model": {}}', **changes: object
) -> ModelDigests:
    write_model_folder(folder, {**CONFIG, **changes}, files=files)
    (folder / "tokenizer.json").write_text(tokenizer)
    return digest_model_folder(folder)


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 1
    path.write_bytes(content)


def test_a_copy_a_move_and_another_division_into_files_are_the_same_model(tmp_path: Path) -> None:
    original = digests(tmp_path / "original")
    assert digests(tmp_path / "elsewhere") == original
    assert digests(tmp_path / "sharded", files=3) == original
    assert digests(tmp_path / "rewritten", transformers_version="99", _name_or_path="x") == original


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("block_bytes", [2**20, 1000])
def test_another_bit_anywhere_in_any_tensor_is_noticed(
    tmp_path: Path, files: int, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf_digest, "BLOCK_BYTES", block_bytes)
    original = digests(tmp_path, files=files)
    seen = {original}
    for path in sorted(tmp_path.glob("*.safetensors")):
        header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
        for entry in json.loads(path.read_bytes()[8 : 8 + header_bytes]).values():
            if "data_offsets" in entry:
                start, end = entry["data_offsets"]
                for position in (start, (start + end) // 2, end - 1):
                    flip(path, 8 + header_bytes + position)
                    changed = digest_model_folder(tmp_path)
                    flip(path, 8 + header_bytes + position)
                    assert (changed.config, changed.tokenizer) == (original.config, original.tokenizer)
                    assert changed not in seen
                    seen.add(changed)
    assert digest_model_folder(tmp_path) == original
    assert len(seen) > 30


def test_of_a_folder_that_is_too_large_every_tensor_is_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digests(tmp_path)
    path = tmp_path / "model.safetensors"
    header_bytes = int.from_bytes(path.read_bytes()[:8], "little")
    monkeypatch.setattr(hf_digest, "BLOCK_BYTES", 100)
    monkeypatch.setattr(hf_digest, "READ_WHOLE_BYTES", (path.stat().st_size - 8 - header_bytes) // 3 + 1)
    original = digest_model_folder(tmp_path)
    for entry in json.loads(path.read_bytes()[8 : 8 + header_bytes]).values():
        if "data_offsets" not in entry:
            continue
        start, end = entry["data_offsets"]
        last = (end - start - 1) // 100
        for block in {0, last // 2, last - last % 3, last}:
            flip(path, 8 + header_bytes + start + 100 * block)
            noticed = digest_model_folder(tmp_path) != original
            flip(path, 8 + header_bytes + start + 100 * block)
            assert noticed == (block % 3 == 0 or block == last)


def test_weights_are_read_once_and_again_when_a_file_was_touched_in_any_way(tmp_path: Path) -> None:
    folder, cache = tmp_path / "model", tmp_path / "digests.json"
    original = digests(folder, files=3)
    assert digest_model_folder(folder, cache=cache) == original
    kept = json.loads(cache.read_text())
    kept[str(folder)]["weights"] = "found in the file"
    cache.write_text(json.dumps(kept))
    assert digest_model_folder(folder, cache=cache).weights == "found in the file"

    path = sorted(folder.glob("*.safetensors"))[1]
    before = path.stat()
    time.sleep(0.02)  # file systems tell the time in steps
    flip(path, -1)  # in place: the same file, of the same size
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = digest_model_folder(folder, cache=cache)
    assert changed.weights not in (original.weights, "found in the file")
    assert changed == digest_model_folder(folder)

    digests(tmp_path / "other", files=1, rope_theta=500.0)
    digest_model_folder(tmp_path / "other", cache=cache)
    assert len(json.loads(cache.read_text())) == 2
    cache.write_text('{"torn')
    assert digest_model_folder(folder, cache=cache) == changed


def test_another_tokenizer_or_configuration_is_noticed_by_itself(tmp_path: Path) -> None:
    original = digests(tmp_path)
    tokenizer = digests(tmp_path, tokenizer='{"model": {"a": 0}}')
    assert tokenizer.tokenizer != original.tokenizer
    assert (tokenizer.config, tokenizer.weights) == (original.config, original.weights)
    config = digests(tmp_path, rope_theta=500.0)
    assert config.config != original.config
    assert (config.tokenizer, config.weights) == (original.tokenizer, original.weights)


def test_a_vocabulary_without_tokenizer_json_is_read_from_its_own_files(tmp_path: Path) -> None:
    digests(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    seen = {digest_model_folder(tmp_path).tokenizer}
    for content in ("{}", '{"a": 0}'):
        (tmp_path / "vocab.json").write_text(content)
        (tmp_path / "merges.txt").write_text("a b")
        seen.add(digest_model_folder(tmp_path).tokenizer)
    assert len(seen) == 3
