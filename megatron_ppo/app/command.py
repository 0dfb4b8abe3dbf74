"""From the command line to jobs. Checks every job before the first one starts.

Imports nothing heavy: bad input ends before torch, Ray, vLLM or Megatron are loaded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import parse_command_line
from megatron_ppo.protocol.errors import ConfigError

BAD_INPUT = 2


def main(words: Sequence[str]) -> int:
    """Run the jobs of a command line, one after another; the exit code of the first that fails."""
    # One thread per process unless the user says otherwise: on a CPU, trainer and engine share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        jobs = [(config, derive(config)) for config in parse_command_line(words).load()]
    except ConfigError as error:
        if int(os.environ.get("RANK", "0")) == 0:
            print(error, file=sys.stderr, flush=True)
        return BAD_INPUT

    from megatron_ppo.app.job import run_job

    for number, (config, derived) in enumerate(jobs, start=1):
        if len(jobs) > 1 and int(os.environ.get("RANK", "0")) == 0:
            print(f"job {number} of {len(jobs)}: {config.run.name}, run.seed={config.run.seed}", flush=True)
        if (code := run_job(config, derived)) != 0:
            return code
    return 0
