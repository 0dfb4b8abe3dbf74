"""Validation: which requests it makes, what it measures, and that it measures the step's own weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from megatron_ppo.loop.ports import Metrics
from megatron_ppo.loop.validation import FAILURES_LIMIT_S, EngineValidator
from megatron_ppo.protocol.errors import GenerationError, GroupMismatchError, NonFiniteError, ScoringError
from megatron_ppo.protocol.schedule import AsyncSchedule
from megatron_ppo.protocol.trajectory import Completion, Prompt, SamplingSettings, logprob_array, token_array
from megatron_ppo.testing.fakes import EOS_ID, FakePromptStream, FakeScorer, require, spans_of

SCHEDULE = AsyncSchedule(max_num_steps=10, policy_training_start_step=2)
PROMPTS = [FakePromptStream().prompt_at(ordinal) for ordinal in (3, 14, 159)]
GREEDY = SamplingSettings(temperature=0.0, max_new_tokens=4)


class Engines:
    """`BlockingGenerator` whose i-th response has i + 1 tokens; the last one is truncated."""

    def __init__(self, *versions: int) -> None:
        self.versions = versions
        self.calls: list[dict[str, Any]] = []

    def generate_many(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        sampling: SamplingSettings,
        seeds: Sequence[int],
        deadline_s: float,
    ) -> list[Completion]:
        require(len(seeds) == len(prompts), f"{len(seeds)} seeds for {len(prompts)} prompts")
        require(deadline_s > 0, f"deadline_s must be > 0, got {deadline_s}")
        self.calls.append({"prompts": list(prompts), "sampling": sampling, "seeds": list(seeds)})
        self.asked(deadline_s)
        return [self._complete(index, index == len(prompts) - 1) for index in range(len(prompts))]

    def asked(self, deadline_s: float) -> None:
        """Called for every request; may fail it."""

    def _complete(self, index: int, is_last: bool) -> Completion:
        version = self.versions[index % len(self.versions)]
        tokens = [5] * index + [6 if is_last else EOS_ID]
        return Completion(
            token_ids=token_array(tokens),
            logprobs=logprob_array([-1.0] * len(tokens)),
            finish_reason="length" if is_last else "stop",
            spans=spans_of([version] * len(tokens)),
        )


def on_rank_zero(what: str, function: Callable[[], Metrics]) -> Metrics:
    assert what == "validation after step 5"
    return function()


def validator(engines: Engines | None, **changes: Any) -> EngineValidator:
    settings: dict[str, Any] = {
        "prompts": PROMPTS,
        "scorer": FakeScorer(),
        "sampling": GREEDY,
        "expected_version": SCHEDULE.version_at,
        "seed": 100,
        "deadline_s": 30.0,
        "on_rank_zero": on_rank_zero,
    }
    return EngineValidator(engines=engines, **{**settings, **changes})


def test_every_held_out_prompt_gets_one_response_with_the_validations_own_settings() -> None:
    engines = Engines(3)
    metrics = validator(engines).run(step=5)
    assert engines.calls == [
        {"prompts": [p.token_ids for p in PROMPTS], "sampling": GREEDY, "seeds": [100, 101, 102]}
    ]
    assert metrics == {
        "validation/accuracy": 2 / 3,
        "validation/avg_length": 2.0,
        "validation/truncation_rate": 1 / 3,
        "validation/num_samples": 3.0,
        "validation/failed_generations": 0.0,
        "validation/failed_scores": 0.0,
    }


def test_each_response_is_scored_against_its_own_prompt() -> None:
    seen: list[tuple[int, int]] = []

    def reward_of(prompt: Prompt, response: Sequence[int]) -> float:
        seen.append((prompt.ordinal, len(response)))
        return 0.25

    assert validator(Engines(3), scorer=FakeScorer(reward_of)).run(step=5)["validation/accuracy"] == 0.25
    assert seen == [(3, 1), (14, 2), (159, 3)]


@pytest.mark.parametrize(
    ("versions", "seen"), [((2,), r"\[2\]"), ((3, 4), r"\[3, 4\]"), ((3, 3, 2), r"\[2, 3\]")]
)
def test_a_response_of_other_weights_is_an_error(versions: tuple[int, ...], seen: str) -> None:
    with pytest.raises(
        GroupMismatchError, match=f"after step 5 was sampled by weight versions {seen}, expected 3"
    ):
        validator(Engines(*versions)).run(step=5)


def test_a_reward_that_is_not_finite_is_an_error_with_the_prompts() -> None:
    scorer = FakeScorer(lambda prompt, _: float("nan") if prompt.ordinal == 14 else 1.0)
    with pytest.raises(
        NonFiniteError, match=r"validation after step 5: .*\[14\] is NaN or infinite"
    ) as caught:
        validator(Engines(3), scorer=scorer).run(step=5)
    assert caught.value.ordinals == (14,)


def test_a_response_that_cannot_be_scored_is_left_out_and_counted() -> None:
    def reward_of(prompt: Prompt, response: Sequence[int]) -> float:
        if prompt.ordinal == 14:
            raise ScoringError("took more than 60.0 s; its process was killed")
        return 0.5

    metrics = validator(Engines(3), scorer=FakeScorer(reward_of)).run(step=5)
    assert metrics["validation/accuracy"] == 0.5, "a failed score counts as a reward"
    assert (metrics["validation/failed_scores"], metrics["validation/num_samples"]) == (1.0, 3.0)
    assert metrics["validation/avg_length"] == 2.0


def test_a_reward_function_that_always_hangs_is_given_up_and_measures_nothing() -> None:
    now = [0.0]

    def hang(prompt: Prompt, response: Sequence[int]) -> float:
        now[0] += FAILURES_LIMIT_S / 2
        raise ScoringError("took more than 60.0 s; its process was killed")

    scorer = FakeScorer(hang)
    metrics = validator(Engines(3), scorer=scorer, clock=lambda: now[0]).run(step=5)
    assert scorer.num_calls == 2
    assert "validation/accuracy" not in metrics
    assert (metrics["validation/failed_scores"], metrics["validation/failed_generations"]) == (3.0, 0.0)


class FailingEngines(Engines):
    """Whose first `failures` calls fail, after `seconds` each."""

    def __init__(self, *versions: int, failures: int, seconds: float = 1.0) -> None:
        super().__init__(*versions)
        self.failures = failures
        self.seconds = seconds
        self.now = 0.0
        self.deadlines: list[float] = []

    def asked(self, deadline_s: float) -> None:
        self.deadlines.append(deadline_s)
        if len(self.calls) <= self.failures:
            self.now += self.seconds
            raise GenerationError("engine replica 0: 2 of 3 requests unfinished")


def test_a_generation_that_failed_once_is_the_same_at_the_second_attempt() -> None:
    engines = FailingEngines(3, failures=1)
    metrics = validator(engines, clock=lambda: engines.now).run(step=5)
    assert metrics["validation/accuracy"] == 2 / 3 and metrics["validation/failed_generations"] == 0.0
    assert engines.calls[0] == engines.calls[1]
    assert engines.deadlines == [30.0, 29.0], "both attempts share one deadline"


@pytest.mark.parametrize(("seconds", "calls"), [(1.0, 2), (30.0, 1)])
def test_a_generation_that_fails_for_good_leaves_the_validation_out(seconds: float, calls: int) -> None:
    engines = FailingEngines(3, failures=9, seconds=seconds)
    assert validator(engines, clock=lambda: engines.now).run(step=5) == {
        "validation/num_samples": 0.0,
        "validation/failed_generations": 3.0,
        "validation/failed_scores": 0.0,
    }
    assert len(engines.calls) == calls


def test_other_ranks_get_the_metrics_without_engines() -> None:
    told = {"validation/accuracy": 0.5}

    def another_rank(what: str, function: Callable[[], Metrics]) -> Metrics:
        return told

    assert validator(None, on_rank_zero=another_rank).run(step=5) == told
