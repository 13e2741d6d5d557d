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
import mmap
import os
from typing import Protocol

from ellm_sgl.config import ConfigError

HUGE_PAGE = 2 << 20
"""Bytes; memory comes and goes in whole ones, since to give back part of one would split it."""

_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE (Linux 5.14), which Python's mmap does not name."""
_PROT_NONE = 0


class Arena(Protocol):
    """Memory of which the first part is committed: at first all of it. Offsets are in bytes."""

    nbytes: int
    """Bytes that are reserved."""
    granule: int
    """Bytes that come and go together; offsets given to `commit` and `decommit` are multiples of
    it, or `nbytes`."""
    memory: memoryview
    """All that is reserved; what of it is committed may be read and written."""

    def commit(self, low: int, high: int) -> None:
        """Bytes [low, high) have memory when this returns; what they hold is undefined. For a
        thread beside those that use the rest; it waits for none of them.

        Raises:
            MemoryError: the machine gives no more; nothing has changed.
        """

    def decommit(self, low: int, high: int) -> None:
        """Give the memory of bytes [low, high) back; nobody may touch them until they are
        committed again."""


class CpuArena:
    """An arena in host memory, of huge pages where the machine has them.

    What has never been decommitted takes memory as it is first written to, like any other; what is
    committed again has all of it at once.

    Raises:
        ConfigError: there are not so many addresses.
    """

    def __init__(self, nbytes: int, granule: int = HUGE_PAGE) -> None:
        self.nbytes, self.granule = nbytes, granule
        try:
            pages = mmap.mmap(-1, nbytes + granule, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise ConfigError(
                f"--ellm-device-kv-tokens: a pool of {nbytes:,} bytes cannot be had ({error}); "
                "give fewer"
            ) from None
        begin = ctypes.addressof(ctypes.c_char.from_buffer(pages))
        self._begin = -(-begin // granule) * granule
        self.memory = memoryview(pages)[self._begin - begin :][:nbytes]
        self._libc = ctypes.CDLL(None, use_errno=True)  # its calls let go of the interpreter
        self._call("madvise", 0, nbytes, mmap.MADV_HUGEPAGE)  # an error: the machine has none

    def commit(self, low: int, high: int) -> None:
        problem = self._call("mprotect", low, high, mmap.PROT_READ | mmap.PROT_WRITE)
        if not problem:
            problem = self._call("madvise", low, high, _POPULATE_WRITE)
            if problem == errno.EINVAL:  # an older kernel: then by writing
                ctypes.memset(self._begin + low, 0, high - low)
                problem = 0
        if problem:
            self.decommit(low, high)
            raise MemoryError(f"{high - low:,} bytes: {os.strerror(problem)}")

    def decommit(self, low: int, high: int) -> None:
        self._call("madvise", low, high, mmap.MADV_DONTNEED)
        self._call("mprotect", low, high, _PROT_NONE)

    def _call(self, name: str, low: int, high: int, what: int) -> int:
        """One of libc's functions on these bytes; the error's number, 0 where there is none."""
        call = getattr(self._libc, name)
        address, length = ctypes.c_void_p(self._begin + low), ctypes.c_size_t(high - low)
        return ctypes.get_errno() if call(address, length, what) else 0
