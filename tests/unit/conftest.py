"""Unit tests load no Ray, vLLM or Megatron: neither when they are collected nor while they run."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

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
