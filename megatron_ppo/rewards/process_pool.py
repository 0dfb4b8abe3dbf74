"""Reward functions in processes that can be killed.

Owns the scoring processes. Driven by the collector's scoring threads and, for validation, by the learner.
Invariant: a call returns one reward per response or raises within its deadline; a process that hung or died is gone
before the call ends, and the next call starts another.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import megatron_ppo
from megatron_ppo.protocol.errors import ConfigError, ScoringError
from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.worker import prompt_as_json

logger = logging.getLogger(__name__)

START_LIMIT_S = 60.0
"""For an interpreter and the verifier's imports and files, on a loaded machine."""
_CHUNK_BYTES = 1 << 16


class _ProcessLostError(Exception):
    """The process did not answer in time, or ended."""


class ScorerProcess:
    """One scoring process, started when it is first needed and again after it was killed. One call at a time.

    Args:
        target, kwargs: as of `build_scorer`.
    """

    def __init__(self, *, target: str, kwargs: Mapping[str, Any]) -> None:
        self._spec = {"target": target, "kwargs": dict(kwargs)}
        self._process: subprocess.Popen[bytes] | None = None
        self._closed = False
        self._busy = threading.Lock()  # held during a call
        self._spawning = threading.Lock()  # so that `close` misses no process
        self._unread = b""

    @property
    def pid(self) -> int | None:
        """Of the running process, None when there is none."""
        process = self._process
        return None if process is None else process.pid

    def start(self) -> None:
        """Start the process unless it runs.

        The kernel ends it together with the *thread* that calls this, as with the process.

        Raises: ConfigError when the verifier cannot be built; ScoringError when the process cannot be started.
        """
        with self._busy:
            self._start()

    def score(self, prompt: Prompt, responses: Sequence[Sequence[int]], *, deadline_s: float) -> list[float]:
        """Rewards in reward units, one per response.

        Args:
            deadline_s: for the whole group, without the start of a process.
        Raises: ScoringError when the function raised, hung or ended its process; ConfigError as `start`.
        """
        request = {"prompt": prompt_as_json(prompt), "responses": [list(ids) for ids in responses]}
        with self._busy:
            self._start()
            try:
                answer = self._exchange(request, deadline_s)
            except _ProcessLostError as error:
                self._discard()
                raise ScoringError(f"scoring of prompt ordinal {prompt.ordinal} {error}") from error
        if "error" in answer:
            raise ScoringError(f"scoring of prompt ordinal {prompt.ordinal} raised {answer['error']}")
        rewards: list[float] = answer["rewards"]
        return rewards

    def close(self) -> None:
        """Kill the process for good, also under a running call, which then raises. Harmless when repeated."""
        with self._spawning:
            self._closed = True
            process = self._process
        if process is not None:
            _kill(process)
        with self._busy:  # the call has met the end of the pipe
            self._discard()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._discard()
        self._spawn()
        try:
            answer = self._exchange(self._spec, START_LIMIT_S)
        except _ProcessLostError as error:
            self._discard()
            raise ScoringError(f"the start of {self._spec['target']} {error}") from error
        if "error" in answer:
            self._discard()
            raise ConfigError(f"the scoring process cannot build the verifier: {answer['error']}")

    def _discard(self) -> None:
        """Kill the process with everything that it started."""
        process, self._process, self._unread = self._process, None, b""
        if process is None:
            return
        _kill(process)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()

    def _spawn(self) -> None:
        root = str(Path(megatron_ppo.__file__).resolve().parents[1])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        with self._spawning:
            if self._closed:
                raise ScoringError("no reward function is run any more: the run stops")
            self._process = subprocess.Popen(
                # -P: the working directory is not searched for modules.
                [sys.executable, "-P", "-m", "megatron_ppo.rewards.worker", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                start_new_session=True,
            )
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)

    def _exchange(self, message: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """Send one line and wait for one line, both under the limit, because a stopped process reads nothing."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + limit_s
        left = memoryview((json.dumps(message) + "\n").encode())
        try:
            while left:
                _wait(process.stdin.fileno(), select.POLLOUT, deadline, limit_s)
                left = left[os.write(process.stdin.fileno(), left[:_CHUNK_BYTES]) :]
            while b"\n" not in self._unread:
                _wait(process.stdout.fileno(), select.POLLIN, deadline, limit_s)
                received = os.read(process.stdout.fileno(), _CHUNK_BYTES)
                if not received:
                    raise BrokenPipeError
                self._unread += received
        except OSError as error:
            raise _ProcessLostError(f"ended its process ({_fate(process)})") from error
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


class ScorerPool:
    """A fixed number of scoring processes for as many threads.

    Args:
        processes: how many groups can be scored at once.   The others: see `ScorerProcess`.
    """

    def __init__(self, *, target: str, kwargs: Mapping[str, Any], processes: int) -> None:
        if processes < 1:
            raise ValueError(f"processes must be >= 1, got {processes}")
        self._all = [ScorerProcess(target=target, kwargs=kwargs) for _ in range(processes)]
        # The last one used comes first: its caches are warm, and the others may never have to start.
        self._idle: queue.LifoQueue[ScorerProcess] = queue.LifoQueue()
        for process in reversed(self._all):
            self._idle.put(process)

    @property
    def pids(self) -> tuple[int, ...]:
        """Of the running processes."""
        return tuple(process.pid for process in self._all if process.pid is not None)

    def start(self) -> None:
        """Start the first process, which proves that the verifier can be built. Raises: as `ScorerProcess.start`."""
        self._all[0].start()

    def score(self, prompt: Prompt, responses: Sequence[Sequence[int]], *, deadline_s: float) -> list[float]:
        """See `ScorerProcess.score`; waits for an idle process first, which is not part of the deadline."""
        process = self._idle.get()
        try:
            return process.score(prompt, responses, deadline_s=deadline_s)
        finally:
            self._idle.put(process)

    def close(self) -> None:
        """Kill all processes for good."""
        for process in self._all:
            process.close()


class IsolatedScorer:
    """A `Scorer` whose work happens in a process that is killed at the deadline; for one caller.

    Args:
        deadline_s: of one response.   max_retries: further attempts after a failed one, in a new process if needed.
    """

    def __init__(
        self, *, target: str, kwargs: Mapping[str, Any], deadline_s: float, max_retries: int = 1
    ) -> None:
        self._process = ScorerProcess(target=target, kwargs=kwargs)
        self._deadline_s = deadline_s
        self._max_retries = max_retries

    def __call__(self, prompt: Prompt, response_token_ids: Sequence[int]) -> float:
        """See `Scorer`. Raises: ScoringError after the last attempt."""
        for attempt in range(self._max_retries + 1):
            try:
                return self._process.score(prompt, [response_token_ids], deadline_s=self._deadline_s)[0]
            except ScoringError as error:
                if attempt == self._max_retries:
                    raise
                logger.warning("attempt %d failed, retrying: %s", attempt + 1, error)
        raise AssertionError("unreachable: the last attempt returns or raises")

    def close(self) -> None:
        """Kill the process."""
        self._process.close()


def _wait(descriptor: int, events: int, deadline: float, limit_s: float) -> None:
    poll = select.poll()
    poll.register(descriptor, events)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise _ProcessLostError(f"took more than {limit_s:.1f} s; its process was killed")


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # otherwise its number may be another's
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # the session that it leads


def _fate(process: subprocess.Popen[bytes]) -> str:
    try:
        code = process.wait(timeout=1.0)
    except subprocess.TimeoutExpired:
        return "it closed its pipe"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
