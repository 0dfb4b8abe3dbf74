"""Reading and writing the memory of another process of the same host (process_vm_readv(2), "cross memory attach").

Driven by `mcore.host_memory` and `transport.relay`. Nothing is assumed about permissions: callers try before they rely
on it. Linux only.
"""

from __future__ import annotations

import ctypes
import errno
import os
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_PR_SET_PTRACER = 0x59616D61
_MOST_BYTES = 2**30
"""In one call, of which the system takes less than 2 GiB."""


def namespace() -> str:
    """The same in processes that can name each other by their process ids."""
    return f"{_boot_id()} {os.readlink('/proc/self/ns/pid')}"


def let_process_in(process: int) -> None:
    """Let `process` and its descendants reach this process's memory, and no other; replaces an earlier one."""
    # Hosts with the Yama security module let only a process's ancestors in, unless it names another.
    _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(process), 0, 0, 0)


def read_spans(process: int, local: NDArray[np.int64], remote: NDArray[np.int64], *, num_bytes: int) -> None:
    """Fill the local spans, struct iovec [n, 2] of address and length, from the remote ones. Raises: OSError."""
    _move("process_vm_readv", "reading", process, local, remote, num_bytes)


def read(process: int, start: int, into: Tensor) -> None:
    """Fill the contiguous tensor from the bytes at address `start` of the process. Raises: OSError."""
    _move_all("process_vm_readv", "reading", process, start, into)


def write(process: int, start: int, values: Tensor) -> None:
    """Put the contiguous tensor's bytes at address `start` of the process. Raises: OSError."""
    _move_all("process_vm_writev", "writing", process, start, values)


def _move_all(call: str, doing: str, process: int, start: int, tensor: Tensor) -> None:
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    for done in range(0, tensor.nbytes, _MOST_BYTES):
        count = min(_MOST_BYTES, tensor.nbytes - done)
        local = np.array([[tensor.data_ptr() + done, count]], dtype=np.int64)
        remote = np.array([[start + done, count]], dtype=np.int64)
        _move(call, doing, process, local, remote, count)


def _move(
    call: str, doing: str, process: int, local: NDArray[np.int64], remote: NDArray[np.int64], num_bytes: int
) -> None:
    count = getattr(_libc(), call)(process, local.ctypes.data, len(local), remote.ctypes.data, len(remote), 0)
    if count != num_bytes:
        number = ctypes.get_errno() if count < 0 else errno.EFAULT
        raise OSError(number, f"{doing} the memory of process {process}: {os.strerror(number)}")


@cache
def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (libc.process_vm_readv, libc.process_vm_writev):
        call.restype = ctypes.c_ssize_t
        call.argtypes = [
            ctypes.c_int,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_void_p,
            ctypes.c_ulong,
            ctypes.c_ulong,
        ]
    return libc


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
