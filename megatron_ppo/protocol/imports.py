"""Imports of large packages. Driven by whoever imports torch, Ray, Megatron or vLLM at the start of a process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage() -> Iterator[None]:
    """Inside the block, nothing is searched for garbage; what is made there never will be.

    An import makes half a million objects that live as long as the process. Searching them again and again takes a
    seventh of the time of an import of Megatron or vLLM, and part of every full collection afterwards.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
