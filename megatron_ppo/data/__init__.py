"""Prompts in, training batches out."""
