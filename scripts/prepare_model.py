"""Prepare a model to start from, and print its folder.

    python scripts/prepare_model.py sort3_5
    python scripts/prepare_model.py sort3_5 --set sft_seed=1 --set sft_steps=400
    python scripts/prepare_model.py smollm2_135m --cache-dir /data/models

A model that is cached already is checked and reused. Exits with 2 on bad input.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron_ppo.protocol.errors import ConfigError, MegatronPPOError
from megatron_ppo.warm_start.cache import prepare, read_facts
from megatron_ppo.warm_start.recipe import RECIPES, Recipe, override

# The default of cluster.model_cache_dir, so that a run finds what was prepared here.
DEFAULT_CACHE_DIR = Path("~/.cache/megatron_ppo/models")


def main() -> int:
    """Command line entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", help=f"one of: {', '.join(RECIPES)}")
    parser.add_argument("--cache-dir", type=Path, default=DEFAULT_CACHE_DIR, help="default: %(default)s")
    parser.add_argument("--set", metavar="FIELD=VALUE", action="append", default=[], dest="overrides")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        recipe = _named(arguments.recipe)
        for assignment in arguments.overrides:
            recipe = override(recipe, assignment)
        folder = prepare(recipe, arguments.cache_dir)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except MegatronPPOError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for name, value in {**dataclasses.asdict(recipe), **read_facts(folder)}.items():
        print(f"{name:>28} {value}", file=sys.stderr)
    print(folder)
    return 0


def _named(name: str) -> Recipe:
    if name not in RECIPES:
        raise ConfigError(f"recipe {name!r} is unknown; known: {', '.join(RECIPES)}")
    return RECIPES[name]


if __name__ == "__main__":
    sys.exit(main())
