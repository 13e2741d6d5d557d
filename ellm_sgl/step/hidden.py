"""Hidden states instead of KV: captured as rows pass through a layer, projected when needed
(HCache: "Fast State Restoration in LLM Serving with HCache", EuroSys 2025).

```
 every step      rows ──▶ input norm ──▶ x ──▶ QKV projection ──▶ attention ...
                                          └─ capture: to the block's slot of the pool
 a later step    slot ──▶ x ──▶ K, V projection ──▶ K norm ──▶ RoPE ──▶ the block's device units
```

Restoring costs 4 h h_kv operations per token and layer instead of a whole layer with its attention,
and h elements over the link instead of the 2 h_kv of K and V: half where every head has its own
KV, more than KV itself where heads share it (h_kv = KV heads times head size).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn

from ellm_sgl.memory import NONE, HiddenPool, KVPool, PageTable
from ellm_sgl.step.plan import Capture, StepPlan
from ellm_sgl.step.restoration import GroupTransfer

Projection = Callable[[int, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(layer, what its projections are given [n, hidden], positions [n]) → K, V as the layer would
write them to the pool, each [n, kv_heads * head_dim]."""


def plan_capture(table: PageTable, seq_ids: Sequence[int], plan: StepPlan) -> Capture:
    """Take room in the host tier for the blocks whose first token this step computes, and capture
    what has room.

    Blocks that are full after this step become copies: only the next step may fetch them. Span
    rows count if they go through all hidden groups, so that what was recomputed for want of a copy
    gets one if there is room again.
    """
    host, block_tokens = table.host, table.shape.block_tokens
    layouts = plan.groups[host.hidden_groups - 1].requests
    known = [table.blocks_of(s) for s in seq_ids]
    first = np.cumsum([0, *map(len, known)])
    ranges = [
        (begin, rows.row, rows.position, rows.size)
        for begin, request in zip(first[:-1].tolist(), layouts, strict=True)
        for rows in (request.new, *request.spans)
    ]
    begin, row, position, count = np.array(ranges, np.int64).T
    within = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    rows, positions = np.repeat(row, count) + within, np.repeat(position, count) + within
    blocks = np.concatenate(known)[np.repeat(begin, count) + positions // block_tokens]
    offsets = positions % block_tokens

    host.begin_hidden(np.unique(blocks[offsets == 0]))
    slots = host.filling[blocks].astype(np.int64)
    kept = slots != NONE
    host.finish_hidden(np.unique(blocks[kept & (offsets == block_tokens - 1)]))
    return Capture(*(torch.from_numpy(index[kept]) for index in (rows, slots, offsets)))


class HiddenStates:
    """Captures the hidden states of the lowest layers in `states`, and turns them into KV again,
    in `pool`."""

    def __init__(self, states: HiddenPool, pool: KVPool) -> None:
        self._states = states
        self._pool = pool
        self._project: Projection | None = None
        self._capture: Capture | None = None

    @property
    def num_layers(self) -> int:
        """Layers whose hidden states are kept, from the lowest."""
        shape = self._states.shape
        return min(self._states.num_groups * shape.layer_group, shape.num_layers)

    @property
    def unit_bytes(self) -> int:
        """Of the hidden states of one block in one layer group."""
        return self._states.buffer[0].nbytes

    @property
    def nbytes(self) -> int:
        """Of memory for hidden states."""
        return self._states.buffer.nbytes

    def attach(self, inputs: Sequence[nn.Module], project: Projection) -> None:
        """Watch a model.

        Args:
            inputs: of each hidden layer, the module that is called with its projections' input.
            project: computes K and V from that input.
        """
        self._project = project
        for layer, module in enumerate(inputs):
            module.register_forward_pre_hook(self._keep_input(layer))

    @contextmanager
    def capturing(self, capture: Capture | None) -> Iterator[None]:
        """The forward pass inside this context keeps what `capture` says."""
        self._capture = capture
        try:
            yield
        finally:
            self._capture = None

    @torch.inference_mode()  # of the thread that calls this
    def restore(self, group: int, transfer: GroupTransfer) -> None:
        """Write KV of the transfer's hidden states to its device units, layer by layer."""
        assert self._project is not None and transfer.positions is not None
        positions = transfer.positions.flatten()
        shape, device = self._pool.shape, self._pool.buffer.device
        first = group * shape.layer_group
        for layer in range(first, min(first + shape.layer_group, shape.num_layers)):
            states = self._states.states(layer)[transfer.sources].to(device)
            k, v = self._project(layer, states.flatten(0, 1), positions)
            for rows, units in ((k, self._pool.keys(layer)), (v, self._pool.values(layer))):
                units[transfer.targets] = rows.view(-1, *units.shape[1:]).to(units.dtype)

    def _keep_input(self, layer: int) -> Any:
        slots = self._states.slots(layer)

        def hook(_: nn.Module, args: Any) -> None:
            if (capture := self._capture) is not None:
                states = args[0][capture.rows].to(slots.device, slots.dtype)
                slots[capture.slots, capture.offsets] = states

        return hook
