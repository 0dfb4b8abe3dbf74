"""A kind of fault that is on has to happen, or the run fails as by a gate."""

from __future__ import annotations

from megatron_ppo.protocol.faults import FaultKind
from megatron_ppo.telemetry.gate_check import gates_of, survived_faults
from megatron_ppo.telemetry.gates import evaluate

CHAOS = {"seed": 3, "kill_engine": 0.1, "hang_reward": 0.0, "delay_refit_s": 0.5}
ROWS = [
    {"step": 1, "chaos/kill_engine_faults": 0.0, "chaos/delay_refit_faults": 1.0},
    {"step": 2, "chaos/kill_engine_faults": 2.0, "chaos/delay_refit_faults": 2.0},
]


def test_each_kind_that_is_on_is_a_gate_besides_those_that_are_declared() -> None:
    declared = {"up": {"metric": "train/reward", "op": ">=", "value": 0.5}}
    names = [gate.name for gate in gates_of({"gates": declared, "chaos": CHAOS})]
    assert names == ["up", "kill_engine_happened", "delay_refit_happened"]
    assert [gate.name for gate in gates_of({"gates": declared})] == ["up"]


def test_a_kind_that_happened_passes_and_one_that_never_did_fails() -> None:
    gates = gates_of({"chaos": CHAOS})
    assert [result.passed for result in evaluate(gates, ROWS)] == [True, True]
    assert [result.passed for result in evaluate(gates, ROWS[:1])] == [False, True]
    assert [result.passed for result in evaluate(gates, [{"step": 1}])] == [False, False]


def test_what_was_survived_is_the_last_count() -> None:
    assert survived_faults(ROWS) == {FaultKind.KILL_ENGINE: 2, FaultKind.DELAY_REFIT: 2}
    assert survived_faults([{"step": 1}]) == {}
