"""Moves bytes between processes; knows tensors and stores, not models, vLLM or Ray."""
