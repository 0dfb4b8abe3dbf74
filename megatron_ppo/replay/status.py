"""What the replay buffer tells about itself: status, counters, restore report, distributions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Literal

from megatron_ppo.protocol.trajectory import PromptGroup

RejectReason = Literal["stale", "past", "beyond_window", "surplus"]
MAX_LISTED = 12


@dataclass(slots=True)
class Counters:
    """Groups since this process started.

    Attributes:
        released: reservations given back by the collector.   evicted: stored groups that were released.
        stale_commits: finished groups that were too old for their target.
        late_commits: finished groups whose target had been skipped.
    """

    committed: int = 0
    trained: int = 0
    released: int = 0
    evicted: int = 0
    stale_commits: int = 0
    late_commits: int = 0

    def copy(self) -> Counters:
        """A snapshot that later counting does not change."""
        return dataclasses.replace(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreReport:
    """What a restore made of the snapshot's groups.

    Attributes:
        num_pending_before: ordinals that were in flight, released or stored when the snapshot was taken.
        stale: too old under the current schedule.   past: of a step that is already trained.
        beyond_window: of a step that may not be generated yet under the current schedule.
        surplus: more than the current number of prompts per step.
    """

    resume_step: int
    num_pending_before: int
    kept: int = 0
    stale: int = 0
    past: int = 0
    beyond_window: int = 0
    surplus: int = 0

    @property
    def num_rejected(self) -> int:
        """Stored groups whose ordinals have to be generated again."""
        return self.stale + self.past + self.beyond_window + self.surplus

    def rejecting(self, reason: RejectReason) -> RestoreReport:
        """One more group rejected for `reason`."""
        return dataclasses.replace(self, **{reason: getattr(self, reason) + 1})

    def keeping(self, count: int) -> RestoreReport:
        """With the number of groups that were kept."""
        return dataclasses.replace(self, kept=count)


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStatus:
    """Where every open slot and ordinal is.

    Attributes:
        step, frontier: the open window; None before the learner's first announcement.
        ready: stored groups per target step.   reserved: ordinals in flight per target step.
        pending: why each ordinal waits to be handed out again.
        cut: lowest ordinal that a resume must look at.   trained_frontier: 1 + the highest trained ordinal.
    """

    step: int | None
    frontier: int | None
    lowest_unfinished: int
    num_prompts_per_step: int
    size: int
    capacity: int
    ready: dict[int, int]
    reserved: dict[int, tuple[int, ...]]
    pending: dict[int, str]
    next_ordinal: int
    cut: int
    trained_frontier: int
    counters: Counters = field(default_factory=Counters)

    def describe(self, target: int) -> str:
        """One line that says why `target` is not complete: what is ready, in flight and pending."""
        flying = self.reserved.get(target, ())
        window = "the window is not open" if self.frontier is None else f"window {self.step}..{self.frontier}"
        pending = [f"{q} ({reason})" for q, reason in list(self.pending.items())[:MAX_LISTED]]
        more = len(self.pending) - len(pending)
        return (
            f"step {target} has {self.ready.get(target, 0)} of {self.num_prompts_per_step} groups; {window}; "
            f"in flight for it: ordinals {list(flying[:MAX_LISTED])}{_more(len(flying) - MAX_LISTED)}; "
            f"pending: [{', '.join(pending)}]{_more(more)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """Mean, median, maximum and nearest-rank 95th percentile."""

    mean: float
    median: float
    max: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentDiagnostics:
    """Distributions over the stored groups; None while the buffer is empty.

    Attributes:
        group_duration_s: dispatch to last token.   response_tokens: per trajectory.
        versions, targets: distinct weight versions and target steps that are stored, ascending.
    """

    size: int
    versions: tuple[int, ...]
    targets: tuple[int, ...]
    group_duration_s: Distribution | None
    response_tokens: Distribution | None


def diagnose(groups: Sequence[PromptGroup]) -> ContentDiagnostics:
    """Diagnostics of a buffer's content."""
    trajectories = [t for group in groups for t in group.trajectories]
    return ContentDiagnostics(
        size=len(groups),
        versions=tuple(sorted({span.version for t in trajectories for span in t.completion.spans})),
        targets=tuple(sorted({group.target_step for group in groups})),
        group_duration_s=distribution([group.finished_at - group.started_at for group in groups]),
        response_tokens=distribution([float(len(t.completion.token_ids)) for t in trajectories]),
    )


def distribution(values: Sequence[float]) -> Distribution | None:
    """Summary of `values`, or None if there are none. p95 is the smallest value that 95 % do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    rank = -(-95 * len(ordered) // 100)
    return Distribution(mean=fmean(ordered), median=median(ordered), max=ordered[-1], p95=ordered[rank - 1])


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
