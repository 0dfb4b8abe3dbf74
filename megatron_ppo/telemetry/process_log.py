"""Owns file descriptors 1 and 2 of a process: what it and its libraries print goes to one log file.

The entry point of each process drives it: trainer ranks, and Ray actors before their heavy imports.
Third-party start-up noise is written by C code and by child processes too, so the descriptors are redirected
and not only `sys.stdout`.

Invariant: after `close` the process prints and logs exactly where it did before.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from pathlib import Path
from typing import TextIO

LOG_FORMAT = "%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s"


class SavedTerminal(io.TextIOWrapper):
    """The process's real stdout as a text stream; closing it undoes the redirection.

    Losing the last reference does not undo it, so that an actor may ignore the return value.
    """

    def __init__(
        self, *, stdout_copy: int, stderr_copy: int, log_file: int, log_path: Path, level: int
    ) -> None:
        super().__init__(
            io.FileIO(stdout_copy, "w"),
            encoding="utf-8",
            errors="replace",
            line_buffering=True,
            write_through=True,
        )
        self._saved = (stdout_copy, stderr_copy)
        self._streams = (sys.stdout, sys.stderr)
        self._restored = False
        os.dup2(log_file, 1)
        os.dup2(log_file, 2)
        sys.stdout, sys.stderr = _stream_on(1, sys.stdout), _stream_on(2, sys.stderr)
        root = logging.getLogger()
        self._root_handlers, self._root_level = list(root.handlers), root.level
        self._handler = logging.FileHandler(log_path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter(LOG_FORMAT))
        root.handlers[:] = [self._handler]
        root.setLevel(level)

    def close(self) -> None:
        """Point stdout, stderr and logging back at where they were. Harmless when repeated."""
        if not self._restored:
            self._restored = True
            self._restore()
        super().close()

    def __del__(self) -> None:
        # TextIOWrapper would call close here and undo the redirection behind the owner's back.
        return

    def _restore(self) -> None:
        root = logging.getLogger()
        if self._handler in root.handlers:
            root.handlers[:] = self._root_handlers
            root.setLevel(self._root_level)
        self._handler.close()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self.flush()
        sys.stdout, sys.stderr = self._streams
        stdout_copy, stderr_copy = self._saved
        os.dup2(stdout_copy, 1)
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def redirect_process_output(log_path: Path, *, level: int = logging.INFO) -> SavedTerminal:
    """Append everything that this process prints or logs to `log_path`; return the real stdout as a stream.

    Covers Python, C libraries and children that inherit descriptors 1 and 2. The returned stream is for the
    live display; close it before printing the last message to the terminal, also when the run fails.

    Args:
        log_path: created with its parents when missing, appended to otherwise.
        level: level of the root logger until the stream is closed.

    Raises: OSError when the file cannot be opened; nothing is redirected then.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    log_file = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        _flush_standard_streams()
        return SavedTerminal(
            stdout_copy=os.dup(1), stderr_copy=os.dup(2), log_file=log_file, log_path=log_path, level=level
        )
    finally:
        os.close(log_file)


def _flush_standard_streams() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


def _stream_on(descriptor: int, current: TextIO | None) -> TextIO:
    """`current` when it writes to `descriptor`, else a new stream; either way flushed at every line end."""
    if isinstance(current, io.TextIOWrapper):
        try:
            if current.fileno() == descriptor:
                current.reconfigure(line_buffering=True)
                return current
        except (OSError, ValueError):
            pass  # a captured or closed stream has no descriptor of its own
    return open(descriptor, "w", encoding="utf-8", errors="replace", buffering=1, closefd=False)
