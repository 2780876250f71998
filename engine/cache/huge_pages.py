"""Host memory in large pages, for what every step reads from one end to the other.

A step reads all weights and the K/V of all its tokens once. With pages of 4 KiB it looks up a
new address every few hundred nanoseconds, and processors do not fetch ahead beyond a page. Linux
gives pages of 2 MiB to those who ask, where transparent huge pages are not switched off; the
memory is used like any other either way.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch

_BLOCK = 64 * 2**20  # bytes an `Arena` asks for at once
_ALIGNMENT = 64  # bytes

LARGE = 2 * 2**20  # bytes of a large page

#: Asks Linux (from 5.14) to back memory now, whatever is in it. Python has no name for it.
_POPULATE_WRITE = 23


def empty(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in host memory of its own; not initialised, and taken as it is written to."""
    count = math.prod(size)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS  # shared memory has other rules
    memory = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=private)
    with contextlib.suppress(AttributeError, OSError):  # not every system has them
        memory.madvise(mmap.MADV_HUGEPAGE)
    if count == 0:
        return torch.empty(tuple(size), dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(tuple(size))


def trim() -> None:
    """Gives memory that was freed back to the system: the heap keeps it otherwise, and what is
    made of weights while they are packed is as large as they are."""
    with contextlib.suppress(AttributeError, OSError):  # not every C library knows how
        ctypes.CDLL(None).malloc_trim(0)


def populate(tensor: torch.Tensor) -> bool:
    """Has the system back a contiguous tensor's memory now; what it holds stays as it is.

    Memory that a process was given has no pages behind it before it is touched. Where the host
    of a virtual machine has to find them first, that takes milliseconds for every large page,
    in the middle of a step.

    Returns:
        Whether the system knows how to.
    """
    start, end = tensor.data_ptr(), tensor.data_ptr() + tensor.numel() * tensor.element_size()
    start -= start % mmap.PAGESIZE
    try:
        advise = ctypes.CDLL(None).madvise
    except AttributeError:
        return False
    return bool(advise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), _POPULATE_WRITE) == 0)


class Arena:
    """Keeps tensors side by side, so that small ones share large pages."""

    def __init__(self) -> None:
        self._block = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def keep(self, tensor: torch.Tensor) -> torch.Tensor:
        """A contiguous copy, aligned to 64 bytes."""
        size = tensor.numel() * tensor.element_size()
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + size > len(self._block):
            self._block, start = empty([max(size, _BLOCK)], torch.uint8), 0
        self._used = start + size
        copy = self._block[start : self._used].view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)
