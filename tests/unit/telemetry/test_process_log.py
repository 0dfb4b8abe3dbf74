"""Redirection of a whole process, each case in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PRELUDE = """
import gc, logging, os, sys
from pathlib import Path
from megatron_ppo.telemetry.process_log import redirect_process_output
path = Path(sys.argv[1])
"""


def run(code: str, log: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + code, str(log)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


NOISE = """
print("python out"); print("python err", file=sys.stderr)
os.write(1, b"c out\\n"); os.write(2, b"c err\\n")
os.system("echo child out; echo child err >&2")
logging.getLogger("lib").info("logged")
"""
NOISE_WORDS = ("python out", "python err", "c out", "c err", "child out", "child err", "INFO")


def test_everything_goes_to_the_log_and_the_returned_stream_to_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "logs" / "rank_0.log"
    done = run(f"terminal = redirect_process_output(path)\nprint('shown', file=terminal)\n{NOISE}", log)
    assert (done.returncode, done.stdout, done.stderr) == (0, "shown\n", "")
    text = log.read_text()
    for word in NOISE_WORDS:
        assert word in text, word
    assert "lib: logged" in text


def test_closing_restores_streams_children_and_logging(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    code = """
print("before")
logging.basicConfig(format="root %(message)s", level=logging.WARNING)
with redirect_process_output(path, level=logging.DEBUG) as terminal:
    print("hidden"); logging.debug("detail")
terminal.close()
print("after"); os.system("echo child"); logging.debug("no"); logging.warning("yes")
"""
    done = run(code, log)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == ["after", "before", "child"]
    assert done.stderr == "root yes\n"
    assert "hidden" in log.read_text() and "detail" in log.read_text()
    assert "after" not in log.read_text()


def test_an_actor_may_ignore_the_returned_stream(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    done = run(f"redirect_process_output(path)\ngc.collect()\n{NOISE}", log)
    assert (done.stdout, done.stderr) == ("", "")
    assert all(word in log.read_text() for word in NOISE_WORDS)


def test_an_uncaught_error_leaves_its_traceback_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    done = run("terminal = redirect_process_output(path)\nraise RuntimeError('engine died')", log)
    assert done.returncode == 1
    assert "RuntimeError: engine died" in log.read_text()


def test_lines_printed_before_a_kill_are_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "actor.log"
    done = run("t = redirect_process_output(path)\nprint('last words')\nos.kill(os.getpid(), 9)", log)
    assert done.returncode == -9
    assert log.read_text() == "last words\n"


def test_redirecting_again_appends_and_leaks_no_descriptor(tmp_path: Path) -> None:
    log = tmp_path / "rank_0.log"
    code = """
count = lambda: len(os.listdir("/proc/self/fd"))
before = count()
for job in range(5):
    with redirect_process_output(path):
        print("job", job)
print(count() - before)
"""
    done = run(code, log)
    assert done.stdout == "0\n", done.stderr
    assert log.read_text().splitlines() == [f"job {job}" for job in range(5)]


@pytest.mark.parametrize("other", ["io.StringIO()", "open(os.devnull, 'w')"])
def test_a_replaced_python_stream_is_redirected_too(tmp_path: Path, other: str) -> None:
    log = tmp_path / "rank_0.log"
    code = f"""
import io
mine = sys.stdout = {other}
with redirect_process_output(path):
    print("hidden")
assert sys.stdout is mine
"""
    done = run(code, log)
    assert done.returncode == 0, done.stderr
    assert log.read_text() == "hidden\n"


def test_a_log_that_cannot_be_opened_redirects_nothing(tmp_path: Path) -> None:
    code = """
try:
    redirect_process_output(path)
except OSError as error:
    print("refused", error.strerror)
"""
    done = run(code, tmp_path)
    assert done.stdout == "refused Is a directory\n"
