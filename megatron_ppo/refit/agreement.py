"""How trainer ranks learn that one of them has failed, so that none is left alone in a collective."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

Agree = Callable[[str | None], str | None]
"""Collective over the trainer ranks: each passes its error or None, all get the first error or None."""


def single_rank(error: str | None) -> str | None:
    """The agreement of one rank with itself."""
    return error


def agreement_over(group: dist.ProcessGroup | None) -> Agree:
    """Agreement over `group`, a gloo group of all trainer ranks (None: the default group).

    The group's own timeout is the limit of the wait; it must exceed the longest pause of the engines.
    """

    def agree(error: str | None) -> str | None:
        # One number first: there is seldom an error, and texts cost two exchanges.
        failed = torch.tensor([int(error is not None)], dtype=torch.int32)
        dist.all_reduce(failed, op=dist.ReduceOp.MAX, group=group)
        if not failed.item():
            return None
        errors: list[str | None] = [None] * dist.get_world_size(group)
        dist.all_gather_object(errors, error, group=group)
        return next((text for text in errors if text is not None), None)

    return agree
