"""Recomputation as a pass of its own: what fusing it with the step is measured against.

```
 fused      new + recomputed rows ─▶ layer 0 ─▶ layer 1 ─▶ ...       weights are read once
 separate   recomputed rows       ─▶ layer 0 ─▶ ... ─▶ layer j-1     K, V of every layer are kept,
            new rows              ─▶ layer 0 ─▶ layer 1 ─▶ ...       and attended to here
```

The same rows go through the same layers, so both are exact; but the second pass reads the weights
again, and the first pass's KV takes memory for all layers at once instead of for one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import nn

from ellm_sgl.kernels.layout import GroupLayout, RequestLayout, RowRange
from ellm_sgl.memory import PoolShape
from ellm_sgl.step.plan import StepPlan

KV = tuple[torch.Tensor, torch.Tensor]
"""K and V, each [rows, kv_heads, head_dim]."""

Through = Callable[
    [Iterable[nn.Module], torch.Tensor, torch.Tensor, Any, Callable[[int], int]], None
]
"""(layers, positions [rows], their input [rows, hidden], batch, rows that layer i still takes): has
rows go through the layers, of which only what they do to attention counts."""


def through_layers(
    layers: Iterable[nn.Module],
    positions: torch.Tensor,
    hidden: torch.Tensor,
    batch: Any,
    rows: Callable[[int], int],
) -> None:
    """`Through` of layers called as `layer(positions, hidden, batch, residual)` that return
    (hidden, residual)."""
    residual: torch.Tensor | None = None
    for index, layer in enumerate(layers):
        left = rows(index)
        residual = None if residual is None else residual[:left]
        hidden, residual = layer(positions[:left], hidden[:left], batch, residual)


class _PassDone(Exception):  # noqa: N818 (no error: the way out of the pass's last layer)
    """The first pass has the KV of its last layer; nothing behind that is needed."""


class SeparateRows:
    """Takes recomputed rows through the model before SGLang's rows; stands in for `MixedRows`.

    Args:
        decoder: an `nn.Module` called as `decoder(input_ids, positions, batch, ...)`, with
            `embed_tokens` and `layers`.
        shape: layer groups of the pool.
        restart: called between the passes: fetching begins again with the first layer group.
            None: nothing is fetched.
        through: the way through the layers.
    """

    def __init__(
        self,
        decoder: Any,
        shape: PoolShape,
        restart: Callable[[], None] | None,
        through: Through = through_layers,
    ) -> None:
        self._decoder = decoder
        self._through = through
        self._shape = shape
        self._restart = restart
        self._plan: StepPlan | None = None
        self._first_pass = False
        self._kept: dict[int, KV] = {}
        decoder.register_forward_pre_hook(self._recompute)

    @contextmanager
    def running(self, plan: StepPlan) -> Iterator[None]:
        """The forward pass inside this context computes `plan`'s recomputed rows first."""
        self._plan = plan if plan.recomputed_rows else None
        try:
            yield
        finally:
            self._plan, self._first_pass = None, False
            self._kept.clear()

    def attend(self, layer: int, layout: GroupLayout, kv: KV) -> tuple[GroupLayout, KV]:
        """What attention is to be given in this pass for the rows of `kv`.

        In the first pass K and V are kept for the second, where they follow the new rows' as the
        plan has it. They are written to the pool there, all at once.

        Args:
            layout: the plan's, of the layer's group.
            kv: of the pass's rows.
        """
        if (plan := self._plan) is None:
            return layout, kv
        if self._first_pass:
            self._kept[layer] = kv
            if layer == self._last_layer(plan):
                raise _PassDone
            return spans_only(layout, plan.new_rows), kv
        if layer in self._kept:
            k, v = self._kept.pop(layer)
            kv = torch.cat([kv[0], k]), torch.cat([kv[1], v])
        return layout, kv

    def _last_layer(self, plan: StepPlan) -> int:
        """The last layer that a recomputed row is needed for."""
        groups = sum(layout.rows > plan.new_rows for layout in plan.groups)
        return min(groups * self._shape.layer_group, self._shape.num_layers) - 1

    def _recompute(self, _: nn.Module, args: Any) -> None:
        if (plan := self._plan) is None:
            return
        hidden = self._decoder.embed_tokens(plan.recomputed_token_ids)
        self._first_pass = True
        with suppress(_PassDone):
            self._through(
                self._decoder.layers,
                plan.recomputed_positions,
                hidden,
                args[2],
                lambda layer: plan.rows_in(self._shape.group_of(layer)) - plan.new_rows,
            )
        self._first_pass = False
        if self._restart is not None:
            self._restart()


def spans_only(layout: GroupLayout, new_rows: int) -> GroupLayout:
    """The layout of a pass over the recomputed rows alone: row 0 is the first of them.

    The last span of a request takes the place of its new rows. Nothing is written.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=layout.units.device)
    return GroupLayout.of(
        rows=layout.rows - new_rows,
        requests=tuple(_spans_of(r, new_rows) for r in layout.requests if r.spans),
        units=layout.units,
        write_rows=slice(0, 0),
        write_units=nothing,
        write_offsets=nothing,
    )


def _spans_of(request: RequestLayout, new_rows: int) -> RequestLayout:
    spans = [RowRange(s.row - new_rows, s.position, s.size) for s in request.spans]
    last = max(spans, key=lambda span: span.position)
    others = tuple(span for span in spans if span is not last)
    return request._replace(new=last, spans=others, unstored_new=True)
