"""What a checkpoint holds besides weights and prompts, so that it says what it is without the folder of its run.

Driven by `app.job` on rank 0, once the model folders are there; read once, so that a save does not depend on them.
`app.export` finds the files again by the names that are given here.
"""

from __future__ import annotations

from pathlib import Path

from megatron_ppo.mcore.hf_preflight import COMPANIONS
from megatron_ppo.telemetry.run_dir import RunDirectory

CONFIG_NAME = "config.yaml"
FILES = ("config.json", *COMPANIONS)


def model_files_in(checkpoint: Path, name: str) -> Path:
    """Folder with config.json and tokenizer of `policy` or `critic`; the critic may share the policy's."""
    own = checkpoint / "hf" / name
    return own if own.is_dir() else checkpoint / "hf" / "policy"


def read_companions(directory: RunDirectory, *, policy_folder: Path, critic_folder: Path) -> dict[str, bytes]:
    """Contents by path in the checkpoint. Raises: OSError for a file that cannot be read."""
    contents = {CONFIG_NAME: directory.config_path.read_bytes()}
    folders = {"policy": policy_folder}
    if critic_folder != policy_folder:
        folders["critic"] = critic_folder
    for name, folder in folders.items():
        for file in FILES:
            if (folder / file).is_file():
                contents[f"hf/{name}/{file}"] = (folder / file).read_bytes()
    return contents
