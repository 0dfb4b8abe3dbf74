"""Write docs/configuration.md and the default file of every config group from the schema.

Command: python scripts/make_config_docs.py [--check]

The schema is the only place where a key is declared and described. `--check` writes nothing and exits 1 when
a file is out of date.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron_ppo.config.reference import generated_files  # noqa: E402


def main() -> int:
    """Write or compare; returns the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", action="store_true", help="compare only; exit 1 when a file is out of date"
    )
    check = parser.parse_args().check
    stale = []
    for name, text in generated_files(ROOT / "conf").items():
        path = ROOT / name
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(name)
        if not check:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    for name in stale:
        print(f"{'out of date' if check else 'wrote'}: {name}")
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
