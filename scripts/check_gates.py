"""Evaluate the gates of a run again: python scripts/check_gates.py RUN_DIR [--gates FILE]

Reads `gates` from the run's config.yaml (or from another YAML file) and its metrics.jsonl, prints the table.
Exit code: 0 all passed, 1 a gate failed or the run is not finished, 2 bad input.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.gate_check import check_run, print_results


def main() -> int:
    """Parse the command line, evaluate, print."""
    parser = argparse.ArgumentParser(description="Evaluate the gates of a run directory.")
    parser.add_argument("run_dir", type=Path, help="a run directory, outputs/<name>/<run id>")
    parser.add_argument("--gates", type=Path, help="YAML file with a `gates` section, instead of config.yaml")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        check = check_run(arguments.run_dir, gates_file=arguments.gates)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_results(check.results, sys.stdout)
    if check.unfinished is not None:
        print(f"NOT FINISHED: {check.unfinished}")
    return 0 if check.passed else 1


if __name__ == "__main__":
    sys.exit(main())
