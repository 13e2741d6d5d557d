"""Streams units between host memory and a CUDA device on a stream of its own.

```
 computing   ──[group 0]──[group 1]──────[group 2]──   waits for `arrived[g]` before group g,
                    │ left[0]    ↑ arrived[2]          marks `left[g]` after it
 copying     [0][1] └──[2]───────┘                     copies into a slot once its group has left
```

Order is kept by events alone: the host issues a whole step and waits for nothing. So nobody here
knows how long the device waited.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from ellm_sgl.memory.shape import IntArray
from ellm_sgl.step.restoration import GroupTransfer
from ellm_sgl.step.transfer.graph import GraphFetch


class DeviceStreamer:
    """What `Streamer` does, without a thread. `host` is in pinned memory."""

    stall_s = 0.0

    def __init__(
        self, host: torch.Tensor, device: torch.Tensor, slots: int, overlap: bool = True
    ) -> None:
        self._host, self._device = host, device
        self._slots = slots
        self._overlap = overlap
        self._api: Any = torch.get_device_module(device.device)
        self._stream = self._api.Stream()
        self._groups: Sequence[GroupTransfer] = ()
        self._sends = False
        """The step's first groups have been sent."""
        self._arrived: dict[int, Any] = {}
        self._stepped: Any = None
        """Recorded behind the last step: everything in the pool is there once it has passed."""

    @property
    def host_units(self) -> int:
        """Units that the host has room for."""
        return len(self._host) - 1

    def in_graphs(self, groups: int, most_units: int) -> GraphFetch | None:
        """What fetches in steps that are replayed; None with overlap off: steps that fetch are not
        replayed then. Arguments: see `GraphFetch`."""
        if not self._overlap:
            return None
        return GraphFetch(self._host, self._device, self._slots, groups, most_units)

    def save(self, device_units: IntArray, host_units: IntArray) -> None:
        """Copy device units to host units, behind the steps issued so far and before later ones.

        The host units may be fetched from by any later step, but not read by the host.
        """
        if self._stepped is not None:
            self._stream.wait_event(self._stepped)
        with self._api.stream(self._stream):
            _copy_units(self._host, host_units, self._device, device_units)

    @contextmanager
    def running(
        self, groups: Sequence[GroupTransfer], ahead: GroupTransfer | None = None
    ) -> Iterator[None]:
        """The step inside this context, on the current stream, fetches `groups`, and `ahead` for
        a later step: behind them, or beside them where a graph fetches."""
        computing = self._api.current_stream()
        # Units saved before this step may be written over by it, and those it fetches to may
        # have been read by the one before.
        computing.wait_stream(self._stream)
        self._stream.wait_stream(computing)
        self._groups, self._sends = groups, False
        try:
            yield
            if ahead is not None:
                self._copy(ahead)
        finally:
            self._groups = ()
            self._arrived.clear()
            self._stepped = self._api.Event()
            self._stepped.record(computing)

    def wait(self, group: int) -> None:
        """What the current stream is given from now on finds the units of `group`."""
        if not self._overlap:
            self._send(group)
        elif not self._sends:  # not where a graph is replayed, which fetches for itself
            self._sends = True
            for first in range(self._slots):
                self._send(first)
        if (arrived := self._arrived.pop(group, None)) is not None:
            self._api.current_stream().wait_event(arrived)

    def done(self, group: int) -> None:
        """The layers of `group` have been issued; behind them its slot may be written over."""
        following = group + self._slots
        if self._overlap and self._has_units(following):
            left = self._api.Event()
            left.record(self._api.current_stream())
            self._stream.wait_event(left)
            self._send(following)

    def _has_units(self, group: int) -> bool:
        return group < len(self._groups) and len(self._groups[group].sources) > 0

    def _send(self, group: int) -> None:
        if not self._has_units(group):
            return
        transfer = self._groups[group]
        if not self._overlap:
            self._stream.wait_stream(self._api.current_stream())
        self._copy(transfer)
        arrived = self._api.Event()
        arrived.record(self._stream)
        self._arrived[group] = arrived

    def _copy(self, transfer: GroupTransfer) -> None:
        with self._api.stream(self._stream):
            _copy_units(
                self._device, transfer.targets.numpy(), self._host, transfer.sources.numpy()
            )


def _copy_units(
    target: torch.Tensor,
    target_units: np.ndarray[Any, np.dtype[Any]],
    source: torch.Tensor,
    source_units: np.ndarray[Any, np.dtype[Any]],
) -> None:
    """Copy units on the current stream, each run of neighbours in one copy."""
    if len(target_units) == 0:
        return
    steps = (np.diff(target_units) != 1) | (np.diff(source_units) != 1)
    bounds = [0, *(np.flatnonzero(steps) + 1).tolist(), len(target_units)]
    for first, end in itertools.pairwise(bounds):
        to, of = int(target_units[first]), int(source_units[first])
        target[to : to + end - first].copy_(source[of : of + end - first], non_blocking=True)
