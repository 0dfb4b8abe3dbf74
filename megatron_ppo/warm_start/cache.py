"""The model cache: each recipe is built once per machine, however many processes ask for it.

Driven by trainer ranks, tests and `scripts/prepare_model.py`. Invariant: a folder under its final name is
complete; it appears by one rename, under a lock, and its files are checked against its manifest on reuse.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from pathlib import Path

from filelock import FileLock, Timeout

from megatron_ppo.protocol.errors import CheckpointError, WaitTimeoutError
from megatron_ppo.warm_start.recipe import Recipe, WarmStartRecipe

MANIFEST = "manifest.json"
PREPARE_TIMEOUT_S = 900.0
_WAIT_MESSAGE_EVERY_S = 10.0
_READ_BYTES = 1 << 20

logger = logging.getLogger(__name__)


def prepared_path(recipe: Recipe, cache_dir: str | Path) -> Path:
    """Where `prepare` puts the model of this recipe, whether or not it is there yet."""
    return Path(cache_dir).expanduser().absolute() / f"{recipe.label}-{recipe.cache_key()}"


def prepare(recipe: Recipe, cache_dir: str | Path, *, timeout_s: float = PREPARE_TIMEOUT_S) -> Path:
    """A Hugging Face model folder (weights, config, tokenizer) of `recipe`; built unless it is cached.

    Concurrent callers wait for the one that builds. A damaged folder is rebuilt.

    Raises: WaitTimeoutError if another process holds the lock for `timeout_s`; ConfigError if the recipe
        cannot be built here.
    """
    folder = prepared_path(recipe, cache_dir)
    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    _acquire(lock, folder, timeout_s)
    try:
        if folder.exists():
            problem = damage(folder)
            if problem is None:
                return folder
            logger.warning("rebuilding %s: %s", folder, problem)
            shutil.rmtree(folder)
        partial = folder.with_name(folder.name + ".partial")
        # Left behind by a builder that was killed; the lock says that nobody is writing it now.
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        started = time.monotonic()
        logger.info("preparing the model %s", folder)
        facts = _build(recipe, partial)
        _write_manifest(partial, recipe, facts)
        os.replace(partial, folder)
        logger.info("prepared %s in %.0f s", folder.name, time.monotonic() - started)
        return folder
    finally:
        lock.release()


def damage(folder: Path) -> str | None:
    """What is wrong with a prepared folder, or None. Compares every file with the manifest's SHA-256."""
    try:
        files: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"no readable {MANIFEST} ({error})"
    for name, expected in files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if file_digest(path) != expected:
            return f"{name} differs from its recorded SHA-256"
    return None


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def read_facts(folder: str | Path) -> dict[str, float]:
    """What the builder measured (loss, accuracy, seconds), from the manifest of a prepared folder.

    Raises: CheckpointError if the folder has no manifest.
    """
    path = Path(folder) / MANIFEST
    try:
        facts: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))["measured"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} is not the manifest of a prepared model: {error}") from error
    return facts


def _acquire(lock: FileLock, folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            lock.acquire(timeout=max(0.0, min(_WAIT_MESSAGE_EVERY_S, left)))
            return
        except Timeout:
            if left <= 0:
                raise WaitTimeoutError(
                    f"waited {timeout_s:.0f} s for another process to prepare the model {folder.name}; "
                    f"it holds {lock.lock_file}"
                ) from None
            logger.info("waiting for another process to prepare the model %s", folder.name)


def _build(recipe: Recipe, folder: Path) -> dict[str, float]:
    # The builders import torch and transformers, which a cache hit does not need.
    if isinstance(recipe, WarmStartRecipe):
        from megatron_ppo.warm_start.sft import build_sft_model

        return build_sft_model(recipe, folder)
    from megatron_ppo.warm_start.smollm2 import build_smollm2

    return build_smollm2(recipe, folder)


def _write_manifest(folder: Path, recipe: Recipe, measured: dict[str, float]) -> None:
    files = {path.name: file_digest(path) for path in sorted(folder.iterdir()) if path.is_file()}
    manifest = {"recipe": dataclasses.asdict(recipe), "measured": measured, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
