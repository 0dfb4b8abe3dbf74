"""The benchmarks measure configurations that exist, and their tables can be pasted into a document."""

from __future__ import annotations

import runpy
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import logprob_memory
from benchmarks.report import machine, show_table
from benchmarks.step_time import DROP, SKIP, WORKLOADS, words_of
from megatron_ppo.config.checks import derive
from megatron_ppo.config.compose import load


@pytest.mark.parametrize("age", [0, 1])
@pytest.mark.parametrize("name", list(WORKLOADS))
def test_a_measured_run_is_valid_and_pauses_for_nothing(name: str, age: int) -> None:
    workload = WORKLOADS[name]
    config = load(words_of(workload, steps=workload.steps, age=age))
    derived = derive(config, 1)
    assert config.run.max_num_steps == SKIP + workload.steps + DROP
    assert config.validation.period == config.checkpoint.period == 0
    assert derived.schedule.version_at(1) == 1, "every measured step has to train and publish the policy"
    assert derived.schedule.frontier(1) == 1 + age


@pytest.mark.parametrize("name", list(WORKLOADS))
def test_one_round_of_the_engine_holds_all_groups_of_a_step(name: str) -> None:
    """The busy time is read from the first start and the last end of a step's groups, so they have to overlap."""
    workload = WORKLOADS[name]
    derived = derive(load(words_of(workload, steps=1, age=1)), 1)
    groups = derived.sequences_per_step // load(list(workload.words)).algorithm.num_generations_per_prompt
    assert derived.max_concurrent_groups >= groups


def test_the_30m_workload_has_thirty_million_parameters() -> None:
    recipe = load(list(WORKLOADS["30m"].words)).policy.model.recipe
    keys = recipe.num_kv_heads * recipe.hidden_size // recipe.num_heads
    attention = 2 * recipe.hidden_size**2 + 2 * recipe.hidden_size * keys
    layer = attention + 3 * recipe.hidden_size * recipe.ffn_hidden_size
    assert 28e6 < recipe.num_layers * layer < 32e6


def test_a_table_has_one_width_and_a_rule_of_markdown(capsys: pytest.CaptureFixture[str]) -> None:
    show_table("seconds", ["", "async", "sync"], [["step", "1.0", "12.25"], ["a longer name", "3", "4"]])
    title, blank, *table = capsys.readouterr().out.strip("\n").split("\n")
    assert (title, blank) == ("seconds", "")
    assert len({len(line) for line in table}) == 1
    assert table[1].replace("-", "") == "||:|:|"


def test_the_machine_is_stated() -> None:
    facts = machine()
    assert set(facts) >= {"date", "cpu", "cores", "memory", "load", "torch"}


@pytest.mark.parametrize("name", ["step_time", "whole_run", "logprob_memory"])
def test_help_needs_no_run(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    monkeypatch.delitem(sys.modules, f"benchmarks.{name}", raising=False)  # it runs as if it were the first
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    assert ended.value.code == 0
    assert f"benchmarks.{name}" in capsys.readouterr().out


def test_chunks_of_log_probs_take_a_fraction_of_the_memory_of_all_logits() -> None:
    sizes = {"tokens": 1024, "vocabulary": 32_768, "hidden": 16, "precision": "fp32"}
    cases = [logprob_memory.Case(kind="training", chunk=chunk, **sizes) for chunk in (0, 32)]
    with ThreadPoolExecutor(2) as pool:  # each measures a process of its own
        whole, chunked = pool.map(logprob_memory.run, cases)
    # float32 sums of a few thousand terms in another order.
    assert chunked.mean_logprob == pytest.approx(whole.mean_logprob, rel=1e-5)
    # Whole: logits, their gradient and a working copy, 128 MiB each. Chunks: 4 MiB each, and the weight's gradient.
    assert whole.peak_bytes > 2 * 128 * 2**20
    # The rest is the C library keeping freed buffers.
    assert chunked.peak_bytes < whole.peak_bytes / 4
