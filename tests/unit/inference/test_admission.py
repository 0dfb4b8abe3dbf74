"""The admission gate: limits, order, and what closing and cancelling do to those in front of it."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ppo.inference.admission import AdmissionGate
from megatron_ppo.protocol.errors import WaitTimeoutError


async def _settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class _Visitors:
    """Tasks that enter the gate and stay until they are told to leave."""

    def __init__(self, gate: AdmissionGate) -> None:
        self.gate = gate
        self.entered: list[int] = []
        self.leave: dict[int, asyncio.Event] = {}
        self.tasks: dict[int, asyncio.Task[None]] = {}

    def arrive(self, name: int) -> None:
        self.leave[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._visit(name))

    async def _visit(self, name: int) -> None:
        async with self.gate.slot():
            self.entered.append(name)
            await self.leave[name].wait()


def test_a_new_gate_is_closed():
    async def scenario() -> None:
        gate = AdmissionGate(2)
        visitors = _Visitors(gate)
        visitors.arrive(0)
        await _settle()
        assert (gate.running, gate.waiting, gate.is_open) == (0, 1, False)
        gate.open()
        await _settle()
        assert visitors.entered == [0]
        visitors.leave[0].set()
        await visitors.tasks[0]

    asyncio.run(scenario())


def test_at_most_the_limit_is_inside_and_the_first_to_come_is_the_first_to_enter():
    async def scenario() -> None:
        gate = AdmissionGate(2)
        gate.open()
        visitors = _Visitors(gate)
        for name in range(5):
            visitors.arrive(name)
        await _settle()
        assert visitors.entered == [0, 1]
        for name in range(5):
            visitors.leave[name].set()
            await _settle()
        assert visitors.entered == [0, 1, 2, 3, 4]
        assert (gate.running, gate.waiting) == (0, 0)

    asyncio.run(scenario())


def test_closing_keeps_those_inside_and_lets_none_in_until_it_opens():
    async def scenario() -> None:
        gate = AdmissionGate(1)
        gate.open()
        visitors = _Visitors(gate)
        visitors.arrive(0)
        visitors.arrive(1)
        await _settle()
        gate.close()
        visitors.leave[0].set()
        await gate.drained(timeout_s=1)
        await _settle()
        assert visitors.entered == [0]
        gate.open()
        await _settle()
        assert visitors.entered == [0, 1]
        visitors.leave[1].set()
        await visitors.tasks[1]

    asyncio.run(scenario())


def test_a_drain_that_takes_too_long_says_how_many_are_left():
    async def scenario() -> None:
        gate = AdmissionGate(1)
        gate.open()
        visitors = _Visitors(gate)
        visitors.arrive(0)
        await _settle()
        with pytest.raises(WaitTimeoutError, match="1 running requests"):
            await gate.drained(timeout_s=0.01)
        visitors.leave[0].set()
        await visitors.tasks[0]

    asyncio.run(scenario())


def test_a_limit_below_one_is_refused():
    with pytest.raises(ValueError, match="got 0"):
        AdmissionGate(0)


_actions = st.lists(
    st.one_of(
        st.just(("arrive", 0)),
        st.tuples(st.just("leave"), st.integers(0, 30)),
        st.tuples(st.just("cancel"), st.integers(0, 30)),
        st.just(("open", 0)),
        st.just(("close", 0)),
    ),
    max_size=40,
)


@given(limit=st.integers(1, 3), actions=_actions, settle=st.booleans())
def test_whatever_happens_no_slot_is_lost_and_the_limit_holds(
    limit: int, actions: list[tuple[str, int]], settle: bool
):
    async def scenario() -> None:
        gate = AdmissionGate(limit)
        visitors = _Visitors(gate)
        for action, number in actions:
            known = list(visitors.tasks)
            before = gate.running
            if action == "arrive":
                visitors.arrive(len(known))
            elif action in ("open", "close"):
                getattr(gate, action)()
            elif known and action == "leave":
                visitors.leave[known[number % len(known)]].set()
            elif known:
                visitors.tasks[known[number % len(known)]].cancel()
            if settle or number % 2:
                await _settle()
            assert gate.running <= limit
            assert gate.is_open or gate.running <= before
        gate.open()
        for event in visitors.leave.values():
            event.set()
        everyone = asyncio.gather(*visitors.tasks.values(), return_exceptions=True)
        outcomes = await asyncio.wait_for(everyone, 5)
        assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes)
        assert (gate.running, gate.waiting) == (0, 0)
        async with gate.slot():
            assert gate.running == 1

    asyncio.run(scenario())
