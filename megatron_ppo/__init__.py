"""Asynchronous reinforcement learning of language models on Megatron-Core, vLLM and Ray."""

__version__ = "0.1.0"
