"""From the command line to jobs. Checks every job before the first one starts.

Imports nothing heavy: bad input ends before torch, Ray, vLLM or Megatron are loaded.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import parse_command_line
from megatron_ppo.protocol.errors import ConfigError
from megatron_ppo.protocol.imports import no_garbage

BAD_INPUT = 2
# How long the other ranks leave rank 0 to say what is wrong. torchrun ends every rank as soon as the first one exits.
RANK_ZERO_SPEAKS_S = 20.0


def main(words: Sequence[str]) -> int:
    """Run the jobs of a command line, one after another; the exit code of the first that fails."""
    # One thread per process unless the user says otherwise: on a CPU, trainer and engine share the cores.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    try:
        jobs = [(config, derive(config)) for config in parse_command_line(words).load()]
    except ConfigError as error:
        return refuse(error)

    with no_garbage():
        from megatron_ppo.app.job import run_job

    for number, (config, derived) in enumerate(jobs, start=1):
        if len(jobs) > 1 and int(os.environ.get("RANK", "0")) == 0:
            print(f"job {number} of {len(jobs)}: {config.run.name}, run.seed={config.run.seed}", flush=True)
        if (code := run_job(config, derived)) != 0:
            return code
    return 0


def refuse(error: ConfigError) -> int:
    """Let one message reach the terminal, from whichever rank of the job gets there.

    Every rank finds the same fault, in any order. One that exits first makes torchrun end the others, so a silent exit
    would take rank 0 down before it has spoken.
    """
    rank = int(os.environ.get("RANK", "0"))
    if rank == 0:
        print(error, file=sys.stderr, flush=True)
        return BAD_INPUT
    time.sleep(RANK_ZERO_SPEAKS_S)
    print(f"rank {rank}: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT
