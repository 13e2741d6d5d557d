"""Memory of two servers over time: a live picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ellm_sgl.serve.chat_load import ChatStream
from ellm_sgl.serve.colocated_report import NAMES
from ellm_sgl.serve.live_view import BARS, PLAIN_EVERY_S, rate_of

Memory = tuple[int, int]
"""What each server has committed, in bytes."""
MIB = 1 << 20
SHOWN = 48
"""Moments of the past that are drawn."""
_STYLES = ("cyan", "magenta")


@dataclass(frozen=True)
class Moment:
    """Two servers at one moment, one of which has a burst."""

    head: str
    """Which burst this is."""
    streams: Sequence[ChatStream]
    """Its chats."""
    history: Sequence[Memory]
    """What both had at every look so far, oldest first; now, at last."""

    def figures(self) -> str:
        begun = min((s.sent_s for s in self.streams if s.sent_s), default=time.monotonic())
        ended = sum(stream.finish is not None for stream in self.streams)
        rate = rate_of(self.streams, time.monotonic() - begun)
        return f"{ended}/{len(self.streams)} complete, {rate:.0f} tokens/s"


Show = Callable[[Moment], None]
"""Called a few times a second."""


@contextmanager
def view(console: Console, title: str, total_bytes: int) -> Iterator[Show]:
    """Shows bursts as they go: in a terminal as a picture that is drawn again and again, and leaves
    nothing behind; elsewhere as a line every few seconds, without control codes."""
    if not console.is_interactive:
        yield _lines(console, title)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda moment: live.update(draw(title, moment, total_bytes), refresh=True)


def _lines(console: Console, title: str) -> Show:
    next_s = time.monotonic() + PLAIN_EVERY_S

    def show(moment: Moment) -> None:
        nonlocal next_s
        if time.monotonic() < next_s:
            return
        next_s = time.monotonic() + PLAIN_EVERY_S
        has = ", ".join(
            f"{name} {nbytes / MIB:.0f} MiB"
            for name, nbytes in zip(NAMES, moment.history[-1], strict=True)
        )
        line = f"{title}: {moment.head}: {moment.figures()}; {has}"
        console.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


def draw(title: str, moment: Moment, total_bytes: int) -> RenderableType:
    """The picture of one moment; its height does not change."""
    grid = Table.grid(padding=(0, 1))
    grid.add_column(no_wrap=True)
    grid.add_column(justify="right", width=8, no_wrap=True)
    grid.add_column(no_wrap=True)
    past = moment.history[-SHOWN:]
    for place, (name, style) in enumerate(zip(NAMES, _STYLES, strict=True)):
        over_time = [min(memory[place] / total_bytes, 1.0) for memory in past]
        bars = "".join(BARS[round(share * (len(BARS) - 1))] for share in over_time)
        has = f"{past[-1][place] / MIB:.0f} MiB" if past else ""
        grid.add_row(Text(name, style=style), has, Text(bars, style=style))
    head = Text.assemble((moment.head, "bold"), "   ", (moment.figures(), "dim"))
    legend = Text(f"KV over time, of {total_bytes / MIB:.0f} MiB", style="dim")
    return Panel(Group(head, Text(""), grid, legend), title=title, title_align="left")
