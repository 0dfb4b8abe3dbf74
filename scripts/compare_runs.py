"""Whether two runs did the same, bit for bit: python scripts/compare_runs.py RUN_DIR RUN_DIR

Compares the metrics that are functions of configuration and step, and the content of the checkpoints that both hold.
Meant for runs with `run.deterministic`. Exit code: 0 equal, 1 they differ, 2 bad input.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_comparison import compare_runs

SHOWN = 20


def main() -> int:
    """Parse the command line, compare, print."""
    parser = argparse.ArgumentParser(description="Compare two runs bit for bit.")
    parser.add_argument("first", type=Path, help="a run directory, outputs/<name>/<run id>")
    parser.add_argument("second", type=Path, help="another one")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        comparison = compare_runs(arguments.first, arguments.second)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for line in comparison.findings[:SHOWN]:
        print(line)
    if len(comparison.findings) > SHOWN:
        print(f"... and {len(comparison.findings) - SHOWN} more")
    verdict = "differ" if comparison.findings else "are equal"
    print(
        f"the runs {verdict}: {comparison.num_values} metrics in {comparison.num_rows} rows, "
        f"{comparison.num_files} files of checkpoints {', '.join(comparison.checkpoints) or '(none in common)'}"
    )
    return 1 if comparison.findings else 0


if __name__ == "__main__":
    sys.exit(main())
