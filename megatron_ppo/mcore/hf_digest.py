"""Short digests of what a Hugging Face model folder holds, to notice that other content came under the same path.

Standard library only; driven by the app at the start of a run. Reads a few kilobytes per tensor instead of all
weights, so a folder of any size takes well under a second per thousand tensors.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.mcore.hf_preflight import read_header, tensor_files
from megatron_ppo.protocol.errors import ConfigError

SAMPLE_BYTES = 4096
"""Read of the beginning of each tensor. Training changes nearly every element, so other weights differ here; a change
of a few elements elsewhere in a tensor is not seen."""
_DIGITS = 16
# A newer transformers writes these anew without changing the model.
_CONFIG_IGNORED = frozenset({"transformers_version", "_name_or_path"})
# The first format that is there: tokenizer.json holds what the others do.
_TOKENIZER_FORMATS = (
    ("tokenizer.json",),
    ("tokenizer.model",),
    ("vocab.json", "merges.txt"),
    ("vocab.txt",),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDigests:
    """16 hex digits each.

    Attributes:
        config: config.json without what describes its writer.   tokenizer: its vocabulary and rules.
        weights: names, shapes, formats and the first 4 KiB of every tensor, however they are spread over files.
    """

    config: str
    tokenizer: str
    weights: str


def digest_model_folder(folder: Path) -> ModelDigests:
    """Digests of a folder that `check_model_folder` accepts. Raises: ConfigError for one that it would refuse."""
    return ModelDigests(
        config=_config(folder / "config.json"), tokenizer=_tokenizer(folder), weights=_weights(folder)
    )


def _config(path: Path) -> str:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as a model configuration: {error!r}") from error
    kept = {key: value for key, value in content.items() if key not in _CONFIG_IGNORED}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:_DIGITS]


def _tokenizer(folder: Path) -> str:
    digest = hashlib.sha256()
    for names in _TOKENIZER_FORMATS:
        if all((folder / name).is_file() for name in names):
            for name in names:
                digest.update(name.encode() + b"\0" + (folder / name).read_bytes())
            break
    return digest.hexdigest()[:_DIGITS]


def _weights(folder: Path) -> str:
    digest = hashlib.sha256()
    file_of = tensor_files(folder)
    headers = {name: read_header(folder / name) for name in set(file_of.values())}
    for tensor, name in sorted(file_of.items()):
        header = headers[name][tensor]
        digest.update(f"{tensor} {header.dtype} {header.shape}\0".encode())
        with (folder / name).open("rb") as file:
            data = 8 + int.from_bytes(file.read(8), "little")
            file.seek(data + header.start)
            digest.update(file.read(min(SAMPLE_BYTES, header.end - header.start)))
    return digest.hexdigest()[:_DIGITS]
