"""Sets of times as sorted, disjoint (start, end) pairs in seconds; plain arithmetic, no clock."""

from __future__ import annotations

from collections.abc import Iterable

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same times without overlaps, in order; empty intervals are dropped."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def intersection(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The times that are in both."""
    others = union(second)
    return union((max(a, c), min(b, d)) for a, b in union(first) for c, d in others)


def difference(first: Iterable[Interval], second: Iterable[Interval]) -> list[Interval]:
    """The times of `first` that are not in `second`."""
    left = union(first)
    for c, d in union(second):
        left = [part for a, b in left for part in ((a, min(b, c)), (max(a, d), b)) if part[1] > part[0]]
    return left


def duration_s(intervals: Iterable[Interval]) -> float:
    """Seconds covered, overlaps counted once."""
    return sum(end - start for start, end in union(intervals))
