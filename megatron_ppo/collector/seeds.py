"""Sampling seeds: a pure function of what is sampled; a prompt that is generated again gets the same seed."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, ordinal: int, sample: int) -> int:
    """Seed in [0, 2**63), which engines accept, of the `sample`-th response to the prompt `ordinal`."""
    digest = hashlib.blake2b(f"{run_seed}/{ordinal}/{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
