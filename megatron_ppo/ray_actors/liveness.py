"""Tells an engine that hangs from one that is busy: whether its core still answers, by questions with a deadline.

Driven by the keeper's threads, one `Silence` per replica, whether it serves, has no weights yet or finishes its
requests for a refit: the core answers between two of its steps. In the transfer itself it does not, since its workers
wait for the sender; limits of the refit's own apply there. Imports no Ray. Invariant: an engine that has answered one
of its last questions in time is never called silent.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from megatron_ppo.protocol.replicas import Member

logger = logging.getLogger(__name__)

_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LivenessLimits:
    """What an engine is allowed.

    Attributes:
        deadline_s: longest wait for one answer.
        misses: unanswered questions in a row after which it hangs. Several, because the one who asks may have been
            held up himself: each of them is asked afresh.
    """

    deadline_s: float
    misses: int


class Question(Protocol):
    """One question that is on its way."""

    @property
    def answered(self) -> bool:
        """Whether there is an answer, an error included: what has failed is not silent; its death is told elsewhere."""
        ...


class Silence:
    """The questions to one replica.

    Args:
        ask: asks the engine's core, and every worker of it.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        *,
        limits: LivenessLimits,
        ask: Callable[[Member], Question],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._limits = limits
        self._ask = ask
        self._clock = clock
        self._member: Member | None = None
        self._question: Question | None = None
        self._asked_at = 0.0
        self._missed = 0

    def forget(self) -> None:
        """The replica is not expected to answer, so that what it has not answered so far does not count."""
        self._member = self._question = None
        self._missed = 0

    def look(self, member: Member) -> str | None:
        """Called while `member` should answer, a few times per deadline. Returns: why it hangs, if it does."""
        now = self._clock()
        if member != self._member:
            self.forget()
            self._member = member
            self._put(member, now)
        elif self._question is None:
            if now - self._asked_at >= min(_PERIOD_S, self._limits.deadline_s):
                self._put(member, now)
        elif self._question.answered:
            self._question = None
            self._missed = 0
        elif now - self._asked_at > self._limits.deadline_s:
            self._missed += 1
            silent = f"its core has left {self._missed} questions unanswered for {self._limits.deadline_s:.0f} s each"
            if self._missed >= self._limits.misses:
                self.forget()
                return f"it hangs: {silent}"
            logger.warning("%s: %s", member, silent)
            self._put(member, now)
        return None

    def _put(self, member: Member, now: float) -> None:
        self._question = self._ask(member)
        self._asked_at = now
