"""Looks through a Hugging Face model folder before anything starts, without reading a weight.

A safetensors file begins with the length of its header (8 bytes, little endian) and the header (JSON: dtype, shape
and byte range of every tensor), so a whole folder is checked against its config.json in milliseconds. Standard
library only; driven by the config check and, once a prepared folder exists, by the application.

Invariant: a folder that passes has every tensor of its model, each complete, in a floating-point format and of the
right shape, and no tensor whose weights would be silently left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from megatron_ppo.mcore.hf_config import HFModelConfig, read_hf_config
from megatron_ppo.mcore.hf_map import expected_tensors
from megatron_ppo.protocol.errors import ConfigError

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# What a model folder holds besides weights and config.json; whichever of them the initial model has go with a copy.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
# Constants that older versions of transformers saved with the weights.
_IGNORABLE = re.compile(r".*\.(rotary_emb\.inv_freq|self_attn\.(bias|masked_bias))")
# The format's own limit.
_LARGEST_HEADER_BYTES = 100_000_000
_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHeader:
    """What a safetensors header says about a tensor; `start` and `end` are byte offsets into the data."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def check_model_folder(folder: str | Path) -> HFModelConfig:
    """Read config.json, the headers of all weights and the tokenizer's vocabulary.

    Returns: the mapped config.json.
    Raises: ConfigError that names file and tensor of what is missing, torn, of a wrong shape or format, unexpected,
        or beyond the vocabulary.
    """
    folder = Path(folder)
    model = read_hf_config(folder)
    file_of = tensor_files(folder)
    headers = {name: _header_if_there(folder / name) for name in sorted(set(file_of.values()))}
    problems = [problem for problem in headers.values() if isinstance(problem, str)]
    readable = {name: header for name, header in headers.items() if not isinstance(header, str)}
    problems += _tensor_problems(folder, model, file_of, readable)
    if problems:
        more = [f"... and {len(problems) - _SHOWN} more of this folder"] if len(problems) > _SHOWN else []
        raise ConfigError("\n".join(problems[:_SHOWN] + more))
    check_vocabulary(folder, model.vocab_size)
    return model


def tensor_files(folder: Path) -> dict[str, str]:
    """The file of every tensor, from the index or from the single file's header.

    Raises: ConfigError if there is neither, or if the one there is cannot be read.
    """
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        return _read_index(index)
    if single.is_file():
        return dict.fromkeys(read_header(single), SINGLE)
    raise ConfigError(f"model folder {folder} has neither {SINGLE} nor {INDEX}")


def _read_index(index: Path) -> dict[str, str]:
    try:
        files = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not files or not all(isinstance(x, str) for pair in files.items() for x in pair):
            raise ValueError("weight_map must map names of tensors to names of files")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} cannot be read as an index of tensors: {error!r}") from error
    outside = sorted({file for file in files.values() if Path(file).name != file})
    if outside:
        raise ConfigError(f"{index} names {outside[0]!r}, which is not a file of this folder")
    return dict(files)


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Tensors of one safetensors file. Raises: ConfigError if the file is not one, or ends too early."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= min(size - 8, _LARGEST_HEADER_BYTES):
            raise ConfigError(
                f"{path} is no complete safetensors file: it has {size} bytes and its header should have {length}"
            )
        raw = file.read(length)
    try:
        entries = json.loads(raw)
        headers = {name: _entry(entry) for name, entry in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path}: the safetensors header cannot be read: {error!r}") from error
    for name, header in headers.items():
        if header.end > size - 8 - length:
            raise ConfigError(
                f"{path} is truncated: tensor {name} ends at byte {8 + length + header.end}, the file has {size}"
            )
    return headers


def _entry(entry: Mapping[str, object]) -> TensorHeader:
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError(f"shape and data_offsets must be lists, got {entry}")
    return TensorHeader(
        dtype=str(entry["dtype"]), shape=tuple(map(int, shape)), start=int(offsets[0]), end=int(offsets[1])
    )


def _header_if_there(path: Path) -> dict[str, TensorHeader] | str:
    if not path.is_file():
        return f"{path.parent / INDEX} names {path.name}, which is not in the folder"
    try:
        return read_header(path)
    except ConfigError as error:
        return str(error)


def _tensor_problems(
    folder: Path,
    model: HFModelConfig,
    file_of: Mapping[str, str],
    headers: Mapping[str, Mapping[str, TensorHeader]],
) -> Iterator[str]:
    expected = expected_tensors(model, value_head=model.has_value_head)
    for name, shape in expected.items():
        if name not in file_of:
            if not _may_be_absent(name, model):
                yield f"model folder {folder}: tensor {name} {list(shape)} of {model.architecture} is missing"
        elif file_of[name] in headers:
            yield from _header_problems(folder / file_of[name], name, shape, headers[file_of[name]])
    for name, file in file_of.items():
        if name not in expected and not _ignorable(name, model):
            yield (
                f"{folder / file}: tensor {name} is not part of a {model.architecture} of "
                f"{model.num_layers} layers"
            )


