"""The endless prompt stream."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ppo.data.prompts import ShuffledPrompts
from megatron_ppo.data.task import TaskExample
from megatron_ppo.protocol.trajectory import token_array

# A shared machine pauses a process for longer than Hypothesis' 200 ms.
no_deadline = settings(deadline=None)
seeds = st.integers(0, 2**32)
sizes = st.integers(1, 40)


def examples(count: int) -> list[TaskExample]:
    return [TaskExample(token_ids=token_array([i]), text=f"prompt {i}", answer=str(i)) for i in range(count)]


def texts_of_epoch(stream: ShuffledPrompts, epoch: int) -> list[str]:
    return [stream.prompt_at(epoch * len(stream) + position).text for position in range(len(stream))]


@no_deadline
@given(count=sizes, seed=seeds, ordinals=st.lists(st.integers(0, 500), min_size=1, max_size=20))
def test_an_ordinal_is_the_same_prompt_whatever_was_asked_before(
    count: int, seed: int, ordinals: list[int]
) -> None:
    used = ShuffledPrompts(examples=examples(count), seed=seed)
    seen = {ordinal: used.prompt_at(ordinal) for ordinal in ordinals}
    for ordinal in reversed(ordinals):
        fresh = ShuffledPrompts(examples=examples(count), seed=seed)
        assert fresh.prompt_at(ordinal) == used.prompt_at(ordinal) == seen[ordinal]
        assert seen[ordinal].ordinal == ordinal


@no_deadline
@given(count=sizes, seed=seeds, epoch=st.integers(0, 1000))
def test_every_epoch_contains_every_example_once(count: int, seed: int, epoch: int) -> None:
    stream = ShuffledPrompts(examples=examples(count), seed=seed)
    assert sorted(texts_of_epoch(stream, epoch)) == sorted(e.text for e in examples(count))


@no_deadline
@given(seed=seeds, epoch=st.integers(0, 100))
def test_epochs_and_seeds_differ_in_order(seed: int, epoch: int) -> None:
    # Two of 60! orders coincide with a probability of 1e-82.
    stream = ShuffledPrompts(examples=examples(60), seed=seed)
    assert texts_of_epoch(stream, epoch) != texts_of_epoch(stream, epoch + 1)
    other = ShuffledPrompts(examples=examples(60), seed=seed + 1)
    assert texts_of_epoch(stream, epoch) != texts_of_epoch(other, epoch)


def test_the_order_is_the_same_in_another_process() -> None:
    # PYTHONHASHSEED differs there: an order that came from hash() would differ too.
    code = (
        "from megatron_ppo.data.tasks import train_prompts\n"
        "s = train_prompts(task='sort3_5', stream_seed=7)\n"
        "print(' '.join(s.prompt_at(q).text for q in range(3998, 4010)))"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        ).stdout
        for hash_seed in ("1", "2")
    }
    assert len(outputs) == 1
    assert len(outputs.pop().split()) == 12


def test_a_negative_ordinal_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt ordinal must be >= 0, got -1"):
        ShuffledPrompts(examples=examples(3), seed=0).prompt_at(-1)


def test_a_stream_without_examples_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 example"):
        ShuffledPrompts(examples=[], seed=0)
