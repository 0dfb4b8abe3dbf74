"""The real training command with one part broken on purpose.

    torchrun --nproc-per-node=1 tests/proof/train_broken.py --bug sign --config-dir tests/proof/conf \
        +experiment=megatron_40step_sync [key=value ...]

Exit codes as scripts/train_async_ppo.py: a broken variant that is noticed ends with 1.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(words: Sequence[str]) -> int:
    """Check the configuration like the real command, then run the job with the altered part."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")

    from alterations import ALTERATIONS

    from megatron_ppo.config.checks import derive
    from megatron_ppo.config.compose import parse_command_line
    from megatron_ppo.protocol.errors import ConfigError

    if len(words) < 2 or words[0] != "--bug" or words[1] not in ALTERATIONS:
        print(f"usage: train_broken.py --bug {{{','.join(ALTERATIONS)}}} +experiment=...", file=sys.stderr)
        return 2
    try:
        (config,) = parse_command_line(words[2:]).load()
        derived = derive(config)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2

    from megatron_ppo.app.job import run_job

    return run_job(config, derived, alter=ALTERATIONS[words[1]])


# Megatron's checkpoint writers start processes that import this file again.
if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
