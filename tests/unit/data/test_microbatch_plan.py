"""Microbatch plans: nothing lost, nothing twice, the same number on every rank, and no more than the budget."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.data.microbatch_plan import FixedSize, MicrobatchPlan, TokenBudget, plan

LENGTHS = st.lists(st.integers(1, 97), min_size=1, max_size=60)
RANKS = st.sampled_from([1, 2, 3, 4])
MULTIPLES = st.sampled_from([1, 2, 4, 8, 64])


def rows_of(seen: MicrobatchPlan) -> Counter[int]:
    return Counter(row for share in seen.shares for rows in share for row in rows)


def divisible(lengths: list[int], by: int) -> list[int]:
    """The list, repeated until `by` divides its length."""
    return lengths * by


def occupied(rows: tuple[int, ...], lengths: list[int], policy: TokenBudget) -> int:
    sizes = [-(-lengths[row] // policy.multiple) * policy.multiple for row in rows]
    return sum(sizes) if policy.packed else len(sizes) * max(sizes)


@st.composite
def budgets(draw: st.DrawFn, lengths: list[int]) -> TokenBudget:
    multiple = draw(MULTIPLES)
    least = -(-max(lengths) // multiple) * multiple
    return TokenBudget(
        tokens=draw(st.integers(least, 6 * least)), packed=draw(st.booleans()), multiple=multiple
    )


@given(data=st.data(), lengths=LENGTHS, ranks=RANKS)
def test_a_training_plan_has_every_row_once_and_keeps_the_budget(
    data: st.DataObject, lengths: list[int], ranks: int
) -> None:
    lengths = divisible(lengths, ranks)
    policy = data.draw(budgets(lengths))
    seen = plan(lengths, data_parallel_size=ranks, policy=policy)
    assert rows_of(seen) == Counter(range(len(lengths)))
    assert len(seen.shares) == ranks
    assert {len(share) for share in seen.shares} == {seen.num_microbatches}
    for share, positions in zip(seen.shares, seen.positions, strict=True):
        for rows, count in zip(share, positions, strict=True):
            assert rows, "an empty microbatch"
            assert occupied(rows, lengths, policy) == count <= policy.tokens
    assert seen.num_tokens == sum(lengths)
    assert 0.0 < seen.packing_efficiency <= 1.0 <= seen.token_imbalance


@given(data=st.data(), lengths=LENGTHS, ranks=RANKS, fewest=st.integers(1, 4))
def test_a_scoring_plan_has_every_row_and_as_many_microbatches_as_the_pipeline_takes(
    data: st.DataObject, lengths: list[int], ranks: int, fewest: int
) -> None:
    policy = data.draw(st.one_of(budgets(lengths), st.builds(FixedSize, sequences=st.integers(1, 9))))
    seen = plan(lengths, data_parallel_size=ranks, policy=policy, fewest_microbatches=fewest, may_repeat=True)
    counts = rows_of(seen)
    assert set(counts) == set(range(len(lengths)))
    assert all(len(share) == seen.num_microbatches for share in seen.shares)
    assert seen.num_microbatches >= fewest
    assert all(rows for share in seen.shares for rows in share)
    if isinstance(policy, TokenBudget):
        assert all(
            occupied(rows, lengths, policy) <= policy.tokens for share in seen.shares for rows in share
        )
        # Only as many copies as there are microbatches without a row of their own.
        assert sum(counts.values()) == max(len(lengths), ranks * seen.num_microbatches)
    else:
        assert max(len(rows) for share in seen.shares for rows in share) <= policy.sequences


@given(data=st.data(), lengths=LENGTHS, ranks=RANKS)
def test_the_same_lengths_give_the_same_plan(data: st.DataObject, lengths: list[int], ranks: int) -> None:
    lengths = divisible(lengths, ranks)
    policy = data.draw(budgets(lengths))
    first, second = (plan(list(lengths), data_parallel_size=ranks, policy=policy) for _ in range(2))
    assert first == second


@given(lengths=LENGTHS, ranks=RANKS, size=st.integers(1, 20))
def test_fixed_sizes_are_contiguous_shares_cut_from_the_front(
    lengths: list[int], ranks: int, size: int
) -> None:
    lengths = divisible(lengths, ranks)
    seen = plan(lengths, data_parallel_size=ranks, policy=FixedSize(sequences=size))
    share = len(lengths) // ranks
    for rank, mine in enumerate(seen.shares):
        expected = torch.arange(rank * share, (rank + 1) * share).split(size)
        assert [list(rows) for rows in mine] == [part.tolist() for part in expected]


def test_missing_rows_of_a_fixed_size_are_copies_of_the_last() -> None:
    seen = plan([5] * 7, data_parallel_size=2, policy=FixedSize(sequences=3), may_repeat=True)
    assert seen.shares == (((0, 1, 2), (3,)), ((4, 5, 6), (6,)))


def test_an_interleaved_pipeline_gets_more_and_smaller_fixed_microbatches() -> None:
    seen = plan([5] * 7, data_parallel_size=1, policy=FixedSize(sequences=4), fewest_microbatches=3)
    assert seen.shares == (((0, 1), (2, 3), (4, 5), (6,)),)


@given(sequences=st.integers(1, 100), wanted=st.integers(1, 100), fewest=st.integers(1, 8))
def test_fixed_microbatches_are_as_large_as_wanted_where_there_are_enough_of_them(
    sequences: int, wanted: int, fewest: int
) -> None:
    policy = FixedSize(sequences=wanted)
    if sequences < fewest:
        with pytest.raises(ValueError, match=f"cannot be cut into {fewest} microbatches"):
            plan([5] * sequences, data_parallel_size=1, policy=policy, fewest_microbatches=fewest)
        return
    (share,) = plan([5] * sequences, data_parallel_size=1, policy=policy, fewest_microbatches=fewest).shares
    assert len(share) >= fewest
    size = len(share[0])
    assert size == min(wanted, sequences) or sequences // (size + 1) < fewest


@pytest.mark.parametrize(("packed", "efficiency"), [(True, 0.97), (False, 0.85)])
def test_long_tailed_lengths_are_packed_well_and_balanced(packed: bool, efficiency: float) -> None:
    generator = random.Random(0)
    lengths = [min(2048, 16 + int(generator.expovariate(1 / 300))) for _ in range(256)]
    policy = TokenBudget(tokens=8192, packed=packed, multiple=8)
    seen = plan(lengths, data_parallel_size=4, policy=policy)
    contiguous = plan(lengths, data_parallel_size=4, policy=FixedSize(sequences=4, multiple=8))
    assert seen.packing_efficiency > efficiency > 0.7 > contiguous.packing_efficiency
    assert seen.token_imbalance < 1.02 < contiguous.token_imbalance
    # No more than the fewest that could hold the tokens, rounded up to the ranks, and one round more.
    assert seen.num_microbatches <= -(-sum(lengths) // 8192) // 4 + 2


def test_packing_puts_no_more_into_a_microbatch_than_needed_to_balance_them() -> None:
    seen = plan(
        [7, 5, 4, 4, 3, 1], data_parallel_size=2, policy=TokenBudget(tokens=12, packed=True, multiple=1)
    )
    assert seen.positions == ((12,), (12,))
    assert seen.token_imbalance == seen.packing_efficiency == 1.0


def test_a_plan_reports_padding_passes_and_balance() -> None:
    seen = plan([8, 4, 4, 4], data_parallel_size=2, policy=FixedSize(sequences=1, multiple=2))
    # Ranks process 12 and 8 positions, their mean is 10; every one of them is a token.
    assert seen.metrics("x_") == {
        "x_packing_efficiency": 1.0,
        "x_num_microbatches": 2.0,
        "x_token_imbalance": 1.2,
    }


def test_two_ranks_of_one_long_and_many_short_rows_have_the_same_work() -> None:
    seen = plan([64] + [8] * 7, data_parallel_size=2, policy=TokenBudget(tokens=64, packed=False, multiple=8))
    assert sorted(map(sum, seen.positions)) == [56, 64]


def test_a_row_longer_than_the_budget_is_named() -> None:
    with pytest.raises(ValueError, match=r"row 1 needs 104 positions .* multiple of 8.* is 100"):
        plan([5, 99], data_parallel_size=1, policy=TokenBudget(tokens=100, packed=True, multiple=8))


def test_rows_that_the_ranks_do_not_divide_are_refused_in_training() -> None:
    for policy in (FixedSize(sequences=2), TokenBudget(tokens=100, packed=True)):
        with pytest.raises(ValueError, match="data-parallel size 2 does not divide the batch of 3 sequences"):
            plan([5, 6, 7], data_parallel_size=2, policy=policy)


def test_too_few_rows_for_the_pipeline_are_refused_in_training() -> None:
    with pytest.raises(ValueError, match="1 sequences per data-parallel rank cannot be cut into 2"):
        plan([5] * 3, data_parallel_size=3, policy=FixedSize(sequences=1), fewest_microbatches=2)
    with pytest.raises(ValueError, match="3 sequences cannot be cut into 4 microbatches, 4 for"):
        plan([5] * 3, data_parallel_size=1, policy=TokenBudget(tokens=5, packed=True), fewest_microbatches=4)


@pytest.mark.parametrize(
    ("lengths", "arguments", "message"),
    [
        ([], {}, "empty batch"),
        ([3, 0], {}, "row 1 has 0 tokens"),
        ([3], {"data_parallel_size": 0}, "data_parallel_size must be >= 1, got 0"),
        ([3], {"fewest_microbatches": 0}, "fewest_microbatches must be >= 1, got 0"),
    ],
)
def test_nonsense_is_refused(lengths: list[int], arguments: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan(lengths, **{"data_parallel_size": 1, "policy": FixedSize(sequences=1), **arguments})


@pytest.mark.parametrize("arguments", [{"tokens": 0}, {"tokens": 4, "multiple": 0}])
def test_budgets_are_positive(arguments: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must be >= 1, got 0"):
        TokenBudget(packed=True, **arguments)


def test_thousands_of_rows_are_planned_in_a_moment() -> None:
    generator = random.Random(1)
    lengths = [generator.randint(10, 2000) for _ in range(4096)]
    seen = plan(lengths, data_parallel_size=8, policy=TokenBudget(tokens=4096, packed=True, multiple=4))
    assert rows_of(seen) == Counter(range(4096))
    assert seen.packing_efficiency > 0.99
    assert seen.token_imbalance < 1.01
