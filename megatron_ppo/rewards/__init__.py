"""Verifiers: reward functions that check a response. One file each; stdlib, protocol and `tokenizers`."""
