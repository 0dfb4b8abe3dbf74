"""Test modules are imported by their bare names: of two with one name, pytest cannot collect the second."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_no_two_test_modules_have_one_name() -> None:
    names = Counter(path.name for path in TESTS.rglob("test_*.py"))
    assert names["test_module_names.py"] == 1
    assert [name for name, count in names.items() if count > 1] == []
