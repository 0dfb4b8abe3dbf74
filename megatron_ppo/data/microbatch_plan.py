"""Which sequences form which microbatch on which data-parallel rank.

Pure arithmetic on lengths, driven by the model adapter before every training and scoring pass. All ranks hold
the same lengths, so all compute the same plan, and each takes its share.

Invariants: every row is in exactly one microbatch (in a scoring pass that has fewer rows than the ranks need,
some are in several); all ranks have the same number of microbatches, `fewest_microbatches` or more, and none
of them is empty, because every rank takes part in every collective; under a token budget no microbatch
has more positions than the budget. The same lengths give the same plan.

Two ways to count the positions that a microbatch occupies: padded, rows * longest row; packed, the sum of the
rows. Lengths are rounded up to what the layout can cut in both.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_ppo.protocol.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class FixedSize:
    """At most `sequences` rows in a microbatch; ranks get contiguous shares in the order of the batch.

    Attributes:
        multiple: lengths are rounded up to it, in positions.
    """

    sequences: int
    multiple: int = 1

    def __post_init__(self) -> None:
        _require_positive(sequences=self.sequences, multiple=self.multiple)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """At most `tokens` positions in a microbatch; rows are shared out so that ranks have equal work.

    Attributes:
        packed: rows are laid end to end, each rounded up to `multiple`; else all rows of a microbatch are
            padded to the longest of them, rounded up to `multiple`.
    """

    tokens: int
    packed: bool
    multiple: int = 1

    def __post_init__(self) -> None:
        _require_positive(tokens=self.tokens, multiple=self.multiple)


BatchPolicy = FixedSize | TokenBudget


def fixed_size(key: str, sequences: int) -> FixedSize:
    """Raises: ConfigError, naming the key, for fewer than one sequence."""
    if sequences < 1:
        raise ConfigError(f"{key} must be >= 1, got {sequences}")
    return FixedSize(sequences=sequences)


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchPlan:
    """Attributes:
    shares: `shares[dp_rank][i]` = the rows of microbatch i of that rank, as indices into the batch.
    positions: `positions[dp_rank][i]` = positions that this microbatch occupies, padding included.
    num_tokens: real tokens of all microbatches.
    """

    shares: tuple[tuple[tuple[int, ...], ...], ...]
    positions: tuple[tuple[int, ...], ...]
    num_tokens: int

    @property
    def num_microbatches(self) -> int:
        """Of each rank."""
        return len(self.shares[0])

    @property
    def packing_efficiency(self) -> float:
        """Real tokens / positions processed, in (0, 1]; 1 = no padding."""
        return self.num_tokens / sum(map(sum, self.positions))

    @property
    def token_imbalance(self) -> float:
        """Positions of the rank that has most / mean over the ranks; 1 = balanced, the rank that all wait for
        takes this many times longer than the mean.
        """
        loads = [sum(rank) for rank in self.positions]
        return max(loads) * len(loads) / sum(loads)

    def metrics(self, prefix: str) -> dict[str, float]:
        """The numbers that say how well the batch was cut, under `prefix`."""
        return {
            f"{prefix}packing_efficiency": self.packing_efficiency,
            f"{prefix}num_microbatches": float(self.num_microbatches),
            f"{prefix}token_imbalance": self.token_imbalance,
        }


def plan(
    length_B: Sequence[int],
    *,
    data_parallel_size: int,
    policy: BatchPolicy,
    fewest_microbatches: int = 1,
    may_repeat: bool = False,
) -> MicrobatchPlan:
    """Share the rows of a batch out to data-parallel ranks and cut the shares into microbatches.

    Args:
        length_B: tokens of each row, >= 1.
        fewest_microbatches: of each rank (an interleaved pipeline needs one per stage).
        may_repeat: rows may be repeated when there are too few; only for passes whose results do not add up
            over rows.
    Raises: ValueError for an empty batch, a row longer than the budget, or (without `may_repeat`) rows that
        the data-parallel size does not divide or too few of them.
    """
    _require_positive(data_parallel_size=data_parallel_size, fewest_microbatches=fewest_microbatches)
    lengths = list(length_B)
    if not lengths:
        raise ValueError("cannot plan microbatches of an empty batch")
    if min(lengths) < 1:
        raise ValueError(f"row {lengths.index(min(lengths))} has {min(lengths)} tokens; must be >= 1")
    if not may_repeat and len(lengths) % data_parallel_size:
        raise ValueError(
            f"data-parallel size {data_parallel_size} does not divide the batch of {len(lengths)} sequences"
        )
    size = [_round_up(length, policy.multiple) for length in lengths]
    if isinstance(policy, FixedSize):
        shares = list(_contiguous(len(lengths), data_parallel_size, policy, fewest_microbatches, may_repeat))
    else:
        bins = _bins(size, policy, data_parallel_size, fewest_microbatches, may_repeat)
        shares = _deal(bins, size, policy.packed, data_parallel_size)
    packed = isinstance(policy, TokenBudget) and policy.packed
    return MicrobatchPlan(
        shares=tuple(tuple(tuple(rows) for rows in share) for share in shares),
        positions=tuple(tuple(_positions(rows, size, packed) for rows in share) for share in shares),
        num_tokens=sum(lengths[row] for share in shares for rows in share for row in rows),
    )


def _require_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} must be >= 1, got {number}")


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def _positions(rows: Sequence[int], size: Sequence[int], packed: bool) -> int:
    return sum(size[row] for row in rows) if packed else len(rows) * max(size[row] for row in rows)


def _contiguous(
    rows: int, ranks: int, policy: FixedSize, fewest: int, may_repeat: bool
) -> Iterator[list[list[int]]]:
    share = -(-rows // ranks)
    if share < fewest:
        if not may_repeat:
            raise ValueError(
                f"{share} sequences per data-parallel rank cannot be cut into {fewest} microbatches, the "
                "fewest that the pipeline takes"
            )
        share = fewest
    length = min(policy.sequences, share // fewest)
    for rank in range(ranks):
        # The last row stands in for those that are missing.
        mine = [min(row, rows - 1) for row in range(rank * share, (rank + 1) * share)]
        yield [mine[start : start + length] for start in range(0, share, length)]


def _bins(
    size: Sequence[int], policy: TokenBudget, ranks: int, fewest: int, may_repeat: bool
) -> list[list[int]]:
    """Microbatches of all ranks together; as few as each rank can have the same number of."""
    longest = max(size)
    if longest > policy.tokens:
        raise ValueError(
            f"row {size.index(longest)} needs {longest} positions (its length rounded up to a multiple of "
            f"{policy.multiple}); the budget of a microbatch is {policy.tokens}"
        )
    # Longest first; equal ones in the order of the batch.
    order = sorted(range(len(size)), key=lambda row: (-size[row], row))
    fit = _best_fit if policy.packed else _runs
    count = ranks * max(fewest, -(-len(fit(order, size, policy.tokens)) // ranks))
    if count > len(order):
        if not may_repeat:
            raise ValueError(
                f"{len(order)} sequences cannot be cut into {count} microbatches, {count // ranks} for each of "
                f"{ranks} data-parallel ranks, the fewest that the pipeline takes"
            )
        order += [order[-1]] * (count - len(order))
    if policy.packed:
        bins = _least_loaded(order, size, count)
        if max(_positions(rows, size, True) for rows in bins) > policy.tokens:
            bins = _best_fit(order, size, policy.tokens)
    else:
        bins = _runs(order, size, _smallest_limit(order, size, policy.tokens, count))
    while len(bins) < count:
        _split_largest(bins, size, policy.packed)
    return bins


def _runs(order: Sequence[int], size: Sequence[int], limit: int) -> list[list[int]]:
    """Consecutive rows of the sorted order while rows * longest <= limit; the fewest runs possible."""
    runs: list[list[int]] = []
    for row in order:
        if runs and (len(runs[-1]) + 1) * size[runs[-1][0]] <= limit:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs


def _smallest_limit(order: Sequence[int], size: Sequence[int], budget: int, count: int) -> int:
    """The least budget that still needs no more than `count` runs: microbatches of even size."""
    low, high = size[order[0]], budget
    while low < high:
        middle = (low + high) // 2
        if len(_runs(order, size, middle)) <= count:
            high = middle
        else:
            low = middle + 1
    return low


def _best_fit(order: Sequence[int], size: Sequence[int], budget: int) -> list[list[int]]:
    """Best-fit decreasing: each row into the fullest bin that has room. At most 11/9 of the optimum, + 1."""
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (positions left, bin), sorted
    for row in order:
        at = bisect.bisect_left(room, (size[row], -1))
        left, number = room.pop(at) if at < len(room) else (budget, len(bins))
        if number == len(bins):
            bins.append([])
        bins[number].append(row)
        bisect.insort(room, (left - size[row], number))
    return bins


def _least_loaded(order: Sequence[int], size: Sequence[int], count: int) -> list[list[int]]:
    """Longest processing time first: each row into the bin that has least. At most 4/3 of the optimum."""
    bins: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, number) for number in range(count)]
    for row in order:
        load, number = heap[0]
        bins[number].append(row)
        heapq.heapreplace(heap, (load + size[row], number))
    return bins


def _split_largest(bins: list[list[int]], size: Sequence[int], packed: bool) -> None:
    """Cut the largest bin that has two rows in two, in place."""
    _, number = max(
        (_positions(rows, size, packed), -number) for number, rows in enumerate(bins) if len(rows) > 1
    )
    rows = bins[-number]
    if packed:
        halves = _least_loaded(rows, size, 2)
    else:
        halves = [rows[: len(rows) // 2], rows[len(rows) // 2 :]]
    bins[-number : -number + 1] = halves


def _deal(
    bins: Sequence[Sequence[int]], size: Sequence[int], packed: bool, ranks: int
) -> list[list[list[int]]]:
    """The same number of bins to every rank, the largest first, each to the rank that has least so far."""
    largest_first = sorted(bins, key=lambda rows: (-_positions(rows, size, packed), min(rows)))
    hands: list[list[list[int]]] = [[] for _ in range(ranks)]
    heap = [(0, rank) for rank in range(ranks)]
    for rows in largest_first:
        load, rank = heapq.heappop(heap)
        hands[rank].append(sorted(rows))
        if len(hands[rank]) < len(bins) // ranks:
            heapq.heappush(heap, (load + _positions(rows, size, packed), rank))
    return hands
