"""Bad input on several ranks: one message reaches the terminal, whichever rank finds the fault first."""

from __future__ import annotations

import pytest

from megatron_ppo.app import command


def refuse(monkeypatch: pytest.MonkeyPatch, rank: int) -> list[float]:
    waits: list[float] = []
    monkeypatch.setenv("RANK", str(rank))
    monkeypatch.setattr(command.time, "sleep", waits.append)
    assert command.main(["+experiment=cpu_smoke", "schedule.max_trajectory_age_stepz=1"]) == command.BAD_INPUT
    return waits


def test_rank_zero_says_what_is_wrong_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refuse(monkeypatch, rank=0) == []
    assert capsys.readouterr().err.count("max_trajectory_age_stepz") == 1


def test_another_rank_first_leaves_rank_zero_the_time_to_speak(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """torchrun ends all ranks once one has exited, so an early silent exit would cost the user the message."""
    assert refuse(monkeypatch, rank=1) == [command.RANK_ZERO_SPEAKS_S]
    # Torchrun has ended this rank by now where rank 0 found the same fault; where it did not, this rank says it.
    assert "rank 1: " in capsys.readouterr().err
