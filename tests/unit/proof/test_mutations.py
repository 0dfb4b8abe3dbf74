"""The list of mistakes fits the code as it is. That their tests notice them is shown by `make proof`."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from proof_mutations import MUTATIONS, Mutation, mutated

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name.replace(" ", "-"))
def test_mistake_can_be_made_and_its_test_exists(mutation: Mutation) -> None:
    source = (ROOT / mutation.file).read_text(encoding="utf-8")
    broken = mutated(source, mutation)
    assert ast.dump(ast.parse(broken)) != ast.dump(ast.parse(source))
    path, _, name = mutation.test.partition("::")
    tree = ast.parse((ROOT / "tests" / "unit" / path).read_text(encoding="utf-8"))
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_text_that_is_not_there_exactly_once_is_refused() -> None:
    with pytest.raises(ValueError, match="occurs 2 times"):
        mutated("a a", Mutation(name="n", file="f", before="a", after="b", test="t"))
