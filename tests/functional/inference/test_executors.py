"""Calls to several workers of an engine: no answer goes to another call, no message waits for a lost wake-up."""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm]


class _Queue:
    """Messages in order. Raises: TimeoutError when there is none."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def enqueue(self, message: Any) -> None:
        self.messages.append(message)

    def dequeue(self, timeout: float | None = None) -> Any:
        if not self.messages:
            raise TimeoutError
        return self.messages.popleft()


def _executor(queues: list[_Queue]) -> Any:
    """vLLM's executor around two queues of answers, without worker processes."""
    from megatron_ppo.inference.answering_executor import AnsweringExecutor, _Answers

    executor: Any = AnsweringExecutor.__new__(AnsweringExecutor)
    executor.rpc_broadcast_mq = _Queue()
    executor.response_mqs = [_Answers(queue) for queue in queues]
    executor.futures_queue = deque()
    executor.is_failed = False
    return executor


def _answer(queues: list[_Queue], *answers: tuple[bool, str]) -> None:
    from vllm.v1.executor.multiproc_executor import WorkerProc

    status = WorkerProc.ResponseStatus
    for queue, (good, text) in zip(queues, answers, strict=True):
        queue.enqueue((status.SUCCESS if good else status.FAILURE, text))


@pytest.mark.parametrize("non_block", [False, True])
@pytest.mark.parametrize("second", [True, False])
def test_a_call_after_a_failed_one_gets_its_own_answers(second: bool, non_block: bool) -> None:
    def call(**options: Any) -> Any:
        result = executor.collective_rpc("method", non_block=non_block, **options)
        return result.result() if non_block else result

    queues = [_Queue(), _Queue()]
    executor = _executor(queues)
    for _ in range(2):
        _answer(queues, (False, "broken"), (second, "of the broken call"))
        with pytest.raises(RuntimeError, match="broken"):
            call()
    _answer(queues, (True, "first"), (True, "second"))
    assert call() == ["first", "second"]
    _answer(queues, (True, "first"), (True, "alone"))
    assert call(unique_reply_rank=1) == "alone"
    assert queues[0].messages.pop()[1] == "first"


def test_an_answer_that_comes_after_the_timeout_is_not_the_next_calls() -> None:
    queues = [_Queue(), _Queue()]
    executor = _executor(queues)
    _answer(queues[:1], (True, "in time"))
    with pytest.raises(TimeoutError):
        executor.collective_rpc("method", timeout=0.1)
    _answer(queues[1:], (True, "late"))
    _answer(queues, (True, "first"), (True, "second"))
    assert executor.collective_rpc("method", timeout=0.1) == ["first", "second"]


def test_a_lost_wake_up_holds_no_message_up(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.device_communicators import shm_broadcast

    import megatron_ppo.inference.sleeping_executor  # noqa: F401  changes how readers wait

    monkeypatch.setattr(shm_broadcast.SpinCondition, "notify", lambda self: None)
    monkeypatch.setattr(shm_broadcast, "SHM_READER_RECHECK_INTERVAL_MS", 600_000)
    writer = shm_broadcast.MessageQueue(n_reader=1, n_local_reader=1)
    with ThreadPoolExecutor(1) as pool:
        joining = pool.submit(shm_broadcast.MessageQueue.create_from_handle, writer.export_handle(), 0)
        reader = joining.result(30)
        ready = pool.submit(reader.wait_until_ready)
        writer.wait_until_ready()
        ready.result(30)
        for message, pause_s in enumerate((0.0, 0.01, 0.2)):  # while it looks often, and while it does seldom
            reading = pool.submit(reader.dequeue, 60.0)
            time.sleep(pause_s)
            writer.enqueue(message)
            assert reading.result(30) == message
