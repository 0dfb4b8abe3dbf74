"""The display: plain lines in a file, a live table on a terminal, and never an error for the run."""

from __future__ import annotations

import io
import os
import pty
import re
import termios
import threading

import pytest

from megatron_ppo.telemetry.display import ProgressDisplay
from megatron_ppo.telemetry.metrics import Row


def row(step: int, **metrics: float | str) -> Row:
    return {
        "step": step,
        "time_unix_s": 0.0,
        "train/reward": step / 100,
        "age/max_versions": 1,
        "timing/train/total_step_time": 6.0,
        "bottleneck": "generation",
        **metrics,
    }


def test_plain_lines_show_all_seven_numbers_on_a_stream_that_is_no_terminal() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, run_name="sort", max_num_steps=40)
    display.note("starting the engine")
    display.start(next_step=0)
    display.write({"step": 0, "time_unix_s": 0.0, "validation/accuracy": 0.4})
    for step in range(1, 11):
        display.write(row(step))
    display.write(row(11, **{"timing/train/total_step_time": 26.0, "validation/accuracy": 0.8125}))
    display.close()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "starting the engine"
    assert lines[1] == "step 0/40 | reward - | val 0.400 | age - | time - | bottleneck - | eta -"
    # The last validation stays visible on steps without one. ETA: 39 steps of 6 s = 3:54.
    assert lines[2] == (
        "step 1/40 | reward 0.010 | val 0.400 | age 1 | time 6.0 s | bottleneck generation | eta 3:54"
    )
    # Mean of the last ten steps: (9 · 6 + 26) / 10 = 8 s; 29 steps are left: 232 s.
    assert lines[-1] == (
        "step 11/40 | reward 0.110 | val 0.812 | age 1 | time 26.0 s | bottleneck generation | eta 3:52"
    )
    assert len(lines) == 13
    assert "\x1b" not in stream.getvalue()


def test_resumed_run_says_where_it_continues() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, run_name="sort", max_num_steps=40)
    display.start(next_step=11)
    assert stream.getvalue() == "continuing after step 10 of 40\n"


def test_long_times_are_shown_in_hours() -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, run_name="long", max_num_steps=1001)
    display.write(row(1, **{"timing/train/total_step_time": 3.7}))
    assert stream.getvalue().rstrip().endswith("eta 1:01:40")


def display_width(text: str) -> int:
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    return max(len(line) for line in re.split(r"[\r\n]+", plain))


@pytest.mark.parametrize("live", [None, False])
def test_terminal_gets_a_live_table_unless_plain_lines_are_asked_for(live: bool | None) -> None:
    reader, writer = pty.openpty()
    # The stream's own size counts, not that of the process's descriptors 0 to 2, which are log files.
    termios.tcsetwinsize(writer, (24, 93))
    shown = bytearray()

    def drain() -> None:
        while True:
            try:
                chunk = os.read(reader, 65536)
            except OSError:  # EIO: the other end is closed
                return
            if not chunk:
                return
            shown.extend(chunk)

    thread = threading.Thread(target=drain)
    thread.start()
    with open(writer, "w", encoding="utf-8") as terminal:
        display = ProgressDisplay(terminal, run_name="sort [a]", max_num_steps=2, live=live)
        display.start(next_step=1)
        display.note("collecting")
        display.write(row(1))
        display.write(row(2))
        display.show("gates follow")
        display.show("x" * 200)
        display.close()
        assert not display.broken
    thread.join(timeout=10)
    os.close(reader)
    text = shown.decode()
    assert display_width(text) == 93
    assert ("\x1b[" in text) is (live is None)
    assert "0.020" in text and "generation" in text and "gates follow" in text
    if live is None:
        assert "sort [a]" in text and "validation" in text and "collecting (" in text


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("error", [BrokenPipeError("closed"), OSError(5, "Input/output error")])
def test_a_closed_terminal_switches_the_display_off_and_the_run_goes_on(
    live: bool, error: OSError, caplog: pytest.LogCaptureFixture
) -> None:
    class ClosedTerminal(io.StringIO):
        closed_by_user = False

        def write(self, text: str) -> int:
            if self.closed_by_user:
                raise error
            return super().write(text)

    stream = ClosedTerminal()
    display = ProgressDisplay(stream, run_name="sort", max_num_steps=2, live=live)
    assert not display.broken
    stream.closed_by_user = True
    for step in (1, 2):
        display.write(row(step))
    display.note("validating")
    display.close()
    assert display.broken
    assert caplog.text.count("the terminal is gone") == 1
    assert "Traceback" not in caplog.text


def test_a_row_that_cannot_be_shown_switches_the_display_off_and_the_run_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stream = io.StringIO()
    display = ProgressDisplay(stream, run_name="sort", max_num_steps=2)
    display.write({"time_unix_s": 0.0})
    display.write(row(1))
    display.close()
    assert display.broken
    assert stream.getvalue() == ""
    assert "KeyError: 'step'" in caplog.text
