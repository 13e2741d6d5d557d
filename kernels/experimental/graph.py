"""Decode steps at fixed addresses, so that a CUDA graph of them can be replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from ellm_sgl.kernels.layout import GroupLayout


class GraphSteps(ABC):
    """Runs what `load` was last given: one new token per request; what is missing is fetched.

    A graph captured with `run` reads its work from here whenever it is replayed. Rows beyond those
    loaded write to scratch unit 0; what comes out for them means nothing.

    Args:
        layer_groups: of the pool.
        most_rows: rows of the largest graph.
        most_blocks: blocks of all requests of a step, shared ones counted for each.
        pool: keys of a layer, for its sizes.
    """

    def __init__(
        self, layer_groups: int, most_rows: int, most_blocks: int, pool: torch.Tensor
    ) -> None:
        device = pool.device
        self._most_rows, self._most_blocks = most_rows, most_blocks
        # A block more for each row beyond those loaded.
        blocks = most_blocks + most_rows
        self._blocks = torch.zeros(layer_groups, blocks, dtype=torch.int32, device=device)
        self._units = torch.zeros(layer_groups, most_rows, dtype=torch.int64, device=device)
        self._offsets = torch.zeros(most_rows, dtype=torch.int64, device=device)

    def fits(self, groups: Sequence[GroupLayout]) -> bool:
        """Whether these layouts are of such a step, and small enough. SGLang checks the rows."""
        step = groups[0].stacked
        return (
            len(groups[0].units) <= self._most_blocks
            and all(r.new.size == 1 and not r.spans for r in step.requests)
            # Consecutive rows: each one has a unit.
            and isinstance(step.write_rows, slice)
            and all(group.stacked is step for group in groups)
        )

    @abstractmethod
    def capture(self, rows: int) -> None:
        """To be called before a graph of so many rows is captured."""

    def load(self, groups: Sequence[GroupLayout], rows: int) -> None:
        """Let the next replay compute this step, for which `fits` holds.

        Args:
            groups: all of the step's.
            rows: of the graph that will be replayed, at least those of the step.
        """
        step = groups[0].stacked
        self._offsets[: step.rows].copy_(step.write_offsets)
        self._units.zero_()
        self._units[:, : step.rows].copy_(step.write_units)

    @abstractmethod
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        layer_group: int,
        first_layer: bool,
        scale: float,
    ) -> torch.Tensor:
        """Attention of one layer; `reference.mixed_attention` says what the tensors are.
        `first_layer`: the layer is its group's first."""
