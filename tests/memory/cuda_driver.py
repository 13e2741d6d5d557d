"""A CUDA driver that has no device: it knows addresses, handles and maps, and refuses what the real
one would. Called as C is, so that arguments have the types that cuda.h says."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int
from types import SimpleNamespace
from typing import Any

import torch

from ellm_sgl.memory.cuda_arena import _PARAMETERS, OUT_OF_MEMORY, Driver

INVALID_VALUE, INVALID_CONTEXT = 1, 201
BEGIN = 7 << 40
"""Where addresses begin."""
CONTEXT = 0xC0
SPOILED = 0xFF


class StandIn:
    """One device.

    Args:
        room: bytes that it has.
        granule: of its memory.
    """

    def __init__(self, room: int, granule: int = 64) -> None:
        self.room, self.granule = room, granule
        self.calls: list[str] = []
        self.errors: list[str] = []
        """Calls that the real driver would not have understood."""
        self.handles: set[int] = set()
        self.maps: dict[int, int] = {}
        """Handle of each granule that is mapped, by address,"""
        self.accessible: set[int] = set()
        """and those that may be read and written."""
        self.reserved: tuple[int, int] | None = None
        self.fails_to_map_at: int | None = None
        self._made = 0
        self.memory = torch.full((1 << 16,), SPOILED, dtype=torch.uint8)

    def driver(self) -> Driver:
        functions = {
            name: CFUNCTYPE(c_int, *parameters)(self._watched(name))
            for name, parameters in _PARAMETERS.items()
        }
        return Driver(SimpleNamespace(**functions))

    def tensor_at(self, address: int, nbytes: int) -> torch.Tensor:
        assert address in self.accessible, "nothing is there whose owner the driver could tell"
        return self.memory[:nbytes]

    def _watched(self, name: str) -> Any:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            result: int = getattr(self, name)(*arguments)
            if result not in (0, OUT_OF_MEMORY):
                self.errors.append(f"{name}{arguments}")
            return result

        return call

    # -- the driver's functions ---------------------------------------------------------------

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802
        context[0] = CONTEXT
        return 0

    def cuCtxSetCurrent(self, context: int) -> int:  # noqa: N802
        return 0 if context == CONTEXT else INVALID_CONTEXT

    def cuCtxSynchronize(self) -> int:  # noqa: N802
        return 0

    def cuMemGetAllocationGranularity(self, granule: Any, kind: Any, option: int) -> int:  # noqa: N802
        granule[0] = self.granule
        return 0 if self._is_pinned_here(kind[0]) and option == 0 else INVALID_VALUE

    def cuMemAddressReserve(  # noqa: N802
        self, address: Any, size: int, alignment: int, at: int, flags: int
    ) -> int:
        if size % self.granule or size == 0 or alignment % self.granule or at or flags:
            return INVALID_VALUE
        address[0] = BEGIN
        self.reserved = BEGIN, size
        return 0

    def cuMemAddressFree(self, address: int, size: int) -> int:  # noqa: N802
        if self.maps or self.reserved != (address, size):
            return INVALID_VALUE
        self.reserved = None
        return 0

    def cuMemCreate(self, handle: Any, size: int, kind: Any, flags: int) -> int:  # noqa: N802
        if size != self.granule or flags or not self._is_pinned_here(kind[0]):
            return INVALID_VALUE
        if (len(self.handles) + 1) * self.granule > self.room:
            return OUT_OF_MEMORY
        self._made += 1
        handle[0] = self._made
        self.handles.add(self._made)
        return 0

    def cuMemRelease(self, handle: int) -> int:  # noqa: N802
        if handle not in self.handles or handle in self.maps.values():
            return INVALID_VALUE
        self.handles.remove(handle)
        return 0

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, flags: int) -> int:  # noqa: N802
        if address == self.fails_to_map_at:
            return OUT_OF_MEMORY
        taken = address in self.maps or handle in self.maps.values()
        if taken or handle not in self.handles or offset or flags or size != self.granule:
            return INVALID_VALUE
        if not self._within(address, size):
            return INVALID_VALUE
        self.maps[address] = handle
        return 0

    def cuMemUnmap(self, address: int, size: int) -> int:  # noqa: N802
        granules = range(address, address + size, self.granule)
        if not self._within(address, size) or not all(g in self.maps for g in granules):
            return INVALID_VALUE
        used = self.accessible.intersection(granules)
        if used and "cuCtxSynchronize" not in self.calls[-3:]:
            return INVALID_VALUE  # of ours: something queued may still use it
        for granule in granules:
            del self.maps[granule]
            self.accessible.discard(granule)
            self.memory[granule - BEGIN :][: self.granule] = SPOILED
        return 0

    def cuMemSetAccess(self, address: int, size: int, access: Any, count: int) -> int:  # noqa: N802
        found, granules = access[0], range(address, address + size, self.granule)
        if count != 1 or found.flags != 3 or (found.location.type, found.location.id) != (1, 0):
            return INVALID_VALUE
        if not self._within(address, size) or not all(g in self.maps for g in granules):
            return INVALID_VALUE
        self.accessible.update(granules)
        return 0

    def _within(self, address: int, size: int) -> bool:
        if self.reserved is None or size == 0:
            return False
        begin, length = self.reserved
        aligned = (address - begin) % self.granule == 0 and size % self.granule == 0
        return aligned and begin <= address and address + size <= begin + length

    def _is_pinned_here(self, kind: Any) -> bool:
        return (kind.type, kind.location.type, kind.location.id) == (1, 1, 0)
