"""Examine this machine and environment: python scripts/doctor.py

Exit code: 0 when everything required is there (warnings included), 1 when something is missing.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_ppo.telemetry.doctor import Status, examine, format_report

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Examine, print, judge."""
    checks = examine(
        requirements_dir=ROOT / "requirements",
        write_dirs=(Path("outputs"), Path.home() / ".cache"),
    )
    print(format_report(checks))
    return 1 if any(check.status is Status.MISSING for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
