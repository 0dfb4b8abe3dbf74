"""Writes the resolved configuration of every experiment to golden/, after a change that was intended.

Command: PYTHONPATH=. python tests/unit/config/write_golden.py
"""

from __future__ import annotations

from pathlib import Path

import yaml

from megatron_ppo.config.compose import group_choices, load

GOLDEN = Path(__file__).parent / "golden"


def golden_text(experiment: str) -> str:
    """The resolved configuration as YAML, every key spelled out."""
    return yaml.safe_dump(load([f"+experiment={experiment}"]).resolved(), sort_keys=False, allow_unicode=True)


if __name__ == "__main__":
    for name in group_choices("experiment"):
        (GOLDEN / f"{name}.yaml").write_text(golden_text(name), encoding="utf-8")
