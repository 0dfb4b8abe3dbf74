"""The same-version probe: after each publish, engine and learner score the same tokens with the same weights.

Everything that can go silently wrong between the two (a tensor that did not arrive, a stale tied head, a stale
cache, another rope) shows up here as a difference of log-probs, without any staleness mixed in. Two that never move
would agree as well, so it also says how far the engine's answers have moved since the version before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from megatron_ppo.data.batch import TrainBatch
from megatron_ppo.loop.ports import Metrics, Policy, Refit
from megatron_ppo.loop.validation import OnRankZero
from megatron_ppo.protocol.errors import GenerationError, RefitError, WeightMismatchError

logger = logging.getLogger(__name__)


class SequenceScorer(Protocol):
    """The engines as rank 0 sees them."""

    def score(
        self, sequences: Sequence[Sequence[int]], *, deadline_s: float
    ) -> Mapping[int, list[list[float]]]:
        """Per replica that serves, per sequence: nats at temperature 1 of every token after the first."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """The scored sequences, and per replica and sequence the engine's log-probs of every token after the first.

    Attributes:
        failure: why the engines gave no answer; there are no log-probs then.
    """

    sequences: list[list[int]]
    by_replica: Mapping[int, list[list[float]]]
    failure: str | None = None


class ProbedRefit:
    """A refit whose every publish is verified by the probe.

    Args:
        make_sequences: token ids to score; called on rank 0 once, after the first publish, when engines can serve.
        tolerance_nats: a larger difference is a WeightMismatchError; None only reports it.

    Invariant: `push` returns only when every replica agrees with the learner within the tolerance.
    """

    def __init__(
        self,
        *,
        refit: Refit,
        policy: Policy,
        engines: SequenceScorer | None,
        make_sequences: Callable[[], list[list[int]]],
        tolerance_nats: float | None,
        pad_token_id: int,
        deadline_s: float,
        on_rank_zero: OnRankZero[Probe],
    ) -> None:
        self._refit = refit
        self._policy = policy
        self._engines = engines
        self._make_sequences = make_sequences
        self._tolerance_nats = tolerance_nats
        self._pad_token_id = pad_token_id
        self._deadline_s = deadline_s
        self._on_rank_zero = on_rank_zero
        self._sequences: list[list[int]] | None = None
        self._version: int | None = None
        self._latest: Mapping[int, list[list[float]]] = {}
        self._before: Mapping[int, list[list[float]]] = {}

    def push(self, *, version: int) -> Metrics:
        """Publish, then compare. Adds `probe/max_abs_logprob_diff_nats`, and from the second version on
        `probe/max_abs_logprob_change_nats`. Raises: RefitError, WeightMismatchError.
        """
        metrics = dict(self._refit.push(version=version))
        probe = self._on_rank_zero(f"same-version probe of version {version}", self._score)
        if probe.failure is not None:  # on every rank, which may publish again together
            raise RefitError(f"same-version probe of version {version}: no answer: {probe.failure}")
        _check_complete(probe, version)
        batch = _probe_batch(probe.sequences, self._pad_token_id)
        learner_BT = self._policy.logprobs(batch, temperature=1.0)
        allowed = float("inf") if self._tolerance_nats is None else self._tolerance_nats
        worst = 0.0
        for replica, rows in probe.by_replica.items():
            for row, logprobs in enumerate(rows):
                mine = learner_BT[row, 1 : 1 + len(logprobs)]
                difference = float((mine - torch.tensor(logprobs, dtype=torch.float32)).abs().max())
                if not difference <= allowed:  # in this form a NaN is refused as well
                    raise WeightMismatchError(
                        f"weights of version {version} differ between learner and engine replica {replica}: "
                        f"log-probs of probe sequence {row} differ by {difference:.2e} nats, "
                        f"refit.probe_tolerance_nats allows {self._tolerance_nats}"
                    )
                worst = max(worst, difference)
        metrics["probe/max_abs_logprob_diff_nats"] = worst
        self._remember(version, probe.by_replica)
        if self._before:
            metrics["probe/max_abs_logprob_change_nats"] = min(
                _largest_difference(rows, self._before_of(replica))
                for replica, rows in probe.by_replica.items()
            )
        return metrics

    def _remember(self, version: int, by_replica: Mapping[int, list[list[float]]]) -> None:
        """Keep the answers to this version, and those to the one before; a version may be published repeatedly."""
        if version != self._version:
            self._version, self._before = version, self._latest
        self._latest = by_replica

    def _before_of(self, replica: int) -> list[list[float]]:
        """A replica that did not serve then is compared with one that did: all had the same weights."""
        return self._before.get(replica) or next(iter(self._before.values()))

    def _score(self) -> Probe:
        assert self._engines is not None, "only rank 0 asks the engines"
        try:
            if self._sequences is None:
                self._sequences = self._make_sequences()
            by_replica = self._engines.score(self._sequences, deadline_s=self._deadline_s)
        except GenerationError as error:
            return Probe(sequences=[], by_replica={}, failure=str(error))
        return Probe(sequences=self._sequences, by_replica=by_replica)


def _largest_difference(one: Sequence[Sequence[float]], other: Sequence[Sequence[float]]) -> float:
    """Nats, over every token of every sequence."""
    return max(
        abs(now - then)
        for row, row_then in zip(one, other, strict=True)
        for now, then in zip(row, row_then, strict=True)
    )


def sequences_of_run(
    path: Path, *, count: int, longest: int, make: Callable[[], list[list[int]]]
) -> list[list[int]]:
    """The sequences that this run is probed with: those of the file `path`, made and written there the first time.

    A resumed run goes on with the tokens that it began with; its own first answers would be other ones.

    Args:
        count: sequences that the run wants.   longest: tokens that the engine has room for.
        make: called when there is no file, or when it holds something else.
    """
    if path.exists():
        try:
            stored = json.loads(path.read_text())
        except ValueError:
            stored = None
        if _are_sequences(stored, count, longest):
            return [list(sequence) for sequence in stored]
        logger.warning("%s does not hold %d sequences of up to %d tokens; made again", path, count, longest)
    sequences = make()
    draft = path.with_suffix(".tmp")
    draft.write_text(json.dumps(sequences))
    draft.replace(path)
    return sequences


def _are_sequences(stored: object, count: int, longest: int) -> bool:
    if not isinstance(stored, list) or len(stored) != count:
        return False
    return all(
        isinstance(sequence, list)
        and 1 < len(sequence) <= longest
        and all(type(token) is int and token >= 0 for token in sequence)
        for sequence in stored
    )


def _check_complete(probe: Probe, version: int) -> None:
    """An answer with gaps would agree wherever it says nothing. Raises: RefitError."""
    expected = [len(sequence) - 1 for sequence in probe.sequences]
    for replica, rows in probe.by_replica.items():
        seen = [len(row) for row in rows]
        if seen != expected:
            raise RefitError(
                f"same-version probe of version {version}: engine replica {replica} returned {seen} log-probs per "
                f"sequence, expected {expected}"
            )
    if not probe.by_replica or not expected or min(expected) == 0:
        raise RefitError(
            f"same-version probe of version {version} compares nothing: {len(probe.by_replica)} replicas, "
            f"sequences of {[len(sequence) for sequence in probe.sequences]} tokens"
        )


def _probe_batch(sequences: Sequence[Sequence[int]], pad_token_id: int) -> TrainBatch:
    """Every token after the first counts as a response token."""
    rows, width = len(sequences), max(len(sequence) for sequence in sequences)
    token_ids = torch.full((rows, width), pad_token_id, dtype=torch.int64)
    mask = torch.zeros((rows, width), dtype=torch.bool)
    for row, sequence in enumerate(sequences):
        token_ids[row, : len(sequence)] = torch.tensor(sequence, dtype=torch.int64)
        mask[row, 1 : len(sequence)] = True
    return TrainBatch(
        token_ids_BT=token_ids,
        length_B=torch.tensor([len(sequence) for sequence in sequences]),
        response_mask_BT=mask,
        sample_mask_B=torch.ones(rows, dtype=torch.bool),
        generation_logprobs_BT=torch.zeros((rows, width)),
        reward_B=torch.zeros(rows),
        truncated_B=torch.zeros(rows, dtype=torch.bool),
        ordinal_B=torch.arange(rows),
    )
