"""The tasks by name, and the training stream of a task.

Driven by the app, the collector's process and `warm_start`. A task's module is imported only when it is
asked for, so that a run of one task does not need the packages of another.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

from megatron_ppo.data.prompts import ShuffledPrompts
from megatron_ppo.data.task import TaskSpec
from megatron_ppo.protocol.errors import ConfigError

TaskOption = str | int | float | bool | Path | None

TASKS = {
    "sort3_5": "megatron_ppo.data.sort3_5.sort3_5_task",
    "count_long": "megatron_ppo.data.count_long.count_long_task",
    "chain_sum": "megatron_ppo.data.chain_sum.chain_sum_task",
    "gsm8k": "megatron_ppo.data.gsm8k.gsm8k_task",
}


def build_task(task: str, **options: TaskOption) -> TaskSpec:
    """The task `task`: a name of `TASKS`, or the dotted name of a function that returns a TaskSpec.

    Raises: ConfigError for an unknown name or an option that the task does not take.
    """
    builder = _builder(task)
    accepted = inspect.signature(builder).parameters
    for option in options:
        if option not in accepted:
            raise ConfigError(f"data.{option} is no option of task {task!r}; it takes {', '.join(accepted)}")
    return builder(**options)


def takes_option(task: str, option: str) -> bool:
    """Whether `build_task(task, ...)` has an option of that name. Raises: ConfigError for an unknown task."""
    return option in inspect.signature(_builder(task)).parameters


def _builder(task: str) -> Callable[..., TaskSpec]:
    dotted = TASKS.get(task, task)
    module_name, _, function_name = dotted.rpartition(".")
    if not module_name:
        close = difflib.get_close_matches(task, TASKS, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(f"data.task {task!r} is unknown; known: {', '.join(sorted(TASKS))}{hint}")
    try:
        builder: Callable[..., TaskSpec] = getattr(importlib.import_module(module_name), function_name)
    except (ModuleNotFoundError, AttributeError) as error:
        raise ConfigError(f"data.task {task!r} cannot be imported: {error}") from error
    return builder


def train_prompts(*, task: str, stream_seed: int, **options: TaskOption) -> ShuffledPrompts:
    """The endless training stream of a task; what the collector's process builds.

    Args:
        stream_seed: seed of the order (the run's seed); `seed` among the options is the task's own.
    """
    return ShuffledPrompts(examples=build_task(task, **options).train, seed=stream_seed)
