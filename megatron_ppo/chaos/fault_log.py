"""Owns `faults.jsonl`: every injected fault, written before it happens by whichever process injects it.

Invariant: a line is whole or absent, also when several processes write and when one of them is killed by the fault.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from megatron_ppo.protocol.faults import FaultKind


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultLog:
    """The file of one run; a resumed run goes on with it. May be pickled into another process."""

    path: Path

    def append(self, kind: FaultKind, *event: int) -> None:
        """A fault of `kind` is about to happen at `event`, see `FaultKind`."""
        record = {"time_unix_s": time.time(), "kind": kind.value, "event": list(event)}
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, (json.dumps(record) + "\n").encode())
        finally:
            os.close(descriptor)

    def counts(self) -> Counter[FaultKind]:
        """How many faults of each kind were injected so far."""
        if not self.path.exists():
            return Counter()
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return Counter(FaultKind(json.loads(line)["kind"]) for line in lines)


class Attempts:
    """Numbers the attempts of the same thing, until one succeeds."""

    def __init__(self) -> None:
        self._made: Counter[int] = Counter()

    def next(self, key: int) -> int:
        """The number of this attempt, counted from 0."""
        self._made[key] += 1
        return self._made[key] - 1

    def succeeded(self, key: int) -> None:
        """Begin anew with `key`."""
        del self._made[key]
