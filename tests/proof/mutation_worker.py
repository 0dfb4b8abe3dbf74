"""Runs pytest on a copy of the package, again and again, in forks of one process that has torch loaded already.

    cd COPY && python -B mutation_worker.py

Reads one JSON list of pytest arguments a line, answers each with pytest's exit code and the path of its output.
Nothing of the package is imported here, so every fork sees the files as they are then.
"""

from __future__ import annotations

import json
import os
import sys

import pytest
import torch

torch.set_num_threads(1)


def run_in_fork(arguments: list[str], output_path: str) -> int:
    """pytest's exit code; 70 if it ended without one."""
    pid = os.fork()
    if pid == 0:
        code = 70
        try:
            descriptor = os.open(output_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(descriptor, 1)
            os.dup2(descriptor, 2)
            code = int(pytest.main(arguments))
            sys.stdout.flush()
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def main() -> None:
    """Serve until the input ends."""
    sys.path.insert(0, os.getcwd())
    for number, line in enumerate(sys.stdin):
        output_path = os.path.abspath(f"pytest.{number}.out")
        code = run_in_fork(json.loads(line), output_path)
        print(json.dumps([code, output_path]), flush=True)


if __name__ == "__main__":
    main()
