"""Turn a NeMo-RL style PPO configuration into an experiment file of ours.

Command: python scripts/convert_config.py THEIRS.yaml > conf/experiment/NAME.yaml

The overlay goes to standard output; keys without a counterpart are listed on standard error. Choose data and
model by hand, then check the result with scripts/check_config.py. Exit 2 when the file cannot be read.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from megatron_ppo.config.convert import convert

BAD_INPUT = 2


def main() -> int:
    """Convert one file; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, help="YAML file with the reference's keys")
    file: Path = parser.parse_args().file
    try:
        # OmegaConf and not plain YAML: it reads 1e-6 as a number and resolves interpolations.
        theirs = OmegaConf.to_container(OmegaConf.load(file), resolve=True)
    except (OSError, yaml.YAMLError, OmegaConfBaseException) as error:
        print(f"{file}: cannot be read: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    if not isinstance(theirs, dict):
        print(f"{file}: must hold a mapping, got {type(theirs).__name__}", file=sys.stderr)
        return BAD_INPUT
    conversion = convert({str(key): value for key, value in theirs.items()})
    name = file.stem.replace(" ", "_")
    print("# @package _global_")
    print(f"# Command: torchrun --nproc-per-node=1 scripts/train_async_ppo.py +experiment={name} data=… \\")
    print(f"#          (converted from {file.name})")
    conversion.values.setdefault("run", {}).setdefault("name", name)
    print(yaml.safe_dump(conversion.values, sort_keys=False, allow_unicode=True), end="")
    for key, reason in conversion.unmapped.items():
        print(f"not mapped: {key}: {reason}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
