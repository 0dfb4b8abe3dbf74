"""Runs a script of `scripts/` as a user does, or in this process.

A new interpreter takes a quarter of a second before the script does anything. One call of each script has one, which
shows that the script starts by itself; the others look at what it answers.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def run_script(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`scripts/NAME.py` in a new interpreter."""
    return subprocess.run(
        [sys.executable, str(SCRIPTS / f"{name}.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=SCRIPTS.parent,
        env={**os.environ, "PYTHONPATH": str(SCRIPTS.parent)},
    )


def run_script_here(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`scripts/NAME.py` in this process, with streams, log handlers and import path of its own."""
    path = str(SCRIPTS / f"{name}.py")
    out, err = io.StringIO(), io.StringIO()
    root = logging.getLogger()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [path, *arguments])
        patch.setattr(sys, "path", [str(SCRIPTS), *sys.path])
        # Of the script alone, so that its `basicConfig` writes what it would write.
        patch.setattr(root, "handlers", [])
        patch.setattr(root, "level", logging.WARNING)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                runpy.run_path(path, run_name="__main__")
                code: object = 0
            except SystemExit as end:
                code = end.code
    assert code is None or isinstance(code, int), code
    return subprocess.CompletedProcess([path, *arguments], code or 0, out.getvalue(), err.getvalue())
