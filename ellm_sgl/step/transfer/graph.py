"""Streams units from the host tier inside CUDA graphs of decode steps.

```
 computing   ──[group 0]──[group 1]──────[group 2]──   the graph's main branch
                    │           ↑
 copying     [0][1] └──[2]──────┘                      its other one
```

The order is that of `cuda.DeviceStreamer`, captured with the layers. What is copied is a list in
device memory, which `load` writes before each replay: nothing, mostly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from ellm_sgl.kernels.upload import upload
from ellm_sgl.step.restoration import GroupTransfer

_Numbers = npt.NDArray[np.int64]

CopyListed = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]
"""(target, source, targets, sources, count): see `kernels.experimental.triton.copy`."""


class GraphFetch:
    """What `DeviceStreamer` does eagerly, for steps that are replayed.

    Args:
        host: buffer of the host tier, in pinned memory.
        device: buffer of the pool.
        slots: groups whose units the device holds at once.
        groups: layer groups.
        most_units: that a group may fetch in a step.
        copy: the kernel; Triton's unless given.
    """

    def __init__(
        self,
        host: torch.Tensor,
        device: torch.Tensor,
        slots: int,
        groups: int,
        most_units: int,
        copy: CopyListed | None = None,
    ) -> None:
        if copy is None:
            from ellm_sgl.kernels.experimental.triton.copy import copy_listed

            copy = copy_listed
        self._host, self._device = host, device
        self._slots, self._groups = slots, groups
        self._copy_listed: CopyListed = copy
        self._most_units = most_units
        self._lists = torch.zeros(groups, 2, most_units, dtype=torch.int64, device=device.device)
        self._counts = torch.zeros(groups, 1, dtype=torch.int64, device=device.device)
        self._empty = True
        self._api: Any = torch.get_device_module(device.device)
        self._stream = self._api.Stream()
        # Every graph marks the same ones: in a replay nothing but their order is left of them.
        self._arrived, self._left = ([self._api.Event() for _ in range(groups)] for _ in range(2))

    def fits(self, transfers: Sequence[GroupTransfer]) -> bool:
        """Whether a replay can fetch these."""
        return all(len(transfer.sources) <= self._most_units for transfer in transfers)

    def load(self, transfers: Sequence[GroupTransfer]) -> None:
        """Let the next replay fetch these, for which `fits` holds; one per group, or none."""
        if not transfers and self._empty:
            return
        counts = np.zeros((self._groups, 1), np.int64)
        counts[: len(transfers), 0] = [len(transfer.sources) for transfer in transfers]
        most = int(counts.max())
        lists = np.zeros((self._groups, 2, most), np.int64)
        for group, transfer in enumerate(transfers):
            count = len(transfer.sources)
            lists[group, 0, :count] = transfer.targets.numpy()
            lists[group, 1, :count] = transfer.sources.numpy()
        self._tell(lists, counts)
        self._empty = most == 0

    def _tell(self, lists: _Numbers, counts: _Numbers) -> None:
        """The device, behind the replays issued so far."""
        self._lists[:, :, : lists.shape[2]].copy_(upload(lists, self._lists.device))
        self._counts.copy_(upload(counts, self._counts.device))

    def wait(self, group: int) -> None:
        """What the current stream is given from now on finds the units of `group`."""
        computing = self._api.current_stream()
        if group == 0:
            self._stream.wait_stream(computing)
            for first in range(min(self._slots, self._groups)):
                self._send(first)
        computing.wait_event(self._arrived[group])

    def done(self, group: int) -> None:
        """The layers of `group` have been issued; behind them its slot may be written over."""
        following = group + self._slots
        if following < self._groups:
            self._left[group].record(self._api.current_stream())
            self._stream.wait_event(self._left[group])
            self._send(following)

    def _send(self, group: int) -> None:
        targets, sources = self._lists[group]
        with self._api.stream(self._stream):
            self._copy_listed(self._device, self._host, targets, sources, self._counts[group])
        self._arrived[group].record(self._stream)
