"""Unit tests load no Ray, vLLM or Megatron: neither when they are collected nor while they run.

And they do not wait for what they do not test: the disk, and the composition of the same configuration once more.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from megatron_ppo.config import compose

FORBIDDEN = ("ray", "vllm", "megatron")


def _loaded() -> set[str]:
    return {name for name in FORBIDDEN if name in sys.modules}


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
    """Fail the collection of a module whose import loads a forbidden package."""
    before = _loaded()
    report = yield
    added = _loaded() - before
    if added and report.passed:
        report.outcome = "failed"
        report.longrepr = f"collecting {collector.nodeid} imported {sorted(added)}; unit tests must not"
        report.result = []
    return report


@pytest.fixture(autouse=True, scope="module")
def _no_heavy_imports(request: pytest.FixtureRequest) -> Iterator[None]:
    before = _loaded()
    yield
    added = _loaded() - before
    assert not added, f"tests of {request.node.nodeid} imported {sorted(added)}; unit tests must not"


@pytest.fixture(autouse=True, scope="session")
def _compose_once() -> Iterator[None]:
    """A composition takes a quarter of a second; without a folder of the test's own, the same words give the same."""
    compose_values = compose.compose_values
    composed = cache(lambda *words: compose_values(words))

    def values(overrides: Sequence[str] = (), *, extra_dirs: Sequence[Path] = ()) -> dict[str, Any]:
        if extra_dirs:
            return compose_values(overrides, extra_dirs=extra_dirs)
        return copy.deepcopy(composed(*overrides))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compose, "compose_values", values)
        yield


@pytest.fixture(autouse=True, scope="session")
def _no_waits_for_the_disk() -> Iterator[None]:
    """A third of the time of a save is the disk's latency. Tests of torn files cut them by themselves; those of what is
    flushed, and when, record it (`disk_events`).
    """

    def fsync(descriptor: int) -> None:
        os.fstat(descriptor)  # a descriptor that is not open stays an error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        yield
