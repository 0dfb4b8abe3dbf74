"""Who hangs, and who is merely slow, by a clock that the tests move."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from megatron_ppo.protocol.replicas import Member
from megatron_ppo.ray_actors.liveness import LivenessLimits, Silence

FIRST, SECOND = Member(replica=0, deaths=0), Member(replica=0, deaths=1)


@dataclass
class Asked:
    at: float
    answered: bool = False


@dataclass
class Engine:
    """Asked by a `Silence`, at times that the test chooses."""

    deadline_s: float = 10.0
    misses: int = 3
    now: float = 0.0
    questions: list[Asked] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = LivenessLimits(deadline_s=self.deadline_s, misses=self.misses)
        self.silence = Silence(limits=limits, ask=self._ask, clock=lambda: self.now)

    def _ask(self, member: Member) -> Asked:
        self.questions.append(Asked(self.now))
        return self.questions[-1]

    def answer(self) -> None:
        for question in self.questions:
            question.answered = True

    def look_until(self, when: float, *, member: Member = FIRST, every: float = 0.5) -> str | None:
        """The first cause that a look gives, with looks up to `when`."""
        while self.now < when:
            self.now += every
            if (cause := self.silence.look(member)) is not None:
                return cause
        return None


def test_an_engine_that_answers_is_asked_every_five_seconds_and_never_called_silent() -> None:
    engine = Engine()
    while engine.now < 100.0:
        assert engine.look_until(engine.now + 1.0) is None
        engine.answer()
    assert 15 <= len(engine.questions) <= 21


@pytest.mark.parametrize("misses", [1, 2, 3])
def test_an_engine_that_never_answers_hangs_after_so_many_deadlines_and_is_asked_afresh(misses: int) -> None:
    engine = Engine(misses=misses)
    cause = engine.look_until(1000.0)
    assert cause == f"it hangs: its core has left {misses} questions unanswered for 10 s each"
    assert misses * 10.0 < engine.now <= misses * 11.0 + 1.0
    assert len(engine.questions) == misses


def test_an_answer_just_before_the_last_deadline_begins_the_count_anew() -> None:
    engine = Engine()
    engine.look_until(30.0)
    assert len(engine.questions) == 3
    engine.answer()
    assert engine.look_until(60.0) is None
    assert engine.look_until(1000.0) is not None
    assert 60.0 < engine.now < 66.0


def test_one_who_was_held_up_himself_asks_again_before_he_judges() -> None:
    """A suspended machine: all questions are overdue at once, and the engine had no time either."""
    engine = Engine()
    engine.look_until(1.0)
    engine.now += 3600.0
    assert engine.silence.look(FIRST) is None
    engine.answer()
    assert engine.look_until(engine.now + 60.0) is not None, "it hangs for good now"


def test_what_was_not_answered_during_a_refit_or_in_a_former_life_does_not_count() -> None:
    engine = Engine()
    assert engine.look_until(28.0) is None
    engine.silence.forget()
    assert engine.look_until(28.0 + 28.0) is None
    assert engine.look_until(28.0 + 28.0 + 28.0, member=SECOND) is None
    assert engine.look_until(1000.0, member=SECOND) is not None
    assert engine.now < 120.0


def test_in_random_histories_it_hangs_exactly_when_it_was_silent_for_long() -> None:
    hung = 0
    for seed in range(300):
        rng = random.Random(seed)
        engine = Engine(deadline_s=rng.uniform(1.0, 30.0), misses=rng.randint(1, 4))
        answered_at = 0.0
        for _ in range(400):
            engine.now += rng.uniform(0.1, 0.6)
            if engine.silence.look(FIRST) is not None:
                assert engine.now - answered_at > engine.deadline_s * engine.misses
                hung += 1
                break
            if rng.random() < 1.0 / (2.0 * engine.deadline_s):
                engine.answer()
                answered_at = engine.now
            # Its period, and one late look per question.
            assert engine.now - answered_at < (engine.deadline_s + 0.7) * engine.misses + 5.0 + 1.3
    assert 100 < hung < 300, "or the histories were all of one kind"
