"""Compose, validate and explain a configuration, on any machine and without starting anything.

Command: python scripts/check_config.py +experiment=megatron_40step [key=value …] [-m] [--world-size N]
         [--show]

Prints what follows from the configuration for N trainer ranks, and the memory that it needs; --show adds every key. A
model folder that is not on this machine is taken to be as its `expected` section says.
Exit 2 and one message on bad input.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import yaml

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import parse_command_line
from megatron_ppo.config.memory import memory_rows
from megatron_ppo.config.schema import RunConfig
from megatron_ppo.protocol.errors import ConfigError

BAD_INPUT = 2


def main(words: list[str]) -> int:
    """Check every job; returns the exit status."""
    try:
        words, world_size = _take_world_size(words)
        show = "--show" in words
        configs = parse_command_line([word for word in words if word != "--show"]).load()
        for config in configs:
            _explain(config, world_size, show)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    return 0


def _take_world_size(words: list[str]) -> tuple[list[str], int | None]:
    if "--world-size" not in words:
        return words, None
    place = words.index("--world-size")
    text = "".join(words[place + 1 : place + 2])
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"--world-size: got {text!r}; must be a whole number >= 1")
    return words[:place] + words[place + 2 :], int(text)


def _explain(config: RunConfig, world_size: int | None, show: bool) -> None:
    derived = derive(config, world_size, folders_may_be_absent=True)
    if show:
        print(yaml.safe_dump(config.resolved(), sort_keys=False, allow_unicode=True))
    print(f"{config.run.name}: the configuration is valid")
    rows = [*derived.rows(), *memory_rows(config, derived)]
    width = max(len(name) for name, _ in rows)
    for name, value in rows:
        print(f"  {name:<{width}}  {value}")
    for warning in derived.warnings:
        print(f"  warning: {warning}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
