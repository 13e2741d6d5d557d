"""An arena in a CUDA device's memory, by the driver's virtual memory API. Tested on a device, and
everywhere on a stand-in that checks what the driver would (`tests/memory/cuda_driver.py`); not used
by the pool yet (docs/gpu.md says what is missing).

```
 cuMemAddressReserve          all addresses, once
 commit    cuMemCreate, cuMemMap of each granule; cuMemSetAccess of all of them
 decommit  cuMemUnmap of all of them; cuMemRelease of each: then the device has it again
```

An access to what is not mapped is an illegal address, which ends every kernel of the process from
then on: so nothing queued may still use what is decommitted.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from ctypes import POINTER, Structure, byref, c_int, c_size_t, c_uint8, c_uint16, c_uint64, c_void_p
from types import SimpleNamespace
from typing import Any

import torch

OUT_OF_MEMORY = 2
"""CUDA_ERROR_OUT_OF_MEMORY."""
_PINNED, _ON_DEVICE, _READ_AND_WRITE, _LEAST = 1, 1, 3, 0
"""CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_LOCATION_TYPE_DEVICE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
CU_MEM_ALLOC_GRANULARITY_MINIMUM."""


class Location(Structure):
    """CUmemLocation."""

    _fields_ = [("type", c_int), ("id", c_int)]


class Flags(Structure):
    """CUmemAllocationProp's `allocFlags`."""

    _fields_ = [("compression", c_uint8), ("rdma", c_uint8), ("usage", c_uint16),
                ("reserved", c_uint8 * 4)]  # fmt: skip


class Allocation(Structure):
    """CUmemAllocationProp."""

    _fields_ = [("type", c_int), ("handle_types", c_int), ("location", Location),
                ("win32", c_void_p), ("flags", Flags)]  # fmt: skip


class Access(Structure):
    """CUmemAccessDesc."""

    _fields_ = [("location", Location), ("flags", c_int)]


_PARAMETERS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuCtxSynchronize": (),
    "cuMemGetAllocationGranularity": (POINTER(c_size_t), POINTER(Allocation), c_int),
    "cuMemAddressReserve": (POINTER(c_uint64), c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemAddressFree": (c_uint64, c_size_t),
    "cuMemCreate": (POINTER(c_uint64), c_size_t, POINTER(Allocation), c_uint64),
    "cuMemRelease": (c_uint64,),
    "cuMemMap": (c_uint64, c_size_t, c_size_t, c_uint64, c_uint64),
    "cuMemUnmap": (c_uint64, c_size_t),
    "cuMemSetAccess": (c_uint64, c_size_t, POINTER(Access), c_size_t),
}
"""Of the functions that are called (cuda.h); each returns a CUresult."""


class CudaError(RuntimeError):
    """The driver refused a call."""


class Driver:
    """The functions of libcuda that an arena needs.

    Args:
        library: with the functions of `_PARAMETERS`; None: the machine's.

    Raises:
        OSError: there is none.
    """

    def __init__(self, library: Any = None) -> None:
        self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
        for name, parameters in _PARAMETERS.items():
            function = getattr(self._library, name)
            function.argtypes, function.restype = parameters, c_int

    def call(self, name: str, *arguments: Any) -> None:
        """
        Raises:
            MemoryError: the device has no more.
            CudaError: whatever else the driver says.
        """
        result = getattr(self._library, name)(*arguments)
        if result == OUT_OF_MEMORY:
            raise MemoryError(f"{name}: the device has no more memory")
        if result:
            raise CudaError(f"{name}: CUDA error {result}")


