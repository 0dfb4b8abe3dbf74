"""Environment variables that a process needs before it imports vLLM; whoever starts the process sets them."""

from __future__ import annotations


def engine_environment(*, device_type: str) -> dict[str, str]:
    """Variables for an engine process on "cpu" or "cuda"; vLLM reads them while it is imported."""
    common = {
        "VLLM_PLUGINS": "",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        # The workers of an engine are on one host and meet there; vLLM would take the address of an interface.
        "VLLM_HOST_IP": "127.0.0.1",
        # The engine core then holds its only worker itself: two processes instead of three.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if device_type != "cpu":
        return common
    return common | {
        # GNU OpenMP barriers spin: with more threads than free cores a decode step is 20 times slower.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        # Three sampler helpers are compiled even in eager mode, which costs 5-10 s of C++ compiler.
        "TORCH_COMPILE_DISABLE": "1",
    }
