"""The same-version probe: it compares every token of every replica after every publish, and hides nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.probe import Probe, ProbedRefit, sequences_of_run
from megatron_ppo.protocol.errors import GenerationError, RefitError
from megatron_ppo.testing.fakes import require

SEQUENCES = [[1, 4, 7, 2], [1, 9], [1, 3, 3, 3, 3]]
TOLERANCE = 1e-4


def logprob_of(token: int, position: int, version: int) -> float:
    """Nats; exact in float32, different for every token, position and version."""
    return -(token + position / 8 + version / 64)


class Learner:
    """A `Policy` of which the probe may use the log-probs at temperature 1 only."""

    def __init__(self) -> None:
        self.version = 0

    def logprobs(self, batch: TrainBatch, *, temperature: float | None = None) -> Tensor:
        require(temperature == 1.0, f"engines score at temperature 1, the learner at {temperature}")
        require(batch.length_B.tolist() == [len(s) for s in SEQUENCES], "other sequences than the engines'")
        logprobs_BT = torch.zeros(batch.token_ids_BT.shape)
        for row, tokens in enumerate(batch.token_ids_BT.tolist()):
            for position in range(1, len(tokens)):
                if batch.response_mask_BT[row, position]:
                    logprobs_BT[row, position] = logprob_of(tokens[position], position, self.version)
        return logprobs_BT


class World:
    """A refit and engines that agree with the learner, unless `spoil` changes what the engines answer."""

    def __init__(
        self,
        *,
        replicas: int = 2,
        spoil: Callable[[dict[int, list[list[float]]]], object] = lambda answer: None,
    ) -> None:
        self.learner = Learner()
        self.replicas = replicas
        self.spoil = spoil
        self.events: list[str] = []

    def push(self, *, version: int) -> Mapping[str, float]:
        self.events.append(f"push {version}")
        self.learner.version = version
        return {"refit/transfer_s": 0.5}

    def score(self, sequences: Sequence[Sequence[int]], *, deadline_s: float) -> dict[int, list[list[float]]]:
        self.events.append("score")
        require(deadline_s == 30.0, f"deadline_s is {deadline_s}")
        rows = [
            [
                logprob_of(token, position, self.learner.version)
                for position, token in enumerate(s)
                if position
            ]
            for s in sequences
        ]
        answer = {replica: [list(row) for row in rows] for replica in range(self.replicas)}
        self.spoil(answer)
        return answer

    def make_sequences(self) -> list[list[int]]:
        self.events.append("make")
        return SEQUENCES

    def probed(self, **changes: Any) -> ProbedRefit:
        settings: dict[str, Any] = {
            "refit": self,
            "policy": self.learner,
            "engines": self,
            "make_sequences": self.make_sequences,
            "tolerance_nats": TOLERANCE,
            "pad_token_id": 0,
            "deadline_s": 30.0,
            "on_rank_zero": lambda what, function: function(),
        }
        return ProbedRefit(**{**settings, **changes})


def test_engines_that_agree_pass_with_a_difference_of_zero() -> None:
    world = World()
    assert world.probed().push(version=3) == {
        "refit/transfer_s": 0.5,
        "probe/max_abs_logprob_diff_nats": 0.0,
    }


CHANGE = "probe/max_abs_logprob_change_nats"


def test_the_change_of_the_engines_answers_is_that_since_the_version_before() -> None:
    refit = World().probed()
    assert CHANGE not in refit.push(version=0)
    # Exact: every log-prob moves by 1/64 nat per version.
    assert [refit.push(version=version)[CHANGE] for version in (1, 3, 4)] == [1 / 64, 2 / 64, 1 / 64]


def test_a_publication_that_is_repeated_is_compared_with_the_version_before() -> None:
    refit = World().probed()
    refit.push(version=0)
    assert [refit.push(version=1)[CHANGE] for _ in range(3)] == [1 / 64] * 3
    assert refit.push(version=2)[CHANGE] == 1 / 64


def test_an_engine_that_keeps_its_answers_shows_as_a_change_of_zero() -> None:
    def keep_the_first(answer: dict[int, list[list[float]]]) -> None:
        answer[1] = [
            [logprob_of(token, position, version=0) for position, token in enumerate(s) if position]
            for s in SEQUENCES
        ]

    # Replica 0 moves; what counts is the one that moves least.
    refit = World(spoil=keep_the_first).probed(tolerance_nats=None)
    assert [refit.push(version=version).get(CHANGE) for version in (0, 1, 2)] == [None, 0.0, 0.0]


def test_a_replica_that_was_away_is_compared_with_one_that_served() -> None:
    world = World()
    refit = world.probed()
    refit.push(version=0)
    world.spoil = lambda answer: answer.pop(1)
    assert refit.push(version=1)[CHANGE] == 1 / 64
    world.spoil = lambda answer: None
    assert refit.push(version=2)[CHANGE] == 1 / 64


def test_sequences_are_made_once_after_the_first_publish_and_scored_after_each() -> None:
    world = World()
    refit = world.probed()
    for version in (0, 1, 2):
        refit.push(version=version)
    assert world.events == ["push 0", "make", "score", "push 1", "score", "push 2", "score"]


@pytest.mark.parametrize("replica", [0, 1])
@pytest.mark.parametrize(("row", "position"), [(0, 0), (0, 2), (1, 0), (2, 3)])
def test_one_token_of_one_replica_is_enough(replica: int, row: int, position: int) -> None:
    def spoil(answer: dict[int, list[list[float]]]) -> None:
        answer[replica][row][position] += 0.125

    with pytest.raises(
        RefitError,
        match=rf"version 4 differ between learner and engine replica {replica}: log-probs of probe sequence {row} "
        r"differ by 1\.25e-01 nats, refit\.probe_tolerance_nats allows 0\.0001",
    ):
        World(spoil=spoil).probed().push(version=4)


def shift(nats: float) -> Callable[[list[list[list[float]]]], None]:
    def spoil(answer: dict[int, list[list[float]]]) -> None:
        answer[1][0][1] += nats

    return spoil


@pytest.mark.parametrize(
    ("nats", "tolerance", "passes"),
    [
        (0.125, 0.125, True),
        (0.125, 0.1249, False),
        (-0.125, 0.1249, False),
        (0.0, 0.0, True),
        (0.125, 0.0, False),
        (0.125, None, True),
        (math.nan, TOLERANCE, False),
        (math.nan, None, False),
    ],
)
def test_the_tolerance_is_inclusive_and_zero_is_a_tolerance(
    nats: float, tolerance: float | None, passes: bool
) -> None:
    refit = World(spoil=shift(nats)).probed(tolerance_nats=tolerance)
    if passes:
        assert refit.push(version=1)["probe/max_abs_logprob_diff_nats"] == nats
    else:
        with pytest.raises(RefitError, match="differ by"):
            refit.push(version=1)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda answer: answer[1][2].pop(), r"replica 1 returned \[3, 1, 3\] .*expected \[3, 1, 4\]"),
        (lambda answer: answer[0].pop(), r"replica 0 returned \[3, 1\]"),
        (lambda answer: answer[0][1].append(-1.0), r"replica 0 returned \[3, 2, 4\]"),
        (lambda answer: answer.clear(), "compares nothing: 0 replicas"),
    ],
)
def test_an_answer_with_gaps_does_not_pass(
    spoil: Callable[[dict[int, list[list[float]]]], object], message: str
) -> None:
    with pytest.raises(RefitError, match=message):
        World(spoil=spoil).probed().push(version=1)


@pytest.mark.parametrize("sequences", [[], [[1]]])
def test_nothing_to_compare_is_an_error(sequences: list[list[int]]) -> None:
    with pytest.raises(RefitError, match="compares nothing"):
        World().probed(make_sequences=lambda: sequences).push(version=1)


@pytest.mark.parametrize("failing", ["score", "make_sequences"])
def test_engines_that_give_no_answer_are_a_failed_publication_on_every_rank(failing: str) -> None:
    """Which is tried again, over a fresh group, and at last ends a run that is saved."""
    world = World()

    def fail(*_: object, **__: object) -> list[list[int]]:
        raise GenerationError("engine replica 1: 2 of 3 requests unfinished after 600.0 s")

    before = getattr(world, failing)
    setattr(world, failing, fail)
    heard: list[Probe] = []

    def rank_zero(what: str, function: Callable[[], Probe]) -> Probe:
        heard.append(function())
        return heard[-1]

    message = r"probe of version 4: no answer: engine replica 1: 2 of 3 requests unfinished"
    refit = world.probed(on_rank_zero=rank_zero)
    with pytest.raises(RefitError, match=message):
        refit.push(version=4)
    other = World().probed(engines=None, make_sequences=None, on_rank_zero=lambda what, function: heard[0])
    with pytest.raises(RefitError, match=message):
        other.push(version=4)

    setattr(world, failing, before)
    if failing == "score":  # the sequences are those that were made
        assert refit.push(version=4)["probe/max_abs_logprob_diff_nats"] == 0.0


def test_a_refit_that_fails_is_not_probed() -> None:
    world = World()

    class Fails:
        def push(self, *, version: int) -> Mapping[str, float]:
            raise RefitError("engine 0 kept the old weights")

    with pytest.raises(RefitError, match="kept the old weights"):
        world.probed(refit=Fails()).push(version=1)
    assert world.events == []


def test_other_ranks_compare_with_what_rank_zero_heard() -> None:
    world = World()
    heard: list[Probe] = []

    def rank_zero(what: str, function: Callable[[], Probe]) -> Probe:
        assert what == "same-version probe of version 1"
        heard.append(function())
        return heard[-1]

    world.probed(on_rank_zero=rank_zero).push(version=1)
    other = World()
    refit = other.probed(engines=None, make_sequences=None, on_rank_zero=lambda what, function: heard[0])
    assert refit.push(version=1)["probe/max_abs_logprob_diff_nats"] == 0.0
    other.learner.version = 2
    late = other.probed(refit=Unchanged(), engines=None, on_rank_zero=lambda what, function: heard[0])
    with pytest.raises(RefitError, match="replica 0"):
        late.push(version=2)


class Unchanged:
    """A `Refit` that leaves the learner alone."""

    def push(self, *, version: int) -> Mapping[str, float]:
        return {}


def test_a_resumed_run_is_probed_with_the_sequences_that_it_began_with(tmp_path: Path) -> None:
    path = tmp_path / "probe_sequences.json"

    def never() -> list[list[int]]:
        raise AssertionError("made again")

    first = sequences_of_run(path, count=3, longest=5, make=lambda: [list(s) for s in SEQUENCES])
    assert first == SEQUENCES
    assert sequences_of_run(path, count=3, longest=5, make=never) == SEQUENCES
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    ["", "{", "7", "[[1, 2], [1, 3]]", "[[1, 2], [1, 3], [1]]", "[[1, 2], [1, 3], [1, 2, 3, 4, 5, 6]]",
     "[[1, 2], [1, 3], [1, -4]]", "[[1, 2], [1, 3], [1, true]]", "[[1, 2], [1, 3], 5]"],
)  # fmt: skip
def test_a_file_that_holds_no_usable_sequences_is_replaced(tmp_path: Path, content: str) -> None:
    path = tmp_path / "probe_sequences.json"
    path.write_text(content)
    made = sequences_of_run(path, count=3, longest=5, make=lambda: [list(s) for s in SEQUENCES])
    assert made == SEQUENCES
    assert sequences_of_run(path, count=3, longest=5, make=list) == SEQUENCES
