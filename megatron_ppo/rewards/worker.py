"""The process that runs an untrusted or slow reward function: python -m megatron_ppo.rewards.worker PARENT_PID

Driven by `process_pool.ScorerProcess` over two pipes, one JSON object per line: first the verifier to build, then
one request per group. Invariant: it never outlives the process that started it, whatever the reward function does, and
goes on after a signal that asks the run to end.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from array import array
from collections.abc import Mapping
from typing import Any, TextIO

from megatron_ppo.protocol.ports import Scorer
from megatron_ppo.protocol.signals import ignore_ending_signals
from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.build import build_scorer

_PR_SET_PDEATHSIG = 1


def prompt_as_json(prompt: Prompt) -> dict[str, object]:
    """Fields of `prompt` as JSON values; `prompt_from_json` undoes it."""
    return {
        "ordinal": prompt.ordinal,
        "token_ids": list(prompt.token_ids),
        "text": prompt.text,
        "answer": prompt.answer,
        "metadata": dict(prompt.metadata),
    }


def prompt_from_json(fields: Mapping[str, Any]) -> Prompt:
    """The prompt that `prompt_as_json` wrote."""
    return Prompt(**{**fields, "token_ids": array("i", fields["token_ids"])})


def main(arguments: list[str]) -> None:
    """Serve requests until the pipe closes."""
    ignore_ending_signals()
    _die_with(int(arguments[0]))
    # What the reward function prints must not end in the answers: it goes where stderr goes, into the log.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    scorer = _build(sys.stdin.readline(), answers)
    if scorer is None:
        return
    for line in sys.stdin:
        _answer(answers, _scored(scorer, json.loads(line)))


def _die_with(parent: int) -> None:
    """Let the kernel kill this process with its parent; no thread of Python runs while the function holds the GIL."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _build(line: str, answers: TextIO) -> Scorer | None:
    if not line:  # closed before it was used
        return None
    spec = json.loads(line)
    try:
        scorer = build_scorer(spec["target"], spec["kwargs"])
    except Exception as error:  # the border of the process: told to the parent, which raises
        traceback.print_exc()
        _answer(answers, {"error": f"{type(error).__name__}: {error}"})
        return None
    _answer(answers, {"ready": True})
    return scorer


def _scored(scorer: Scorer, request: Mapping[str, Any]) -> dict[str, object]:
    try:
        prompt = prompt_from_json(request["prompt"])
        return {"rewards": [float(scorer(prompt, array("i", ids))) for ids in request["responses"]]}
    except Exception as error:  # the border of the process: told to the parent, which raises
        traceback.print_exc()
        return {"error": f"{type(error).__name__}: {error}"}


def _answer(answers: TextIO, message: Mapping[str, object]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
