"""Sampling seeds: a pure function of what is sampled; a prompt that is generated again gets the same seed."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, ordinal: int, sample: int, *, step: int | None = None) -> int:
    """Seed in [0, 2**63), which engines accept, of the `sample`-th response to the prompt `ordinal`.

    Args:
        step: the training step that the response is for, in deterministic runs. In others a prompt may move to
            another step, and must not get a new chance to be short by that.
    """
    parts = (run_seed, ordinal, sample) if step is None else (run_seed, step, ordinal, sample)
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
