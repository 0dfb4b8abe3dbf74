"""Passing on, inside one host, what one receiver has got: the others read it out of that one's memory.

Over gloo every receiver costs two more passes of all bytes through a socket. Workers of engines on one host need one
copy each instead. Driven by `BroadcastGroup`; between GPUs NCCL does better by itself.

The lender has a table of 64-bit words, which its readers read and write from outside:

    word 0             `_OPEN`, until the lender leaves
    next 2 * _SLOTS    of every broadcast that is lent, by number modulo _SLOTS: address, address ^ (number + 1)
    then one a member  how many broadcasts it has read

Invariants: a buffer lives until every reader has read it, and nobody changes it; so what loads it must not either
(vLLM's loaders copy). What a reader returns was read while the lender was still lending: it looks for `_OPEN`
afterwards, which the lender takes away before it lets go of memory.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import psutil
import torch
from torch import Tensor

from megatron_ppo.transport import process_memory

_OPEN = 0x6C656E64
_SLOTS = 8
_MOST_LENT = 3
_TABLES: list[Tensor] = []
"""All tables of this process, one for every group it has been in: a reader that is late writes to an old one."""


def lenders(addresses: Mapping[int, str]) -> dict[int, int]:
    """Which member is to read from which: from the first one of its host.

    Args:
        addresses: `Lender.address` of every member, empty of one that cannot lend.
    """
    first: dict[str, int] = {}
    plan = {}
    for member, address in addresses.items():
        if address:
            lender = first.setdefault(_Address.parse(address).namespace, member)
            if lender != member:
                plan[member] = lender
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class _Address:
    namespace: str
    process: int
    table: int

    @staticmethod
    def parse(text: str) -> _Address:
        return _Address(**json.loads(text))


class Lender:
    """The member that receives.

    Args:
        members: of the group; each may become a reader.
    """

    def __init__(self, members: int) -> None:
        self._table = torch.zeros(1 + 2 * _SLOTS + members, dtype=torch.int64)
        self._table[0] = _OPEN
        _TABLES.append(self._table)
        self._count = 0
        self._lent: deque[Tensor] = deque()
        self._readers: Sequence[int] = ()

    def address(self) -> str:
        """What a `Reader` needs; empty where processes cannot be told apart."""
        try:
            namespace = process_memory.namespace()
        except OSError:
            return ""
        mine = _Address(namespace=namespace, process=os.getpid(), table=self._table.data_ptr())
        return json.dumps(asdict(mine))

    def let_in(self, addresses: Sequence[str]) -> None:
        """Let the processes of these members reach this one's memory."""
        # The kernel takes one name, which stands for its descendants too.
        common = _common_ancestor([_Address.parse(address).process for address in addresses])
        if common is not None:
            process_memory.let_process_in(common)

    def begin(self, readers: Sequence[int]) -> None:
        """Name the members that do read."""
        self._readers = readers

    def lend(self, buffer: Tensor) -> None:
        """Let all readers have the contiguous buffer, the next in the order of broadcasts."""
        if not self._readers:
            return
        assert self._count - self._least_read() <= _MOST_LENT, "the caller waits for has_room"
        self._count += 1
        self._lent.append(buffer)
        slot = 1 + 2 * ((self._count - 1) % _SLOTS)
        self._table[slot] = buffer.data_ptr()
        self._table[slot + 1] = buffer.data_ptr() ^ self._count

    def has_room(self) -> bool:
        """Whether few enough buffers are lent for one more."""
        return self._num_lent() <= _MOST_LENT

    def has_all_back(self) -> bool:
        """Whether every reader has read everything."""
        return self._num_lent() == 0

    def close(self) -> None:
        """Readers that are late fail from now on."""
        self._table[0] = 0
        self._lent.clear()

    def __del__(self) -> None:
        # Who forgets to close must not leave readers with memory that is somebody else's by now.
        self._table[0] = 0

    def _num_lent(self) -> int:
        while len(self._lent) > self._count - self._least_read():
            self._lent.popleft()
        return len(self._lent)

    def _least_read(self) -> int:
        return min((int(self._table[_read_word(reader)]) for reader in self._readers), default=self._count)


class Reader:
    """A member that reads.

    Args:
        address: the lender's.
        number: of this member.

    Raises: OSError when this process may not read the lender's memory, or cannot name it.
    """

    def __init__(self, address: str, *, number: int) -> None:
        lender = _Address.parse(address)
        if lender.namespace != process_memory.namespace():
            raise OSError("the one that receives for it is on another host or in another container")
        self._process, self._table = lender.process, lender.table
        self._number = number
        self._confirm(0)

    def has(self, index: int) -> bool:
        """Whether broadcast `index`, counted from 0, can be read. Raises: OSError."""
        if self._find(index) is not None:
            return True
        self._look()
        return False

    def read(self, index: int, into: Tensor) -> None:
        """Copy broadcast `index`, which `has` has found. Raises: OSError, also when the lender has left meanwhile."""
        address = self._find(index)
        assert address is not None
        process_memory.read(self._process, address, into)
        self._confirm(index + 1)

    def _find(self, index: int) -> int | None:
        address, mark = self._words(1 + 2 * (index % _SLOTS), 2)
        # Both words may be read while they are written, in either order: only a pair belongs together.
        return address if address ^ mark == index + 1 else None

    def _confirm(self, count: int) -> None:
        """Say how many broadcasts have been read, if the lender still lends."""
        self._look()
        word = self._table + 8 * _read_word(self._number)
        process_memory.write(self._process, word, torch.tensor([count], dtype=torch.int64))

    def _look(self) -> None:
        if self._words(0, 1) != [_OPEN]:
            raise OSError(f"process {self._process}, which was to pass on what it receives, has left")

    def _words(self, first: int, count: int) -> list[int]:
        words = torch.empty(count, dtype=torch.int64)
        process_memory.read(self._process, self._table + 8 * first, words)
        found: list[int] = words.tolist()
        return found


def _common_ancestor(processes: Sequence[int]) -> int | None:
    """The process nearest to all of them that each is, or descends from; None when one has ended."""
    try:
        lines = [
            [parent.pid for parent in reversed(process.parents())] + [process.pid]
            for process in map(psutil.Process, processes)
        ]
    except psutil.Error:
        return None
    shared = [level[0] for level in zip(*lines, strict=False) if len(set(level)) == 1]
    return shared[-1] if shared else None


def _read_word(reader: int) -> int:
    return 1 + 2 * _SLOTS + reader