class CudaArena:
    """As `arena.Arena`; of the device and the context that are current.

    Args:
        nbytes: to reserve.
        device: its number.
        driver: libcuda's functions.
        tensor_at: (address, bytes): a tensor of bytes over them, on the device.

    Raises:
        MemoryError: there are not so many addresses.
    """

    def __init__(
        self,
        nbytes: int,
        device: int = 0,
        driver: Driver | None = None,
        tensor_at: Callable[[int, int], torch.Tensor] | None = None,
    ) -> None:
        self._driver = driver or Driver()
        self._tensor_at = tensor_at or _tensor_at
        self._kind = Allocation(type=_PINNED, location=Location(_ON_DEVICE, device))
        self._context = c_void_p()
        self._driver.call("cuCtxGetCurrent", byref(self._context))
        granule = c_size_t()
        self._driver.call("cuMemGetAllocationGranularity", byref(granule), self._kind, _LEAST)
        self.nbytes, self.granule = nbytes, granule.value
        self._length = -(-nbytes // self.granule) * self.granule
        begin = c_uint64()
        self._driver.call("cuMemAddressReserve", byref(begin), self._length, self.granule, 0, 0)
        self._begin = begin.value
        self._handles: list[int] = []
        """Of each granule that has memory, in their order."""
        weakref.finalize(
            self, _free, self._driver, self._context, self._begin, self._length, self.granule,
            self._handles,
        )  # fmt: skip

    def tensor(self) -> torch.Tensor:
        """Bytes; see `Arena.tensor`. To be asked for once something is committed: of an address
        without memory the driver does not tell whose it is. Valid as long as the arena."""
        return self._tensor_at(self._begin, self.nbytes)

    def commit(self, low: int, high: int, lazily: bool = False) -> None:
        """A device has no pages that come as they are touched: `lazily` changes nothing."""
        self._driver.call("cuCtxSetCurrent", self._context)  # of the thread that commits
        first, last = self._granules(low, high)
        assert first == len(self._handles), "memory is committed from low to high"
        begin, size = self._begin + first * self.granule, (last - first) * self.granule
        try:
            for _ in range(first, last):
                self._map_one()
            access = Access(self._kind.location, _READ_AND_WRITE)
            self._driver.call("cuMemSetAccess", begin, size, access, 1)
        except BaseException:
            self._drop(first)
            raise

    def decommit(self, low: int, high: int) -> None:
        self._driver.call("cuCtxSetCurrent", self._context)
        first, last = self._granules(low, high)
        assert last == len(self._handles), "memory is decommitted from high to low"
        self._driver.call("cuCtxSynchronize")  # whatever is queued may still use it
        self._drop(first)

    def _granules(self, low: int, high: int) -> tuple[int, int]:
        return low // self.granule, -(-high // self.granule)

    def _map_one(self) -> None:
        """The next granule."""
        handle, place = c_uint64(), len(self._handles)
        self._driver.call("cuMemCreate", byref(handle), self.granule, self._kind, 0)
        address = self._begin + place * self.granule
        try:
            self._driver.call("cuMemMap", address, self.granule, 0, handle.value, 0)
        except BaseException:
            self._driver.call("cuMemRelease", handle.value)
            raise
        self._handles.append(handle.value)

    def _drop(self, first: int) -> None:
        """Granules from this one on lose their memory."""
        _unmap(self._driver, self._begin, self.granule, self._handles, first)


def _unmap(driver: Driver, begin: int, granule: int, handles: list[int], first: int) -> None:
    if count := len(handles) - first:
        driver.call("cuMemUnmap", begin + first * granule, count * granule)
    while len(handles) > first:
        driver.call("cuMemRelease", handles.pop())


def _free(
    driver: Driver, context: c_void_p, begin: int, length: int, granule: int, handles: list[int]
) -> None:
    """Of an arena that nobody has any more."""
    driver.call("cuCtxSetCurrent", context)
    driver.call("cuCtxSynchronize")
    _unmap(driver, begin, granule, handles, 0)
    driver.call("cuMemAddressFree", begin, length)


def _tensor_at(address: int, nbytes: int) -> torch.Tensor:
    """Over a device's memory, whose owner it does not keep alive."""

    shape = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
    memory = SimpleNamespace(__cuda_array_interface__=shape)
    return torch.as_tensor(memory, device="cuda")
