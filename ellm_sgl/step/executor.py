"""Runs planned steps on a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from torch import nn

from ellm_sgl.memory import PageTable
from ellm_sgl.step.hidden import HiddenStates
from ellm_sgl.step.plan import StepPlan
from ellm_sgl.step.rows import MixedRows
from ellm_sgl.step.separate import SeparateRows, Through, through_layers
from ellm_sgl.step.transfer import AnyStreamer, NativeStreamer, Streamer


class Executor:
    """One per scheduler process; attention asks it for the step being computed.

    Args:
        table: that borrowed units go back to.
        streamer: fetches units from the host tier; None without one.
        hidden: keeps hidden states on the host; None where it keeps only KV.
        fusion: recompute in the same pass as the step's own rows; else `separate` does,
        through: the model's layers.
    """

    def __init__(
        self,
        table: PageTable,
        streamer: AnyStreamer | None,
        hidden: HiddenStates | None,
        fusion: bool,
        through: Through = through_layers,
    ) -> None:
        self._table = table
        self.streamer = streamer
        self.hidden = hidden
        self._fusion = fusion
        self._through = through
        self.plan: StepPlan | None = None
        """The step being computed; None between steps."""
        self.separate: SeparateRows | None = None
        self._rows: MixedRows | SeparateRows | None = None

    @property
    def attached(self) -> bool:
        return self._rows is not None

    def attach(self, decoder: nn.Module) -> None:
        """Run steps on this decoder stack from now on (see `MixedRows` and `SeparateRows`)."""
        if self._fusion:
            self._rows = MixedRows(decoder, self._table.shape)
            return
        streamer = self.streamer
        restart = streamer.restart if isinstance(streamer, NativeStreamer | Streamer) else None
        self._rows = self.separate = SeparateRows(
            decoder, self._table.shape, restart, self._through
        )

    @contextmanager
    def execute(self, plan: StepPlan) -> Iterator[None]:
        """The forward pass inside this context follows `plan`. What it fetches has arrived, and
        what it borrowed is given back, when the context is left."""
        assert self._rows is not None, "attach a model first"
        streamer, hidden = self.streamer, self.hidden
        streaming = (
            streamer.running(plan.transfers, plan.fetched_ahead) if streamer else nullcontext()
        )
        capturing = hidden.capturing(plan.capture) if hidden else nullcontext()
        self.plan = plan
        try:
            with streaming, capturing, self._rows.running(plan):
                yield
        finally:
            self.plan = None
            self._table.return_units(plan.borrowed)

    @property
    def stall_s(self) -> float:
        """Seconds that the last step waited for units from the host tier."""
        return self.streamer.stall_s if self.streamer is not None else 0.0
