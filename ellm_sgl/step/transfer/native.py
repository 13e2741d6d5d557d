"""Streams units from the host tier as `Streamer` does, by a thread outside the interpreter.

A Python thread would have to take the interpreter's lock from the model twice per layer group: on
two cores, 1.2 ms of a step of 7 to 10. For KV on CPU hosts; hidden states need `Streamer`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from ellm_sgl.kernels.cpu.attention import copy_units
from ellm_sgl.kernels.cpu.transfer import Transfer
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.step.restoration import GroupTransfer


class NativeStreamer:
    """Copies a step's units. Arguments and methods as those of `Streamer`."""

    def __init__(
        self, host: torch.Tensor, device: torch.Tensor, slots: int, overlap: bool = True
    ) -> None:
        self._host, self._device = host, device
        self._transfer = Transfer(device, host)
        self._slots = slots if overlap else 0
        self._groups: Sequence[GroupTransfer] = ()
        self._own = 0
        """Groups of the step itself; one more is for a later step."""
        self.stall_s = 0.0
        """Seconds that the last step waited for copies."""

    def save(self, device_units: IntArray, host_units: IntArray) -> None:
        """Copy device units to host units; returns when the copy is made."""
        transfer = GroupTransfer.of(device_units, host_units)
        copy_units(self._host, transfer.targets, self._device, transfer.sources)

    @contextmanager
    def running(
        self, groups: Sequence[GroupTransfer], ahead: GroupTransfer | None = None
    ) -> Iterator[None]:
        """As `Streamer.running`."""
        self._groups = groups if ahead is None else (*groups, ahead)
        self._own, self.stall_s = len(groups), 0.0
        self.restart()
        try:
            yield
            if ahead is not None:
                self.stall_s += self._transfer.wait(self._own)
        finally:
            if self._groups:
                self._transfer.finish()
            self._groups, self._own = (), 0

    def restart(self) -> None:
        """The step goes through the layers from the first on (again): fetch for that."""
        if self._groups:
            self._transfer.start([(g.sources, g.targets) for g in self._groups], self._slots)

    def wait(self, group: int) -> None:
        """Return once the units of `group` are on the device."""
        if group < self._own:
            self.stall_s += self._transfer.wait(group)

    def done(self, group: int) -> None:
        """The layers of `group` have attended; the units of its slot may be written over."""
        if group < self._own and self._slots:
            self._transfer.done(group)
