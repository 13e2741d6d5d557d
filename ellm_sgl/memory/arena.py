"""A range of addresses that is reserved once, with memory behind as much of it as is needed.

```
 byte 0 ───────────── committed ─────────────┬──────────── decommitted ──────────── nbytes
        reads and writes as any other memory │ takes no memory; an access ends the process
```

A tensor over all of it keeps its address while memory comes and goes: nothing that holds the
tensor, a view of it or a pointer has to know.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
import sys
import weakref
from collections.abc import Sequence
from typing import Protocol

import torch

HUGE_PAGE = 2 << 20
"""Bytes; memory comes and goes in whole ones, since to give back part of one would split it."""

_PROT_NONE = 0
_FAILED: int = ctypes.c_size_t(-1).value
"""What mmap returns then."""


class Arena(Protocol):
    """Memory of which the first part is committed: at first nothing. Offsets are in bytes."""

    nbytes: int
    """Bytes that are reserved."""
    granule: int
    """Bytes that come and go together; offsets given to `commit` and `decommit` are multiples of
    it, or `nbytes`."""

    def tensor(self) -> torch.Tensor:
        """All that is reserved, as bytes; what of it is committed may be read and written."""

    def commit(self, low: int, high: int, lazily: bool = False) -> None:
        """Bytes [low, high) may be used when this returns; what they hold is undefined. For a
        thread beside those that use the rest; it waits for none of them.

        Args:
            lazily: each page takes memory as it is first written to; else all have it already.

        Raises:
            MemoryError: the machine gives no more; nothing has changed.
        """

    def decommit(self, low: int, high: int) -> None:
        """Give the memory of bytes [low, high) back; nobody may touch them until they are
        committed again."""


class CpuArena:
    """An arena in host memory, of huge pages where the machine has them.

    Raises:
        MemoryError: there are not so many addresses.
    """

    def __init__(self, nbytes: int, granule: int = HUGE_PAGE) -> None:
        self.nbytes, self.granule = nbytes, granule
        # Python's mmap takes what may not be written to yet for what never may be.
        self._libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter
        length = nbytes + granule
        address = self._reserve(length)
        pages = (ctypes.c_char * length).from_address(address)
        weakref.finalize(
            pages, self._libc.munmap, ctypes.c_void_p(address), ctypes.c_size_t(length)
        )
        self._begin = -(-address // granule) * granule
        self.memory = memoryview(pages).cast("B")[self._begin - address :][:nbytes]
        """All that is reserved."""
        self._bytes = torch.frombuffer(self.memory, dtype=torch.uint8)
        self._call("madvise", 0, nbytes, mmap.MADV_HUGEPAGE)  # an error: the machine has none

    def tensor(self) -> torch.Tensor:
        """See `Arena.tensor`; it keeps the addresses, whoever has the arena."""
        return self._bytes

    def _reserve(self, length: int) -> int:
        """The first of so many addresses behind which there is no memory."""
        call = self._libc.mmap
        call.restype = ctypes.c_void_p
        kind = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        nowhere, no_file = ctypes.c_void_p(None), -1
        address = _FAILED
        if length <= sys.maxsize:
            size = ctypes.c_size_t(length)
            address = call(nowhere, size, _PROT_NONE, kind, no_file, ctypes.c_long(0))
        if address == _FAILED:
            reason = os.strerror(ctypes.get_errno() or errno.ENOMEM)
            raise MemoryError(f"{length:,} bytes of addresses cannot be had ({reason})")
        return address

    def commit(self, low: int, high: int, lazily: bool = False) -> None:
        problem = self._call("mprotect", low, high, mmap.PROT_READ | mmap.PROT_WRITE)
        if problem:
            self.decommit(low, high)
            raise MemoryError(f"{high - low:,} bytes: {os.strerror(problem)}")
        if not lazily:
            # Not MADV_POPULATE_WRITE: all that maps or unmaps waits for it, milliseconds for each
            # huge page that a virtual machine has to get first; for a fault of a page nobody does.
            self._bytes[low : high : mmap.PAGESIZE].zero_()

    def decommit(self, low: int, high: int) -> None:
        self._call("madvise", low, high, mmap.MADV_DONTNEED)
        self._call("mprotect", low, high, _PROT_NONE)

    def _call(self, name: str, low: int, high: int, what: int) -> int:
        """One of libc's functions on these bytes; the error's number, 0 where there is none."""
        call = getattr(self._libc, name)
        address, length = ctypes.c_void_p(self._begin + low), ctypes.c_size_t(high - low)
        return ctypes.get_errno() if call(address, length, what) else 0


def on_huge_pages(size: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised tensor in host memory that lies there as a pool does."""
    nbytes = math.prod(size) * dtype.itemsize
    arena = CpuArena(nbytes)
    arena.commit(0, nbytes, lazily=True)
    return arena.tensor().view(dtype).view(*size)


def trim_heap() -> None:
    """Give back what libc keeps of memory that has been freed: of activations, tens of megabytes.
    Takes some milliseconds."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc's alone
        libc.malloc_trim(0)
