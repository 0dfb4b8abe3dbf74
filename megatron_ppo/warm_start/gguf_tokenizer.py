"""The tokenizer inside a GGUF file, written as a Hugging Face tokenizer folder.

Only for byte-level BPE with the `smollm` pre-tokenizer (digits one by one), which SmolLM2 uses.
"""

from __future__ import annotations

import json
from pathlib import Path

from gguf import GGUFReader
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from megatron_ppo.protocol.errors import ConfigError

# Token type of control tokens in GGUF (`gguf.TokenType.CONTROL`).
_CONTROL = 3


def field_value(reader: GGUFReader, key: str) -> object:
    """Contents of a metadata field. Raises: ConfigError if the file lacks it."""
    field = reader.fields.get(key)
    if field is None:
        raise ConfigError(f"the GGUF file has no field {key!r}; is it a model of another kind?")
    contents: object = field.contents()
    return contents


def save_gguf_tokenizer(reader: GGUFReader, folder: Path, *, context_length: int) -> None:
    """Write tokenizer.json and tokenizer_config.json.

    Raises: ConfigError for another kind of tokenizer.
    """
    for key, expected in (("tokenizer.ggml.model", "gpt2"), ("tokenizer.ggml.pre", "smollm")):
        if field_value(reader, key) != expected:
            raise ConfigError(f"{key} must be {expected!r}, got {field_value(reader, key)!r}")
    tokens = _strings(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in _strings(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = field_value(reader, "tokenizer.ggml.token_type")
    assert isinstance(kinds, list)
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": field_value(reader, "tokenizer.ggml.add_bos_token"),
        "model_max_length": context_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": field_value(reader, "tokenizer.chat_template"),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        settings[f"{name}_token"] = tokens[_integer(reader, f"tokenizer.ggml.{key}_token_id")]
    text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def _strings(reader: GGUFReader, key: str) -> list[str]:
    value = field_value(reader, key)
    if not isinstance(value, list):
        raise ConfigError(f"{key} must be a list of strings, got {type(value).__name__}")
    return value


def _integer(reader: GGUFReader, key: str) -> int:
    value = field_value(reader, key)
    if not isinstance(value, int):
        raise ConfigError(f"{key} must be an integer, got {value!r}")
    return value
