"""Where a run is, live or dead: python scripts/status.py RUN_DIR [--json]

Reads the run's files only. Exit code: 0 the run is running, stopped or finished, 1 it failed, died or a process of it
gives no sign of life, 2 bad input.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path

from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.telemetry.run_status import Life, format_status, read_status


def main() -> int:
    """Parse the command line, read, print."""
    parser = argparse.ArgumentParser(description="Show where a run is.")
    parser.add_argument("run_dir", type=Path, help="a run directory, outputs/<name>/<run id>")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    arguments = parser.parse_args()
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        status = read_status(arguments.run_dir, now_unix_s=time.time())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(json.dumps(status.as_json(), indent=2) if arguments.json else format_status(status))
    return 0 if status.life in (Life.RUNNING, Life.STOPPED, Life.FINISHED) and not status.silent else 1


if __name__ == "__main__":
    sys.exit(main())
