"""Where the initial weights come from. Imports no Megatron: the folder is needed before the models are built."""

from __future__ import annotations

from pathlib import Path

from megatron_ppo.config.model_sections import ModelSource
from megatron_ppo.config.targets import build
from megatron_ppo.mcore.hf_preflight import check_model_folder
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.warm_start.cache import prepare


def model_folder(source: ModelSource, *, cache_dir: Path, timeout_s: float) -> Path:
    """The folder with the initial weights; prepared from the recipe if there is no path. Rank 0 only.

    Raises: ConfigError for a folder whose weights are torn, incomplete or of another model, from their headers alone.
    """
    if source.path is not None:
        folder = Path(source.path).resolve()
        check_model_folder(folder)
        return folder
    if source.recipe is None:
        raise ConfigError(
            "policy.model: exactly one of policy.model.path and policy.model.recipe must be set"
        )
    folder = prepare(build(source.recipe), cache_dir, timeout_s=timeout_s)
    check_model_folder(folder)
    return folder
