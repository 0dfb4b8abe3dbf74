"""Command lines become jobs; the scripts work without torch and exit with the agreed status."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from composed import composed_values

from megatron_ppo.config.compose import CONFIG_DIR, CommandLine, group_choices, load, parse_command_line
from megatron_ppo.protocol.errors import ConfigError

ROOT = CONFIG_DIR.parent


def test_plain_overrides_are_one_job() -> None:
    line = parse_command_line(["+experiment=cpu_smoke", "run.seed=3"])
    assert line == CommandLine(jobs=(("+experiment=cpu_smoke", "run.seed=3"),))


def test_multirun_is_the_product_of_all_sweeps_in_order() -> None:
    line = parse_command_line(["-m", "+experiment=cpu_smoke", "run.seed=1,2", "loss.ratio_clip_min=0.1,0.2"])
    assert line.jobs == (
        ("+experiment=cpu_smoke", "run.seed=1", "loss.ratio_clip_min=0.1"),
        ("+experiment=cpu_smoke", "run.seed=1", "loss.ratio_clip_min=0.2"),
        ("+experiment=cpu_smoke", "run.seed=2", "loss.ratio_clip_min=0.1"),
        ("+experiment=cpu_smoke", "run.seed=2", "loss.ratio_clip_min=0.2"),
    )


def test_multirun_takes_ranges_and_patterns() -> None:
    line = parse_command_line(["--multirun", "+experiment=glob(*)", "run.seed=range(0,2)"])
    assert line.jobs == tuple(
        (f"+experiment={name}", f"run.seed={seed}") for name in group_choices("experiment") for seed in (0, 1)
    )


@pytest.mark.parametrize(
    ("words", "fragment"),
    [
        (["run.seed=1,2"], "run.seed=1,2: several values need -m"),
        (["-m", "+experiment=glob(no_such*)"], "matches nothing; available: "),
        (["--verbose"], "--verbose: unknown option; allowed: -m, --config-dir DIR"),
        (["--config-dir", "/nowhere"], "--config-dir: got '/nowhere', which is not an existing folder"),
        (["run.seed"], "run.seed"),
    ],
)
def test_command_line_that_cannot_be_read_is_refused(words: list[str], fragment: str) -> None:
    with pytest.raises(ConfigError, match=r"bad configuration") as caught:
        parse_command_line(words)
    assert fragment in str(caught.value)


def test_experiments_of_a_further_folder_can_be_chosen(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - cpu_smoke\n  - _self_\nrun:\n  name: mine\n  max_num_steps: 9\n"
    )
    (config,) = parse_command_line(["--config-dir", str(tmp_path), "+experiment=mine"]).load()
    assert (config.run.name, config.run.max_num_steps) == ("mine", 9)
    assert config.algorithm == load(["+experiment=cpu_smoke"]).algorithm


def test_a_bad_second_job_is_found_before_the_first_can_start() -> None:
    with pytest.raises(ConfigError, match=r"algorithm\.ppo_epochs: got 0"):
        parse_command_line(["-m", "+experiment=cpu_smoke", "algorithm.ppo_epochs=1,0"]).load()


def test_overrides_replace_the_values_of_an_experiment() -> None:
    values = composed_values(
        "+experiment=cpu_smoke", "run.seed=7", "schedule=synchronous", "checkpoint.period=0"
    )
    assert values["run"]["seed"] == 7
    assert values["checkpoint"]["period"] == 0
    # A group that is chosen on the command line is merged below the experiment, which sets no age.
    assert values["schedule"]["max_trajectory_age_steps"] == 0


def _check_config(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "scripts/check_config.py", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_check_config_prints_what_follows_from_a_configuration() -> None:
    done = _check_config("+experiment=megatron_40step", "--world-size", "2", "--show")
    assert done.returncode == 0, done.stderr
    assert "tp=2 pp=1 cp=1 dp=1" in done.stdout
    assert "max_trajectory_age_steps: 1" in done.stdout
    assert done.stderr == ""


def test_check_config_exits_with_two_and_one_message_on_bad_input() -> None:
    done = _check_config("+experiment=megatron_40step", "inference.top_p=0.9")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "inference.top_p: got 0.9; must be 1.0" in done.stderr


def test_checking_a_configuration_loads_no_torch_ray_vllm_or_megatron() -> None:
    program = (
        "import sys\n"
        "from megatron_ppo.config.checks import derive\n"
        "from megatron_ppo.config.compose import load\n"
        "derive(load(['+experiment=megatron_40step']), 2)\n"
        "print(sorted({'torch', 'ray', 'vllm', 'megatron', 'transformers', 'numpy'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert done.stdout.strip() == "[]"
