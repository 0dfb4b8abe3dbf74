"""The executor of an engine of several workers: a call gets the workers' answers to itself, whatever happened before.

vLLM's takes the answers of a call in the order of the workers and stops at the first failure or timeout. The others'
answers stay in their queues and are taken for those of the next call: the repair of a failed refit fails with the old
error, and from then on a call returns before those workers are done (vllm 0.32 and 0.33, vllm issue 49972).

Imported in the engine core: the class travels in the engine's configuration. Chosen by `inference.vllm_adapter`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor


class AnsweringExecutor(MultiprocExecutor):
    """vLLM's executor of worker processes. What differs is that answers that nobody took are dropped."""

    def _init_executor(self) -> None:
        super()._init_executor()
        self.response_mqs = [_Answers(queue) for queue in self.response_mqs]

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **options: Any,
    ) -> Any:
        """See vLLM's."""
        future: FutureWrapper = super().collective_rpc(
            method, timeout, args, kwargs, non_block=True, unique_reply_rank=unique_reply_rank, **options
        )
        get_response = future.get_response
        asked = self.response_mqs if unique_reply_rank is None else [self.response_mqs[unique_reply_rank]]

        def get() -> Any:
            taken = [answers.taken for answers in asked]
            try:
                return get_response()
            except Exception:
                for answers, before in zip(asked, taken, strict=True):
                    answers.left += answers.taken == before
                raise

        future.get_response = get
        return future if non_block else future.result()


class _Answers:
    """The queue of one worker's answers. `taken` counts those that were taken, `left` those that are to be dropped."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self.taken = 0
        self.left = 0

    def dequeue(self, *args: Any, **kwargs: Any) -> Any:
        """The answer to the call that has just been made."""
        while self.left:
            self._queue.dequeue(*args, **kwargs)
            self.left -= 1
        answer = self._queue.dequeue(*args, **kwargs)
        self.taken += 1
        return answer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)
