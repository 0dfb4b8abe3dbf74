"""A reward function that misbehaves on purpose, in the process that scores. Tests name it as a target."""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from megatron_ppo.protocol.trajectory import Prompt

Trouble = Literal["hang", "crash", "raise", "exit", "noise", "child"]


class Troublesome:
    """The reward is the number of response tokens, except for one prompt.

    Args:
        trouble: hang inside C code that no Python thread or signal handler interrupts; end by a signal; raise;
            leave by `exit`; print to standard output; start a child process that goes on for ever, then hang.
        ordinal: the prompt that it happens to.
        once: a file that is made when it happens, after which it does not happen again; empty is always.
    """

    def __init__(self, *, trouble: Trouble, ordinal: int, once: str = "") -> None:
        self._trouble = trouble
        self._ordinal = ordinal
        self._once = once

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """See `Scorer`."""
        if prompt.ordinal == self._ordinal and not (self._once and Path(self._once).exists()):
            if self._once:
                Path(self._once).touch()
            self._misbehave()
        return float(len(response_token_ids))

    def _misbehave(self) -> None:
        match self._trouble:
            case "hang":
                re.match(
                    r"(a+)+$", "a" * 200 + "b"
                )  # exponential time, without letting go of the interpreter
            case "crash":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "raise":
                raise KeyError("no answer in the metadata")
            case "exit":
                raise SystemExit(3)
            case "noise":
                os.write(1, b'{"rewards": [7.0]}\n')
            case "child":
                child = subprocess.Popen(["sleep", "1000"])
                Path(f"{self._once}.child").write_text(str(child.pid), encoding="utf-8")
                child.wait()
