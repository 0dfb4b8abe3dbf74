"""The engine against transformers: sampling, scoring, and weights that change while requests run."""

from __future__ import annotations

import asyncio
import os
import time
from concurrent.futures import CancelledError
from typing import TYPE_CHECKING

import pytest

from megatron_ppo.protocol.errors import GenerationError, RefitError
from megatron_ppo.protocol.trajectory import SamplingSettings
from tests.functional.inference.hf_oracle import EITHER, TOLERANCE_NATS, hf_logprobs, worst_difference

if TYPE_CHECKING:
    from tests.functional.inference.engine_rig import EngineRig

pytestmark = [pytest.mark.vllm]

# Longer than one block of vLLM's CPU key-value cache (128 tokens), so that prefixes are cached at all.
LONG_PROMPT = [5 + i % 250 for i in range(200)]


def _wait_until(condition, *, what: str, timeout_s: float = 60.0) -> None:
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < timeout_s, f"waited {timeout_s} s for {what}"
        time.sleep(0.01)


def _wait_until_sampling(rig: EngineRig, running: int) -> None:
    """Until `running` requests are inside and have had time for tokens (a step takes about 10 ms)."""
    _wait_until(
        lambda: rig.loop.run(rig.engine.health()).running >= running, what=f"{running} running requests"
    )
    time.sleep(0.3)


@EITHER
def test_generation_logprobs_match_transformers_before_and_after_a_refit(rig: EngineRig):
    for model in (rig.models[0], rig.models[1], rig.models[0]):
        version = rig.publish(model)
        for completion in rig.generate([3, 4, 5], seeds=[1, 2, 3], max_new_tokens=30):
            assert [span.version for span in completion.spans] == [version]
            assert worst_difference(model, [3, 4, 5], completion, version) < TOLERANCE_NATS


@EITHER
def test_scores_match_transformers_before_and_after_a_refit(rig: EngineRig):
    sequences = [LONG_PROMPT, [1, 2, 3, 4], list(range(50, 90))]
    for model in (rig.models[1], rig.models[0]):
        rig.publish(model)
        for _ in range(2):  # the second time a cached prefix would be there to read
            scores = rig.loop.run(rig.engine.score(sequences, deadline_s=60))
            for sequence, score in zip(sequences, scores, strict=True):
                assert score == pytest.approx(hf_logprobs(model, sequence), abs=TOLERANCE_NATS)


def test_logprobs_are_those_of_the_tempered_distribution(rig: EngineRig):
    rig.publish(rig.models[0])
    [completion] = rig.generate([9, 8, 7], temperature=0.7, max_new_tokens=30)
    expected = hf_logprobs(rig.models[0], [9, 8, 7, *completion.token_ids], temperature=0.7)[2:]
    assert list(completion.logprobs) == pytest.approx(expected, abs=TOLERANCE_NATS)


def test_a_seed_fixes_the_sample_and_temperature_zero_ignores_it(rig: EngineRig):
    first, second, other = rig.generate([3, 4, 5], seeds=[1, 1, 2])
    assert first.token_ids == second.token_ids != other.token_ids
    greedy = rig.generate([3, 4, 5], seeds=[1, 2], temperature=0.0)
    assert greedy[0].token_ids == greedy[1].token_ids


def test_no_cached_prefix_survives_a_refit(rig: EngineRig):
    from megatron_ppo.inference.request_params import sampling_params

    params = sampling_params(SamplingSettings(max_new_tokens=1), seed=1, stop_token_ids=())
    version = rig.publish(rig.models[0])
    cached = [rig.loop.run(rig.engine._request(LONG_PROMPT, params)).num_cached_tokens for _ in range(2)]
    assert cached[1] >= 128, "the prefix cache is off, so this test shows nothing"
    for in_flight in (False, True):
        model = rig.models[version % 2]
        version = rig.publish(model, in_flight=in_flight)
        assert rig.loop.run(rig.engine._request(LONG_PROMPT, params)).num_cached_tokens == 0
        [completion] = rig.generate(LONG_PROMPT)
        assert worst_difference(model, LONG_PROMPT, completion, version) < TOLERANCE_NATS


@pytest.mark.parametrize("recompute_kv", [True, False])
def test_an_in_flight_refit_loses_no_request_and_stamps_exact_spans(rig: EngineRig, recompute_kv: bool):
    old_version = rig.publish(rig.models[0])
    prompts = [[7, 8, 9 + i] for i in range(20)]  # 8 run, 12 wait
    futures = [rig.begin(prompt, seeds=[i], max_new_tokens=150) for i, prompt in enumerate(prompts)]
    _wait_until_sampling(rig, 8)
    new_version = rig.publish(rig.models[1], in_flight=True, recompute_kv=recompute_kv)
    completions = [completion for [completion] in rig.finish(futures)]

    assert [len(c.token_ids) for c in completions] == [150] * 20
    spans = [[span.version for span in c.spans] for c in completions]
    assert [old_version, new_version] in spans, "no request was running during the refit"
    for prompt, completion, versions in zip(prompts, completions, spans, strict=True):
        assert versions in ([old_version], [old_version, new_version], [new_version])
        if old_version in versions:
            difference = worst_difference(rig.models[0], prompt, completion, old_version)
            assert difference < TOLERANCE_NATS
        if new_version in versions:
            difference = worst_difference(rig.models[1], prompt, completion, new_version)
            if versions == [new_version] or recompute_kv:
                assert difference < TOLERANCE_NATS
            else:  # the cache of the old weights is still in use, which nothing hides
                assert difference > 0.01


