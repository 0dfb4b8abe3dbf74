"""Moves a model's memory between its device and the host, in place. Implements loop port Movable; driven by
`loop.residency`.

What moves are storages, not tensors: a storage's bytes are copied to the host and its device memory is freed, and on
the way back the same storage object gets memory again. So every view stays what it was: parameters and gradients are
views of DDP's buffers, the optimizer's float32 shards are views of the parameters or tensors of their own, and the
reduction buckets view both. Nothing has to be rebound, and a continued training is the same bit for bit. (Assigning
`parameter.data` instead would cut a parameter loose from its buffer. Megatron's own `offload_to_cpu` moves DDP's
buffers the same way, but pins host memory even without CUDA and leaves the optimizer to another mechanism.)

Gradients are not copied: they are freed, and come back as zeros. They must not move within an accumulation.

Invariants: a part is on or off as a whole, also after a move that failed; a tensor of a part that is off must not be
touched (`require` says so, where torch would read freed memory).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_ppo.loop.residency import EVERYTHING, Part, Parts, ResidencyError

logger = logging.getLogger(__name__)

TensorsOf = Callable[[], Iterable[Tensor]]


def trained_tensors(modules: Sequence[Any], optimizer: Any) -> dict[Part, TensorsOf]:
    """All tensors of a model under Megatron's DDP and distributed optimizer.

    Args:
        modules: DDP's, one per model chunk.   optimizer: Megatron's chained one.
    """

    def buffers() -> Iterator[Any]:
        for module in modules:
            yield from (*module.buffers, *module.expert_parallel_buffers)

    def parameters() -> Iterator[Tensor]:
        yield from (buffer.param_data for buffer in buffers() if buffer.param_data is not None)
        for module in modules:
            yield from module.parameters()

    def gradients() -> Iterator[Tensor]:
        yield from (buffer.grad_data for buffer in buffers())

    def states() -> Iterator[Tensor]:
        for chained in optimizer.chained_optimizers:
            for group in chained.optimizer.param_groups:  # float32 main parameters
                yield from group["params"]
            for state in chained.optimizer.state.values():
                yield from (value for value in state.values() if isinstance(value, Tensor))

    return {Part.PARAMETERS: parameters, Part.GRADIENTS: gradients, Part.OPTIMIZER: states}


@dataclass(frozen=True, slots=True)
class _Away:
    """A freed storage, and its bytes on the host; None where they are not worth keeping."""

    storage: torch.UntypedStorage
    num_bytes: int
    host: Tensor | None


class Residence:
    """Where the parts of one model are.

    Args:
        name: of the model, for messages.
        tensors: all tensors of each part, asked for at every offload (a checkpoint may have replaced some). A storage
            that an earlier part holds belongs to that one: parameters come first.
        before: called before the first byte leaves; ends communication that still uses the buffers. Its argument is
            `after_failure`: whether that has to do without the other ranks.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[Part, TensorsOf],
        *,
        before: Callable[[bool], None] = lambda after_failure: None,
    ) -> None:
        self._name = name
        self._tensors = dict(tensors)
        self._before = before
        self._away: dict[Part, list[_Away]] = {}

    @property
    def present(self) -> Parts:
        """The parts that are on the device."""
        return EVERYTHING - self._away.keys()

    def require(self, parts: Parts, doing: str) -> None:
        """Raises: ResidencyError unless `parts` are on the device."""
        if absent := parts & self._away.keys():
            raise ResidencyError(
                f"{doing} needs the {' and '.join(sorted(parts))} of the {self._name} on the device; "
                f"off are {' and '.join(sorted(absent))}"
            )

    def offload(self, parts: Parts, *, after_failure: bool = False) -> None:
        """Free the device's memory of `parts`; nothing happens to those that are off.

        Raises: ResidencyError after a failure, if a collective that would need the other ranks still uses the memory.
        """
        leaving = [part for part in Part if part in parts and part not in self._away]
        if not leaving:
            return
        self._before(after_failure)
        _synchronise()
        owned = self._storages()
        # Everything is copied before anything is freed, so that a full host leaves the device as it was.
        away = {
            part: [_copied(storage, keep=part is not Part.GRADIENTS) for storage in owned[part]]
            for part in leaving
        }
        _synchronise()
        self._away.update(away)
        for copies in away.values():
            for copy in copies:
                copy.storage.resize_(0)
        _return_free_memory()

    def load(self, parts: Parts) -> None:
        """Bring `parts` back. On an error (no memory) each of them is on or off as a whole."""
        for part in Part:
            if part in parts and part in self._away:
                self._load(part)

    def _load(self, part: Part) -> None:
        copies = self._away[part]
        try:
            for copy in copies:
                copy.storage.resize_(copy.num_bytes)
                if copy.host is None:
                    _bytes_of(copy.storage).zero_()
                else:
                    _bytes_of(copy.storage).copy_(copy.host, non_blocking=True)
        except BaseException:
            for copy in copies:
                copy.storage.resize_(0)
            raise
        del self._away[part]

    def _storages(self) -> dict[Part, list[torch.UntypedStorage]]:
        """The storages of each part; an empty one is away, or was never filled."""
        seen: set[int] = set()
        owned: dict[Part, list[torch.UntypedStorage]] = {}
        for part in Part:
            mine = owned[part] = []
            for tensor in self._tensors.get(part, tuple)():
                storage = tensor.untyped_storage()
                if storage.nbytes() and storage.data_ptr() not in seen:
                    seen.add(storage.data_ptr())
                    mine.append(storage)
        return owned


def _bytes_of(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)  # type: ignore[call-overload, no-any-return]


def _copied(storage: torch.UntypedStorage, *, keep: bool) -> _Away:
    host = None
    if keep:
        # Pinned memory is copied at full speed, and torch keeps the block for the next move.
        host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
        host.copy_(_bytes_of(storage), non_blocking=True)
    return _Away(storage, storage.nbytes(), host)


def _synchronise() -> None:
    # Other streams (gradient reduction, parameter gathering) may still use what is freed next.
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _return_free_memory() -> None:
    # The other model's blocks have other sizes: without this the two would fragment the pool.
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
