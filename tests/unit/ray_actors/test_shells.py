"""What is written in an actor can only be tested with Ray, so an actor is a shell around plain Python."""

from __future__ import annotations

import ast
from pathlib import Path

import megatron_ppo.ray_actors

MOST_LINES = 40


def actors() -> dict[str, ast.ClassDef]:
    """By name, the classes of the modules that hold one actor each. Read, not imported: unit tests have no Ray."""
    folder = Path(megatron_ppo.ray_actors.__file__).parent
    return {
        node.name: node
        for path in folder.glob("*_actor.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef)
    }


def test_an_actor_is_a_shell_of_at_most_forty_lines() -> None:
    found = {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in actors().items()}
    assert found.keys() == {"CollectorActor", "EngineActor", "ReplayActor"}
    assert max(found.values()) <= MOST_LINES, found


def test_collector_and_buffer_actors_add_nothing_but_logs_and_signs_of_life() -> None:
    methods = {
        name: {item.name for item in node.body if isinstance(item, (ast.FunctionDef, ast.AsyncFunctionDef))}
        for name, node in actors().items()
    }
    assert methods["CollectorActor"] == {"__init__", "run"}
    assert methods["ReplayActor"] == {"__init__", "watch"}