def _header_problems(
    path: Path, name: str, shape: tuple[int, ...], headers: Mapping[str, TensorHeader]
) -> Iterator[str]:
    header = headers.get(name)
    if header is None:
        yield f"{path}: tensor {name} is missing, although {INDEX} says that it is in this file"
    elif header.dtype not in _BYTES:
        yield f"{path}: tensor {name} has the format {header.dtype}; allowed: {', '.join(_BYTES)}"
    elif header.shape != shape:
        yield f"{path}: tensor {name} has the shape {list(header.shape)}, config.json needs {list(shape)}"
    elif header.end - header.start != prod(shape) * _BYTES[header.dtype]:
        yield (
            f"{path}: tensor {name} has {header.end - header.start} bytes, its shape and format need "
            f"{prod(shape) * _BYTES[header.dtype]}"
        )


def _may_be_absent(name: str, model: HFModelConfig) -> bool:
    # ...ForSequenceClassification has a head without a bias.
    return name == "score.bias" and model.has_value_head


def _ignorable(name: str, model: HFModelConfig) -> bool:
    # Some writers store tied embeddings twice; transformers ignores the second copy too.
    tied_copy = name == "lm_head.weight" and (model.tied or model.has_value_head)
    return tied_copy or _IGNORABLE.fullmatch(name) is not None


def check_vocabulary(folder: Path, vocab_size: int) -> None:
    """Every id of the folder's tokenizer must have a row in the embedding.

    Read from tokenizer.json, or where that is absent from the older formats' files: vocab.json, tokenizer.model
    (SentencePiece or tiktoken) and the ids added to either. A folder without any of them passes: the run then finds no
    tokenizer.

    Raises: ConfigError with the largest id, or for a file that cannot be read.
    """
    readers = _VOCABULARIES if not (folder / _TOKENIZER).is_file() else {_TOKENIZER: _tokenizer_ids}
    for name, ids_of in readers.items():
        path = folder / name
        if not path.is_file():
            continue
        try:
            largest = max(map(int, ids_of(path.read_bytes())), default=0)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise ConfigError(f"{path} cannot be read as a tokenizer: {error!r}") from error
        if largest >= vocab_size:
            raise ConfigError(
                f"{path} has the token id {largest}; the model's vocabulary in {folder / 'config.json'} has "
                f"vocab_size={vocab_size}, so ids must be <= {vocab_size - 1}"
            )


def _tokenizer_ids(raw: bytes) -> Iterator[int]:
    content = json.loads(raw)
    vocabulary = content["model"].get("vocab", {})
    yield from vocabulary.values() if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    yield from (token["id"] for token in content.get("added_tokens", []))


def _ids_by_token(raw: bytes) -> Iterator[int]:
    yield from json.loads(raw).values()


def _configured_ids(raw: bytes) -> Iterator[int]:
    yield from map(int, json.loads(raw).get("added_tokens_decoder", {}))


def _model_ids(raw: bytes) -> Iterator[int]:
    """SentencePiece: one id per piece, the messages in field 1 of a protocol buffer (sentencepiece_model.proto).
    tiktoken uses the same name for lines of text, each a token and its id.
    """
    if not raw.startswith(_FIRST_PIECE):
        yield from (int(line.split()[1]) for line in raw.splitlines())
        return
    position, pieces = 0, 0
    while position < len(raw):
        tag, position = _varint(raw, position)
        if tag & 7 != _LENGTH_DELIMITED:
            raise ValueError(f"byte {position} begins no message of a SentencePiece model")
        length, position = _varint(raw, position)
        position += length
        pieces += tag >> 3 == 1
    if position > len(raw) or not pieces:
        raise ValueError(f"{pieces} pieces, and {position} bytes instead of {len(raw)}")
    yield pieces - 1


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    """A protocol buffer's number that begins at `position`, and the position after it."""
    value = shift = 0
    while True:
        byte = raw[position]
        value |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return value, position


_TOKENIZER, _LENGTH_DELIMITED, _FIRST_PIECE = "tokenizer.json", 2, b"\x0a"
_VOCABULARIES: dict[str, Callable[[bytes], Iterator[int]]] = {
    "vocab.json": _ids_by_token,
    "tokenizer.model": _model_ids,
    "added_tokens.json": _ids_by_token,
    "tokenizer_config.json": _configured_ids,
}