def test_a_request_after_an_in_flight_refit_does_not_read_blocks_that_a_running_one_keeps(rig: EngineRig):
    rig.publish(rig.models[0])
    running = [rig.begin(LONG_PROMPT, seeds=[i], max_new_tokens=250) for i in range(8)]
    late = [rig.begin(LONG_PROMPT, seeds=[100 + i], max_new_tokens=20) for i in range(3)]
    _wait_until_sampling(rig, 8)
    version = rig.publish(rig.models[1], in_flight=True, recompute_kv=False)
    assert not any(future.done() for future in running)
    for [completion] in rig.finish([*late, rig.begin(LONG_PROMPT, seeds=[200])]):
        assert [span.version for span in completion.spans] == [version]
        assert worst_difference(rig.models[1], LONG_PROMPT, completion, version) < TOLERANCE_NATS
    rig.finish(running)


def test_a_request_frozen_before_its_first_token_starts_again_under_the_new_version(rig: EngineRig):
    rig.publish(rig.models[0])
    # Keeps blocks of the old weights alive, which the frozen request could start from.
    running = rig.begin(LONG_PROMPT, max_new_tokens=250)
    _wait_until_sampling(rig, 1)
    # Frozen engine: what enters now cannot sample before the weights change.
    rig.loop.run(rig.engine._live().pause_generation(mode="keep", clear_cache=False))
    assert not running.done()
    frozen = rig.begin(LONG_PROMPT, seeds=[2])
    _wait_until(lambda: rig.loop.run(rig.engine.health()).running == 2, what="the request to enter")
    version = rig.publish(rig.models[1], in_flight=True)
    [[completion], _] = rig.finish([frozen, running])
    assert [span.version for span in completion.spans] == [version]
    assert worst_difference(rig.models[1], LONG_PROMPT, completion, version) < TOLERANCE_NATS


def test_a_request_that_is_still_being_prepared_at_a_refit_starts_again_under_the_new_version(
    rig: EngineRig, monkeypatch: pytest.MonkeyPatch
):
    rig.publish(rig.models[0])
    # Keeps blocks of the old weights alive, which the late request could start from.
    running = rig.begin(LONG_PROMPT, max_new_tokens=250)
    _wait_until_sampling(rig, 1)
    # Frozen engine: what reaches it now cannot sample before the weights change.
    rig.loop.run(rig.engine._live().pause_generation(mode="keep", clear_cache=False))
    processor = rig.engine._live().input_processor
    prepare, seen = processor.process_inputs_async, []

    async def prepare_slowly(request_id, prompt, *args, **kwargs):
        seen.append(prompt["cache_salt"])
        await asyncio.sleep(1.0)  # as a thread would on a busy machine; pausing takes 20 ms
        return await prepare(request_id, prompt, *args, **kwargs)

    monkeypatch.setattr(processor, "process_inputs_async", prepare_slowly)
    late = rig.begin(LONG_PROMPT, seeds=[2])
    _wait_until(lambda: bool(seen), what="the request to be prepared")
    version = rig.publish(rig.models[1], in_flight=True)
    [[completion], _] = rig.finish([late, running])
    assert len(set(seen)) == 2, "the request did not start again under the new salt"
    assert [span.version for span in completion.spans] == [version]
    assert worst_difference(rig.models[1], LONG_PROMPT, completion, version) < TOLERANCE_NATS


def test_draining_gives_every_response_a_single_version(rig: EngineRig):
    old_version = rig.publish(rig.models[0])
    futures = [rig.begin([7, 8, 9 + i], seeds=[i], max_new_tokens=60) for i in range(20)]
    _wait_until_sampling(rig, 8)
    new_version = rig.publish(rig.models[1])
    completions = [completion for [completion] in rig.finish(futures)]
    versions = [[span.version for span in completion.spans] for completion in completions]
    assert {tuple(v) for v in versions} == {(old_version,), (new_version,)}
    for i, completion in enumerate(completions):
        version = completion.spans[0].version
        model = rig.models[version == new_version]
        assert worst_difference(model, [7, 8, 9 + i], completion, version) < TOLERANCE_NATS


def test_a_request_past_its_deadline_is_aborted_in_the_engine(rig: EngineRig):
    rig.publish(rig.models[0])
    with pytest.raises(GenerationError, match=r"2 of 2 requests unfinished after 0\.2 s"):
        rig.generate([1, 2, 3], seeds=[1, 2], max_new_tokens=500, deadline_s=0.2)
    assert rig.loop.run(rig.engine.health()).running == 0
    assert rig.engine._live().get_num_unfinished_requests() == 0


def test_a_cancelled_request_is_aborted_in_the_engine(rig: EngineRig):
    future = rig.begin([1, 2, 3], max_new_tokens=500)
    _wait_until_sampling(rig, 1)
    future.cancel()
    with pytest.raises(CancelledError):
        future.result(10)
    _wait_until(lambda: rig.loop.run(rig.engine.health()).running == 0, what="the request to leave")
    assert rig.engine._live().get_num_unfinished_requests() == 0


def test_a_core_in_a_thread_has_no_process_of_its_own(rig: EngineRig):
    assert rig.loop.run(rig.engine.pids()) == (os.getpid(),)


def test_a_prompt_longer_than_the_model_is_a_generation_error(rig: EngineRig):
    with pytest.raises(GenerationError, match="600 prompt tokens"):
        rig.generate([1] * 600)


def test_committing_weights_that_never_came_is_refused(rig: EngineRig):
    with pytest.raises(RefitError, match="has not arrived completely"):
        rig.loop.run(rig.engine.commit_refit(version=99, recompute_kv=True))
