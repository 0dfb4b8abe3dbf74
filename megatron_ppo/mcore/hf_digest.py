"""Short digests of what a Hugging Face model folder holds, to notice that other content came under the same path.

Driven by the app at the start of a run. All weights are read, once per run: what was found is kept, together with what
the file system says of the files, and a restart of the run looks at that only. Invariant: what is kept is used for no
file that was written, replaced or touched since.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.mcore.hf_preflight import TensorHeader, read_header, tensor_files
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_dir import write_json_atomically

logger = logging.getLogger(__name__)

READ_WHOLE_BYTES = 32 * 2**30
"""Larger folders are read in blocks that are spread evenly over every tensor, about this much of them."""
BLOCK_BYTES = 2**20
_THREADS = 4
_DIGITS = 16
_METHOD = "SHA-256 of every tensor"
"""Of the digests that are kept; another one makes them void."""
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
        weights: names, shapes, formats and content of every tensor, however they are spread over files.
    """

    config: str
    tokenizer: str
    weights: str


def digest_model_folder(folder: Path, *, cache: Path | None = None) -> ModelDigests:
    """Digests of a folder that `check_model_folder` accepts.

    Args:
        cache: file in which the digest of the weights is kept; None reads the weights every time.
    Raises: ConfigError for a folder that `check_model_folder` would refuse.
    """
    return ModelDigests(
        config=_config(folder / "config.json"),
        tokenizer=_tokenizer(folder),
        weights=_weights(folder) if cache is None else _weights_once(folder, cache),
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


def _weights_once(folder: Path, cache: Path) -> str:
    key, state = str(folder.resolve()), _state_of_files(folder)
    known = _read_cache(cache)
    entry = known.get(key)
    if isinstance(entry, dict) and (entry.get("method"), entry.get("files")) == (_METHOD, state):
        weights = entry.get("weights")
        if isinstance(weights, str):
            return weights
    weights = _weights(folder)
    write_json_atomically(cache, {**known, key: {"method": _METHOD, "files": state, "weights": weights}})
    return weights


def _read_cache(cache: Path) -> dict[str, object]:
    """By model folder; empty where it cannot be read, since everything in it can be found again."""
    try:
        content = json.loads(cache.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _state_of_files(folder: Path) -> dict[str, list[int]]:
    """Changes with every write, replacement or move of a file, also of one that gives it its old time back."""
    found = {name: (folder / name).stat() for name in sorted(set(tensor_files(folder).values()))}
    return {name: [at.st_size, at.st_mtime_ns, at.st_ctime_ns, at.st_ino] for name, at in found.items()}


def _weights(folder: Path) -> str:
    file_of = tensor_files(folder)
    headers = {name: read_header(folder / name) for name in set(file_of.values())}
    spans = {tensor: headers[name][tensor] for tensor, name in sorted(file_of.items())}
    total = sum(span.end - span.start for span in spans.values())
    stride = -(-total // READ_WHOLE_BYTES) or 1
    started = time.monotonic()
    digest = hashlib.sha256()
    # Threads, because hashing lets go of the interpreter lock.
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="model-digest") as pool:
        contents = pool.map(
            lambda tensor: _content(folder / file_of[tensor], spans[tensor], stride=stride), spans
        )
        for (tensor, span), content in zip(spans.items(), contents, strict=True):
            digest.update(f"{tensor} {span.dtype} {span.shape}\0".encode() + content)
    logger.info(
        "read %.2f GiB of weights in %s in %.1f s", total / stride / 2**30, folder, time.monotonic() - started
    )
    return digest.hexdigest()[:_DIGITS]


def _content(path: Path, span: TensorHeader, *, stride: int) -> bytes:
    """Digest of every `stride`-th block of a tensor, and of the last one."""
    digest = hashlib.sha256()
    last = (span.end - span.start - 1) // BLOCK_BYTES
    with path.open("rb") as file:
        data = 8 + int.from_bytes(file.read(8), "little")
        for block in range(last + 1):
            if block % stride and block != last:
                continue
            begin = span.start + block * BLOCK_BYTES
            file.seek(data + begin)
            digest.update(file.read(min(BLOCK_BYTES, span.end - begin)))
    return digest.digest()
