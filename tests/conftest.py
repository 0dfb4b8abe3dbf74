"""What every test gets: one thread per process, no network, and skips that name the missing thing."""

from __future__ import annotations

import importlib.util
import os

import pytest
from hypothesis import settings

# Set before anything imports torch, ray or vllm; child processes inherit them. With more threads than free
# cores, OpenMP barriers spin, which turns milliseconds into tenths of a second.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

# A time limit per example would judge the machine and its load; pytest has one per test.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")

NEEDED_PACKAGE = {"vllm": "vllm", "megatron": "megatron.core", "ray": "ray"}


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # the parent of a dotted name is missing
        return False


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a marked test whose requirement is missing here."""
    for marker, package in NEEDED_PACKAGE.items():
        if item.get_closest_marker(marker) is not None and not _is_installed(package):
            pytest.skip(f"needs the package {package}, which is not installed")
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device, and torch sees none")
