"""Streams units from the host tier into the device pool while the layers before them compute.

One worker copies, group by group, in the order in which the layers need them. At most `slots`
groups are in flight: a group's copy begins when the layers that used its slot before it are done.
What a later step needs (requests that sit this one out and come back) is copied last.

Where the host has hidden states instead of KV, the worker projects them to KV as well, so that
for the layers they arrive like any other units.

The worker is a thread, whose copies release the interpreter's lock: this is for CPU hosts
(`transfer.cuda` for CUDA). With overlap off, each group is copied when its first layer asks.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import torch

from ellm_sgl.kernels import torch_paged
from ellm_sgl.kernels.choose import CopyUnits
from ellm_sgl.memory.shape import IntArray
from ellm_sgl.step.restoration import GroupTransfer

Project = Callable[[int, GroupTransfer], None]
"""Projects the hidden states of a layer group to KV, in the transfer's device units."""


Submit = Callable[..., Future[None]]
"""Takes a function and its arguments. Jobs are done one after the other, in that order."""


class Streamer:
    """Copies a step's units; one per scheduler process.

    Args:
        host: buffer of the host pool, `[units + 1, F, 2, block_tokens, kv_heads, head_dim]`.
        device: buffer of the device pool, of the same unit shape.
        slots: groups whose units the device holds at once.
        overlap: copy ahead while layers compute.
        copy: copies units between the buffers.
        project: brings units of which the host has hidden states.
        submit: copies while layers compute; a thread of its own unless given.
    """

    def __init__(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        slots: int,
        overlap: bool = True,
        copy: CopyUnits = torch_paged.copy_units,
        project: Project | None = None,
        submit: Submit | None = None,
    ) -> None:
        self._host, self._device = host, device
        self._copy_units = copy
        self._project = project
        self._slots = slots
        self._submit: Submit | None = None
        if overlap:
            self._submit = submit or ThreadPoolExecutor(1, "ellm-transfer").submit
        self._groups: Sequence[GroupTransfer] = ()
        self._arriving: dict[int, Future[None]] = {}
        self._ahead: GroupTransfer | None = None
        """To be sent once the step's own groups have been."""
        self._ahead_arriving: Future[None] | None = None
        self.stall_s = 0.0
        """Seconds that the last step waited for copies."""

    def save(self, device_units: IntArray, host_units: IntArray) -> None:
        """Copy device units to host units; returns when the copy is made."""
        transfer = GroupTransfer.of(device_units, host_units)
        self._copy_units(self._host, transfer.targets, self._device, transfer.sources)

    @contextmanager
    def running(
        self, groups: Sequence[GroupTransfer], ahead: GroupTransfer | None = None
    ) -> Iterator[None]:
        """The step inside this context fetches `groups`, and `ahead` for a later step: that has
        arrived, too, when the context is left."""
        self._groups, self._ahead, self.stall_s = groups, ahead, 0.0
        self.restart()
        try:
            yield
            self._wait_ahead()
        finally:
            self._settle()
            if self._ahead_arriving is not None:
                self._ahead_arriving.exception()
            self._groups, self._ahead, self._ahead_arriving = (), None, None

    def restart(self) -> None:
        """The step goes through the layers from the first on (again): fetch for that."""
        self._settle()
        for group in range(self._slots):
            self._send(group)

    def _settle(self) -> None:
        """Let what is in flight end, so that it cannot be written into another pass or step."""
        for future in self._arriving.values():
            future.exception()
        self._arriving.clear()

    def wait(self, group: int) -> None:
        """Return once the units of `group` are on the device."""
        if group >= len(self._groups) or len(self._groups[group].sources) == 0:
            return
        began = time.perf_counter()
        if self._submit is None:
            self._bring(group, self._groups[group])
        else:
            self._arriving.pop(group).result()
        self.stall_s += time.perf_counter() - began

    def done(self, group: int) -> None:
        """The layers of `group` have attended; the units of its slot may be written over."""
        self._send(group + self._slots)

    def _wait_ahead(self) -> None:
        if self._ahead is None:
            return
        began = time.perf_counter()
        if self._ahead_arriving is None:
            self._copy(self._ahead)
        else:
            self._ahead_arriving.result()
        self.stall_s += time.perf_counter() - began

    def _send(self, group: int) -> None:
        if self._submit is None:
            return
        if group >= len(self._groups):
            if self._ahead is not None and self._ahead_arriving is None:
                self._ahead_arriving = self._submit(self._copy, self._ahead)
        elif len(self._groups[group].sources):
            self._arriving[group] = self._submit(self._bring, group, self._groups[group])

    def _bring(self, group: int, transfer: GroupTransfer) -> None:
        if transfer.positions is None:
            self._copy(transfer)
        else:
            assert self._project is not None, "hidden states on the host, nothing to project them"
            self._project(group, transfer)

    def _copy(self, transfer: GroupTransfer) -> None:
        self._copy_units(self._device, transfer.targets, self._host, transfer.sources)
