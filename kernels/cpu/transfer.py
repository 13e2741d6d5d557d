"""Units copied ahead of the layers that need them, by a thread outside the interpreter."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ellm_sgl.kernels.cpu.library import TransferArguments, loaded

UnitLists = tuple[torch.Tensor, torch.Tensor]
"""int64 [n] each: units of the source, and of the target."""


def check_buffers(target: torch.Tensor, source: torch.Tensor) -> None:
    """Raise a ValueError unless units can be copied between these buffers as they lie."""
    if not (target.is_contiguous() and source.is_contiguous()):
        raise ValueError("units are copied between contiguous buffers")
    if target.shape[1:] != source.shape[1:] or target.dtype != source.dtype:
        raise ValueError(f"units differ: {target.shape}, {source.shape}")


def check_units(units: torch.Tensor, buffer: torch.Tensor) -> None:
    """Raise a ValueError unless `buffer` has all of these units; there is at least one."""
    if int(units.min()) < 0 or int(units.max()) >= len(buffer):
        raise ValueError(f"a unit is outside 0..{len(buffer) - 1}")


class Transfer:
    """Copies the units of one step after the other; at most one step at a time.

    The calls release the interpreter's lock. A group that is waited for before the thread has
    begun it is copied by the caller.

    Args:
        target, source: [units, ...], contiguous, on the host, same dtype and unit size; else a
            ValueError.
    """

    def __init__(self, target: torch.Tensor, source: torch.Tensor) -> None:
        check_buffers(target, source)
        self._target, self._source = target, source
        self._unit_bytes = source[0].numel() * source.element_size()
        self._library = loaded()
        self._handle = self._library.ellm_make_transfer()

    def __del__(self) -> None:
        if handle := getattr(self, "_handle", None):
            self._library.ellm_free_transfer(handle)

    def start(self, groups: Sequence[UnitLists], slots: int) -> None:
        """Begin a step; what of the step before has not been begun is dropped.

        Args:
            groups: in the order in which they will be needed.
            slots: groups copied ahead of those that are `done`; 0: each when it is waited for.

        Raises:
            ValueError: a unit out of range, lists of different lengths or of another type.
        """
        from_units = torch.cat([sources for sources, _ in groups])
        to_units = torch.cat([targets for _, targets in groups])
        sizes = torch.tensor([len(sources) for sources, _ in groups])
        if len(from_units) != len(to_units):
            raise ValueError(f"{len(from_units)} units to {len(to_units)} places")
        for units, buffer in ((from_units, self._source), (to_units, self._target)):
            if units.dtype != torch.int64:
                raise ValueError(f"units are numbered in int64, not {units.dtype}")
            if len(units):
                check_units(units, buffer)
        ends = sizes.cumsum(0)
        arguments = TransferArguments(
            self._target.data_ptr(), self._source.data_ptr(), to_units.data_ptr(),
            from_units.data_ptr(), ends.data_ptr(), len(groups), self._unit_bytes, slots,
        )  # fmt: skip
        self._library.ellm_transfer_start(self._handle, ctypes.byref(arguments))

    def wait(self, group: int) -> float:
        """Return once the units of `group` are there; the seconds that took."""
        return float(self._library.ellm_transfer_wait(self._handle, group))

    def done(self, group: int) -> None:
        """The units of `group` have been used: those of group + slots may take their place."""
        self._library.ellm_transfer_done(self._handle, group)

    def finish(self) -> None:
        """Drop what has not been begun; return once nothing is in flight."""
        self._library.ellm_transfer_finish(self._handle)
