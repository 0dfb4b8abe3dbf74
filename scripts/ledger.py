"""Where every prompt of a run is: python scripts/ledger.py RUN_DIR explain ORDINAL | summary | pending

Reads the run's ledger.jsonl; works while the run is going on and after it died.
Exit code: 0, or 2 for bad input (no such run, an ordinal that never moved, a damaged file).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_ppo.protocol.errors import CheckpointError, ConfigError
from megatron_ppo.replay.ledger_report import explain, ledger_path, pending, summary


def main() -> int:
    """Parse the command line, read, print."""
    parser = argparse.ArgumentParser(description="Where every prompt of a run is.")
    parser.add_argument("run_dir", type=Path, help="a run directory, outputs/<name>/<run id>")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("explain", help="every move of one prompt").add_argument("ordinal", type=int)
    commands.add_parser("summary", help="attempts, prompts per stage, reasons")
    commands.add_parser("pending", help="prompts that are neither trained nor dropped")
    arguments = parser.parse_args()
    try:
        for line in _answer(arguments):
            print(line)
    except (CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _answer(arguments: argparse.Namespace) -> Iterator[str]:
    path = ledger_path(arguments.run_dir)
    if arguments.command == "explain":
        return explain(path, arguments.ordinal)
    return summary(path) if arguments.command == "summary" else pending(path)


if __name__ == "__main__":
    sys.exit(main())
