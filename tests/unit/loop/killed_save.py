"""Ends the process's life at a chosen file operation, through the interpreter's own audit events.

So the code under test needs no seam, and no operation is forgotten: whatever opens, renames, creates or deletes
something is an event before it happens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

OPERATIONS = frozenset({"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"})


class Killed(BaseException):
    """The process is gone: nothing of the package may catch it."""


class FileOperations:
    """Counts file operations inside `killing_at`; an audit hook can be added, but never removed."""

    def __init__(self) -> None:
        self._installed = False
        self._armed = False
        self._left = 0
        self.last: str | None = None

    @contextmanager
    def killing_at(self, index: int) -> Iterator[None]:
        """Let `index` operations of the block happen, and raise Killed instead of the next."""
        if not self._installed:
            sys.addaudithook(self._audit)
            self._installed = True
        self._left, self._armed = index, True
        try:
            yield
        finally:
            self._armed = False

    def _audit(self, event: str, arguments: tuple[object, ...]) -> None:
        if not self._armed or event not in OPERATIONS:
            return
        self.last = f"{event} {arguments[:2]}"
        if self._left == 0:
            self._armed = False  # the dead do nothing more
            raise Killed(self.last)
        self._left -= 1


FILE_OPERATIONS = FileOperations()
