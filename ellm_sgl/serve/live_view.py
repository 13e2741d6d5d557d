"""How a load is going: a live picture in a terminal, plain lines elsewhere."""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ellm_sgl.serve.chat_load import ChatStream

RATE_WINDOW_S = 2.0
"""Tokens per second are those of so many seconds."""
PLAIN_EVERY_S = 5.0
TEXTS_SHOWN = 6
BARS = "▁▂▃▄▅▆▇█"
_BARS_SHOWN = 40


@dataclass(frozen=True)
class Progress:
    """A load at one moment."""

    streams: Sequence[ChatStream]
    elapsed_s: float
    state: Mapping[str, Any]
    """`GET /ellm/state`; empty for stock SGLang."""
    cached_ratios: Sequence[float]
    """Mean cached ratio at every look so far, oldest first."""

    @property
    def ended(self) -> int:
        return sum(stream.finish is not None for stream in self.streams)

    def tokens_per_s(self) -> float:
        """Pieces of text that arrived lately; a piece is a token, but for few."""
        return rate_of(self.streams, self.elapsed_s)


def rate_of(streams: Sequence[ChatStream], elapsed_s: float) -> float:
    """`Progress.tokens_per_s`, of streams that began so long ago."""
    window = min(RATE_WINDOW_S, elapsed_s)
    since = time.monotonic() - window
    pieces = sum(len(s.arrivals_s) - bisect.bisect(s.arrivals_s, since) for s in streams)
    return pieces / window if window > 0 else 0.0


Show = Callable[[Progress], None]
"""Called a few times a second."""


@contextmanager
def view(console: Console, title: str) -> Iterator[Show]:
    """Shows one load as it goes: in a terminal as a picture that is drawn again and again, and
    leaves nothing behind; elsewhere as a line every few seconds, without control codes."""
    if not console.is_interactive:
        yield _lines(console, title)
        return
    with Live(console=console, auto_refresh=False, transient=True) as live:
        yield lambda progress: live.update(draw(title, progress), refresh=True)


def _lines(console: Console, title: str) -> Show:
    next_s = PLAIN_EVERY_S

    def show(progress: Progress) -> None:
        nonlocal next_s
        if progress.elapsed_s < next_s:
            return
        next_s += PLAIN_EVERY_S
        parts = [
            f"{title}: {progress.elapsed_s:.0f} s",
            f"{progress.ended}/{len(progress.streams)} complete",
            f"{progress.tokens_per_s():.0f} tokens/s",
            *(f"{name} {value}" for name, value in _figures(progress.state)),
        ]
        console.print(", ".join(parts), soft_wrap=True, highlight=False, markup=False)

    return show


def draw(title: str, progress: Progress) -> RenderableType:
    """The picture of one moment; its height does not change while a load goes on."""
    head = Text.assemble(
        ("complete ", "dim"), f"{progress.ended}/{len(progress.streams)}",
        ("   tokens/s ", "dim"), f"{progress.tokens_per_s():.0f}",
        ("   elapsed ", "dim"), f"{progress.elapsed_s:.0f} s",
    )  # fmt: skip
    lines: list[RenderableType] = [head]
    if progress.state:
        lines += [_figures_line(progress.state), _ratio_line(progress.cached_ratios)]
    return Panel(Group(*lines, Text(""), _texts(progress.streams)), title=title, title_align="left")


def _figures(state: Mapping[str, Any]) -> list[tuple[str, str]]:
    if not state:
        return []
    return [
        ("running", f"{state['running']}"),
        ("waiting", f"{state['waiting']}"),
        ("cached ratio", f"{state['cached_ratio_mean']:.2f}"),
        ("uncached tokens", f"{state['uncached_tokens']:,}"),
        ("evicted units", f"{state['evicted_units_total']:,}"),
        ("retractions", f"{state['retractions_total']}"),
    ]


def _figures_line(state: Mapping[str, Any]) -> RenderableType:
    grid = Table.grid(padding=(0, 1), expand=True)
    figures = _figures(state)
    grid.add_row(*(Text(name, style="dim") for name, _ in figures))
    grid.add_row(*(Text(value, style="bold") for _, value in figures))
    return grid


def _ratio_line(ratios: Sequence[float]) -> Text:
    """The cached ratio over time; the lowest bar stands for half cached or less."""
    shown = [max(0.0, 2 * ratio - 1) for ratio in ratios[-_BARS_SHOWN:]]
    bars = "".join(BARS[round(height * (len(BARS) - 1))] for height in shown)
    return Text.assemble(("cached ratio, from 50 to 100 %  ", "dim"), (bars, "cyan"))


def _texts(streams: Sequence[ChatStream]) -> RenderableType:
    """The ends of some texts, of chats that write now if there are enough."""
    writing = [s for s in streams if s.text and s.finish is None]
    waiting = [s for s in streams if not s.text and s.finish is None]
    ended = [s for s in streams if s.finish is not None]
    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True, style="cyan", width=13)
    grid.add_column(no_wrap=True, ratio=1)
    for stream in (writing + waiting + ended[::-1])[:TEXTS_SHOWN]:
        grid.add_row(stream.topic, _Tail(stream.text) if stream.text else "[dim]waiting[/dim]")
    return grid


@dataclass(frozen=True)
class _Tail:
    """As much of the end of a text as fits one line."""

    text: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield Text(" ".join(self.text.split())[-options.max_width :], no_wrap=True)
