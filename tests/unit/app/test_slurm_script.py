"""The batch script of docs/operations.md, as it stands there, under a bash with another `python` and `scontrol`."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[3] / "docs" / "operations.md"
LAUNCHER = r"""#!/bin/bash
echo "$@" > arguments
trap 'echo USR1 >> got' USR1
trap 'echo TERM >> got' TERM
touch ready
until [ -s got ] || [ -e over ]; do sleep 0.02; done
sleep 0.2  # the rest of a step
echo saved >> got
exit "$LAUNCHER_EXIT"
"""


def documented_script() -> str:
    """The indented block that begins with the options for sbatch."""
    lines = iter(DOCS.read_text().splitlines())
    first = next(line for line in lines if line.startswith("    #SBATCH"))
    block = [first, *iter(lambda: next(lines), "")]
    return "\n".join(line.removeprefix("    ") for line in block) + "\n"


class Job:
    """The script in its own process group, which is all that Slurm could signal of it here."""

    def __init__(self, folder: Path, *, launcher_exit: int) -> None:
        self.folder = folder
        for name, text in (("python", LAUNCHER), ("scontrol", '#!/bin/bash\necho "$@" >> requeued\n')):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "job.sh").write_text(documented_script())
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        env = {**os.environ, "PATH": path, "SLURM_JOB_ID": "4711", "LAUNCHER_EXIT": str(launcher_exit)}
        self.process = subprocess.Popen(["bash", "job.sh"], cwd=folder, env=env, start_new_session=True)
        deadline = time.monotonic() + 20
        while not (folder / "ready").exists():
            assert time.monotonic() < deadline and self.process.poll() is None
            time.sleep(0.02)

    def read(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().split("\n")[:-1] if path.exists() else []


@pytest.fixture
def jobs() -> Iterator[list[Job]]:
    started: list[Job] = []
    yield started
    for job in started:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


@pytest.mark.parametrize("launcher_exit", [0, 1])
def test_a_batch_shell_that_is_told_tells_the_launcher_waits_for_its_save_and_requeues(
    tmp_path: Path, jobs: list[Job], launcher_exit: int
) -> None:
    jobs.append(job := Job(tmp_path, launcher_exit=launcher_exit))
    assert job.read("arguments")[0].startswith("scripts/launch.py ")
    job.process.send_signal(signal.SIGUSR1)
    job.process.wait(timeout=20)
    assert job.read("got") == ["USR1", "saved"]
    assert job.read("requeued") == ["requeue 4711"]


def test_a_preemption_that_signals_every_process_leaves_the_batch_shell_to_wait_and_requeue(
    tmp_path: Path, jobs: list[Job]
) -> None:
    jobs.append(job := Job(tmp_path, launcher_exit=1))
    os.killpg(job.process.pid, signal.SIGTERM)
    job.process.wait(timeout=20)
    got = job.read("got")
    assert (sorted(got[:-1]), got[-1]) == (["TERM", "USR1"], "saved")
    assert job.read("requeued") == ["requeue 4711"]


@pytest.mark.parametrize("launcher_exit", [0, 3])
def test_a_job_that_ends_by_itself_is_not_requeued_and_exits_as_its_launcher(
    tmp_path: Path, jobs: list[Job], launcher_exit: int
) -> None:
    jobs.append(job := Job(tmp_path, launcher_exit=launcher_exit))
    (tmp_path / "over").touch()
    assert job.process.wait(timeout=20) == launcher_exit
    assert job.read("requeued") == []
