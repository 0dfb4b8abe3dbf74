"""The fakes refuse what the real parts refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from megatron_ppo.protocol.errors import EngineDeadError, GenerationError
from megatron_ppo.protocol.trajectory import Completion, SamplingSettings
from megatron_ppo.testing.fakes import (
    EOS_ID,
    CallerError,
    FakeEngine,
    FakePromptStream,
    FakeScorer,
    prompt_ids,
    skewed_length,
)


async def generate(
    engine: FakeEngine,
    *,
    prompt: Sequence[int] = (1, 2),
    seeds: Sequence[int] = (1, 2),
    max_new_tokens: int = 4,
    deadline_s: float = 30.0,
) -> list[Completion]:
    return await engine.generate(
        prompt, seeds=seeds, sampling=SamplingSettings(max_new_tokens=max_new_tokens), deadline_s=deadline_s
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"prompt": ()}, "bad prompt"),
        ({"prompt": (1, -2)}, "bad prompt"),
        ({"seeds": ()}, "at least one seed"),
        ({"seeds": (1, 1)}, "equal seeds"),
        ({"seeds": (2**63,)}, r"seeds must lie in"),
        ({"seeds": (-1,)}, r"seeds must lie in"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1"),
        ({"deadline_s": 0.0}, "deadline_s must be > 0"),
    ],
)
def test_engine_refuses_calls_that_a_real_engine_would_refuse(
    arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(CallerError, match=message):
        asyncio.run(generate(FakeEngine(), **arguments))  # type: ignore[arg-type]


def test_same_seed_gives_the_same_response_whatever_runs_beside_it() -> None:
    async def scenario() -> None:
        engine = FakeEngine(length_of=lambda _, limit: limit)
        alone = await generate(engine, seeds=(7,))
        together = (await asyncio.gather(generate(engine, seeds=(7, 8)), generate(engine, seeds=(9,))))[0]
        assert alone[0].token_ids == together[0].token_ids
        assert together[0].token_ids != together[1].token_ids

    asyncio.run(scenario())


def test_versions_published_under_a_request_become_spans() -> None:
    async def scenario() -> None:
        engine = FakeEngine(token_latency_s=0.01, length_of=lambda _, limit: limit)
        request = asyncio.create_task(generate(engine, seeds=(1,), max_new_tokens=8))
        await asyncio.sleep(0.03)
        engine.publish(1)
        (completion,) = await request
        assert [span.version for span in completion.spans] == [0, 1]
        with pytest.raises(CallerError, match="version 1 is published after 1"):
            engine.publish(1)

    asyncio.run(scenario())


def test_responses_end_by_eos_or_by_length() -> None:
    lengths = [skewed_length(seed, 10) for seed in range(400)]
    assert set(lengths) == set(range(1, 11))
    assert lengths.count(1) > lengths.count(9)
    (short,) = asyncio.run(generate(FakeEngine(length_of=lambda *_: 2), seeds=(1,)))
    (full,) = asyncio.run(generate(FakeEngine(length_of=lambda *_: 4), seeds=(1,)))
    assert (short.finish_reason, short.token_ids[-1]) == ("stop", EOS_ID)
    assert (full.finish_reason, len(full.token_ids)) == ("length", 4)


def test_failures_on_demand() -> None:
    async def scenario() -> None:
        engine = FakeEngine()
        engine.fail_next(1)
        with pytest.raises(GenerationError, match="told to fail"):
            await generate(engine)
        engine.failing.add((5,))
        with pytest.raises(GenerationError, match="fail"):
            await generate(engine, prompt=(5,))
        engine.hanging.add((6,))
        with pytest.raises(GenerationError, match=r"did not finish within 0.02 s"):
            await generate(engine, prompt=(6,), deadline_s=0.02)
        running = asyncio.create_task(generate(engine, max_new_tokens=1000))
        await asyncio.sleep(0)
        engine.die("killed")
        with pytest.raises(EngineDeadError, match="killed"):
            await running
        with pytest.raises(EngineDeadError, match="killed"):
            await generate(engine)
        assert engine.num_running == 0

    asyncio.run(scenario())


def test_prompt_stream_repeats_with_its_period_and_keeps_the_ordinal() -> None:
    stream = FakePromptStream(period=3)
    assert stream.prompt_at(4).token_ids == stream.prompt_at(1).token_ids == prompt_ids(1)
    assert stream.prompt_at(4).ordinal == 4
    with pytest.raises(CallerError, match="got -1"):
        stream.prompt_at(-1)


def test_scorer_refuses_an_empty_response() -> None:
    scorer = FakeScorer()
    prompt = FakePromptStream().prompt_at(0)
    assert scorer(prompt, [4, EOS_ID]) == 1.0
    assert scorer(prompt, [4, 5]) == 0.0
    with pytest.raises(CallerError, match="empty response to ordinal 0"):
        scorer(prompt, [])
