"""Reward functions in processes: what hangs or dies is killed, told and replaced, and nothing is left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_ppo.data.sort3_5 import sort3_5_task
from megatron_ppo.protocol.errors import ConfigError, ScoringError
from megatron_ppo.protocol.trajectory import Prompt
from megatron_ppo.rewards.build import build_scorer
from megatron_ppo.rewards.process_pool import IsolatedScorer, ScorerPool, ScorerProcess
from megatron_ppo.rewards.worker import prompt_as_json, prompt_from_json

TROUBLESOME = "megatron_ppo.testing.troublesome_scorer.Troublesome"
LONG_S = 60.0  # far above what a test takes, also on a loaded machine; reaching it is a failure
SHORT_S = 0.5
BAD, GOOD = 1, 2


def prompt(ordinal: int) -> Prompt:
    return Prompt(
        ordinal=ordinal, token_ids=array("i", [5, 6]), text="größer", answer="4", metadata={"a": "1 2\n3"}
    )


@contextlib.contextmanager
def process(**kwargs: str | int) -> Iterator[ScorerProcess]:
    made = ScorerProcess(target=TROUBLESOME, kwargs={"ordinal": BAD, **kwargs})
    try:
        yield made
    finally:
        made.close()


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # a dead orphan that nobody has reaped yet


def until_dead(pid: int) -> None:
    deadline = time.monotonic() + LONG_S
    while is_alive(pid):
        assert time.monotonic() < deadline, f"process {pid} lives on"
        time.sleep(0.01)


def test_a_prompt_crosses_the_pipe_unchanged() -> None:
    assert prompt_from_json(prompt_as_json(prompt(3))) == prompt(3)


def test_a_verifier_in_a_process_gives_the_same_rewards() -> None:
    task = sort3_5_task(num_train=50, num_validation=20)
    here = build_scorer(task.reward.target, task.reward.kwargs)
    there = ScorerProcess(target=task.reward.target, kwargs=task.reward.kwargs)
    try:
        for one in task.validation_prompts(limit=20):
            answer = [int(part) for part in one.metadata["answer_token_ids"].split()]
            responses = [answer, answer[::-1], [2]]
            expected = [here(one, ids) for ids in responses]
            assert there.score(one, responses, deadline_s=LONG_S) == expected
            assert expected[0] == 1.0 and expected[2] == 0.0
    finally:
        there.close()


def test_a_signal_that_ends_the_run_does_not_end_scoring() -> None:
    with process(trouble="raise") as scorer:
        scorer.start()
        pid = scorer.pid
        assert pid is not None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            os.kill(pid, number)
        assert scorer.score(prompt(GOOD), [[7, 7]], deadline_s=LONG_S) == [2.0]
        assert scorer.pid == pid


def test_one_process_serves_many_calls_in_order() -> None:
    with process(trouble="raise") as scorer:
        pids = set()
        for size in (1, 3, 40_000):  # the last one is larger than a pipe
            assert scorer.score(prompt(GOOD), [[7] * size, [7]], deadline_s=LONG_S) == [float(size), 1.0]
            pids.add(scorer.pid)
        assert len(pids) == 1


def test_a_function_that_hangs_in_c_code_is_killed_at_its_deadline() -> None:
    with process(trouble="hang") as scorer:
        scorer.start()
        pid = scorer.pid
        assert pid is not None
        start = time.monotonic()
        with pytest.raises(
            ScoringError, match=r"prompt ordinal 1 took more than 0\.5 s; its process was killed"
        ):
            scorer.score(prompt(BAD), [[7]], deadline_s=SHORT_S)
        assert SHORT_S <= time.monotonic() - start < LONG_S / 2
        assert scorer.pid is None and not is_alive(pid)
        assert scorer.score(prompt(GOOD), [[7, 7]], deadline_s=LONG_S) == [2.0]


@pytest.mark.parametrize(("trouble", "fate"), [("crash", "signal SIGSEGV"), ("exit", "exit code 3")])
def test_a_function_that_ends_its_process_is_told_by_its_fate(trouble: str, fate: str) -> None:
    with process(trouble=trouble) as scorer:
        with pytest.raises(ScoringError, match=rf"prompt ordinal 1 ended its process \({fate}\)"):
            scorer.score(prompt(BAD), [[7]], deadline_s=LONG_S)
        assert scorer.score(prompt(GOOD), [[7]], deadline_s=LONG_S) == [1.0]


def test_a_function_that_raises_keeps_its_process() -> None:
    with process(trouble="raise") as scorer:
        with pytest.raises(ScoringError, match="ordinal 1 raised KeyError: 'no answer in the metadata'"):
            scorer.score(prompt(BAD), [[7]], deadline_s=LONG_S)
        pid = scorer.pid
        assert scorer.score(prompt(GOOD), [[7]], deadline_s=LONG_S) == [1.0]
        assert scorer.pid == pid


def test_what_a_function_prints_is_no_answer() -> None:
    with process(trouble="noise") as scorer:
        assert scorer.score(prompt(BAD), [[9, 9, 9]], deadline_s=LONG_S) == [3.0]
        assert scorer.score(prompt(GOOD), [[9]], deadline_s=LONG_S) == [1.0]


def test_a_process_that_stands_still_does_not_block_the_request() -> None:
    with process(trouble="raise") as scorer:
        scorer.start()
        assert scorer.pid is not None
        os.kill(scorer.pid, signal.SIGSTOP)
        with pytest.raises(ScoringError, match=r"took more than 0\.5 s"):
            scorer.score(prompt(GOOD), [[7] * 200_000], deadline_s=SHORT_S)  # larger than the pipe
        assert scorer.score(prompt(GOOD), [[7]], deadline_s=LONG_S) == [1.0]


def test_a_process_that_was_killed_while_idle_is_replaced_unnoticed() -> None:
    with process(trouble="raise") as scorer:
        scorer.start()
        assert scorer.pid is not None
        os.kill(scorer.pid, signal.SIGKILL)
        until_dead(scorer.pid)
        assert scorer.score(prompt(GOOD), [[7]], deadline_s=LONG_S) == [1.0]


def test_what_a_function_started_is_killed_with_it(tmp_path: Path) -> None:
    once = tmp_path / "once"
    with process(trouble="child", once=str(once)) as scorer:
        with pytest.raises(ScoringError, match="took more than"):
            scorer.score(prompt(BAD), [[7]], deadline_s=2.0)
        until_dead(int(Path(f"{once}.child").read_text(encoding="utf-8")))


def test_closing_ends_a_running_call() -> None:
    with process(trouble="hang") as scorer:
        scorer.start()
        threading.Timer(0.3, scorer.close).start()
        start = time.monotonic()
        with pytest.raises(ScoringError, match="ended its process"):
            scorer.score(prompt(BAD), [[7]], deadline_s=LONG_S)
        assert time.monotonic() - start < LONG_S / 2
        with pytest.raises(ScoringError, match="the run stops"):
            scorer.score(prompt(GOOD), [[7]], deadline_s=LONG_S)


def test_a_hanging_process_dies_with_the_process_that_started_it() -> None:
    code = (
        "import threading, time\n"
        "from array import array\n"
        "from megatron_ppo.protocol.trajectory import Prompt\n"
        "from megatron_ppo.rewards.process_pool import ScorerProcess\n"
        f"scorer = ScorerProcess(target={TROUBLESOME!r}, kwargs={{'trouble': 'hang', 'ordinal': 0}})\n"
        "scorer.start()\n"
        "print(scorer.pid, flush=True)\n"
        "scorer.score(Prompt(ordinal=0, token_ids=array('i'), text='', answer=''), [[7]], deadline_s=1000.0)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    try:
        pid = int(parent.stdout.readline())
        time.sleep(0.3)  # so that it hangs; without, the test would pass for a weaker reason
        assert is_alive(pid)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    until_dead(pid)


@pytest.mark.parametrize(
    ("target", "kwargs", "message"),
    [
        ("megatron_ppo.rewards.nothing.Here", {}, "cannot be imported"),
        (TROUBLESOME, {"wide": 3}, "does not accept"),
    ],
)
def test_a_verifier_that_cannot_be_built_is_a_configuration_error(
    target: str, kwargs: dict[str, int], message: str
) -> None:
    scorer = ScorerProcess(target=target, kwargs=kwargs)
    with pytest.raises(ConfigError, match=message):
        scorer.start()
    assert scorer.pid is None


def test_a_pool_scores_as_many_groups_at_once_as_it_has_processes() -> None:
    pool = ScorerPool(target=TROUBLESOME, kwargs={"trouble": "hang", "ordinal": BAD}, processes=2)
    failures: list[Exception] = []

    def hang() -> None:
        try:
            pool.score(prompt(BAD), [[7]], deadline_s=LONG_S)
        except ScoringError as error:
            failures.append(error)

    try:
        pool.start()
        stuck = threading.Thread(target=hang)
        stuck.start()
        time.sleep(0.2)
        assert pool.score(prompt(GOOD), [[7]], deadline_s=LONG_S) == [1.0]
        assert stuck.is_alive() and len(pool.pids) == 2
    finally:
        pool.close()
    stuck.join(LONG_S)
    assert len(failures) == 1 and pool.pids == ()


def test_an_isolated_scorer_tries_again_and_then_raises(tmp_path: Path) -> None:
    once = str(tmp_path / "once")
    scorer = IsolatedScorer(
        target=TROUBLESOME, kwargs={"trouble": "crash", "ordinal": BAD, "once": once}, deadline_s=LONG_S
    )
    try:
        assert scorer(prompt(BAD), [7, 7]) == 2.0
    finally:
        scorer.close()
    always = IsolatedScorer(
        target=TROUBLESOME, kwargs={"trouble": "crash", "ordinal": BAD}, deadline_s=LONG_S
    )
    try:
        with pytest.raises(ScoringError, match="SIGSEGV"):
            always(prompt(BAD), [7])
    finally:
        always.close()
