"""A running server in a terminal: what its page shows, from the same two routes."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from ellm_sgl.client.state import tokens_in
from ellm_sgl.serve.asking import ask, of_this_version

BESIDE = 62
"""Characters beside a request's bar."""
BARS = (10, 80)
"""Least and most characters of a bar."""
CELLS = {"cached": ("■", "green"), "host": ("▨", "yellow"), "lost": ("□", "red")}
SPARKS = "▁▂▃▄▅▆▇█"
KEPT = 60
"""Looks that the history shows."""
DECISIONS_SHOWN = 5
WHOLE_LINES = 24
"""That a picture needs to show some requests and the last decisions,"""
SHORT_LINES = 12
"""and one that leaves these out, as where several replicas share a terminal."""
TOTALS = (
    "evicted_units_total", "fetched_units_total", "recomputed_tokens_total", "pauses_total",
    "retractions_total",
)  # fmt: skip


@dataclass(frozen=True)
class Look:
    """A server at one moment."""

    state: Mapping[str, Any]
    """`GET /ellm/state`."""
    seen: Mapping[str, Any]
    """`GET /ellm/requests`."""

    def replicas(self) -> list[Look]:
        """One for each scheduler, where there are several (`--data-parallel-size`)."""
        states, seen = self.state.get("replicas"), self.seen.get("replicas")
        if states is None or seen is None:
            return [self]
        return [Look(*both) for both in zip(states, seen, strict=True)]

    @property
    def document(self) -> dict[str, Any]:
        """Both, as JSON has them."""
        return {"state": self.state, **self.seen}

    def tier(self, name: str) -> tuple[int, int]:
        """(used, total) tokens of KV on the "device", or the "host"."""
        total, free = (self.state[f"{name}_units_{which}"] for which in ("total", "free"))
        return tokens_in(self.state, total - free), tokens_in(self.state, total)

    def tpot_ms(self) -> float:
        """Mean time per output token of those that decode; nan of none."""
        known = [r["tpot_ms"] for r in self.seen["requests"] if r["state"] == "decoding"]
        measured = [tpot for tpot in known if tpot is not None]
        return sum(measured) / len(measured) if measured else math.nan


def look(client: httpx.Client) -> Look:
    """Ask once.

    Raises:
        AskError: no answer, or none that makes sense.
    """
    return Look(ask(client, "/ellm/state"), ask(client, "/ellm/requests"))


def draw(
    now: Look, cached: Sequence[float], width: int = 100, height: int = 1000
) -> RenderableType:
    """The picture of one moment.

    Args:
        cached: mean cached ratio of the first replica at every look so far, oldest first.
        width, height: characters and lines that there are.

    Raises:
        AskError: something is not where it was.
    """
    with of_this_version():
        first, *others = every = now.replicas()
        rows = height // len(every)
        if not others or rows >= WHOLE_LINES:
            pictures = [_picture(first, cached, width, rows)]
            return Group(*pictures, *(_picture(other, (), width, rows) for other in others))
        short = [_framed(look, _outline(look, (), _bar_width(width))) for look in every]
        if len(every) * SHORT_LINES > height:
            fit = max((height - 1) // SHORT_LINES, 1)
            more = f"and {len(every) - fit:,} more replicas; ellm-sgl top --once shows all"
            short[fit:] = [Text(more, "dim")]
        return Group(*short)


def _bar_width(width: int) -> int:
    return min(max(width - BESIDE, BARS[0]), BARS[1])


def _picture(now: Look, cached: Sequence[float], width: int, height: int) -> RenderableType:
    longest = _bar_width(width)
    decisions = now.seen["decisions"][:DECISIONS_SHOWN]
    room = max(height - 17 - len(decisions), 3)
    parts = [*_outline(now, cached, longest), Text(""), _requests(now, room, longest)]
    if decisions:
        parts += [Text(""), _decisions(decisions)]
    return _framed(now, parts)


def _outline(now: Look, cached: Sequence[float], bar_width: int) -> list[RenderableType]:
    return [_figures(now), Text(""), _tiers(now, cached, bar_width)]


def _framed(now: Look, parts: Sequence[RenderableType]) -> RenderableType:
    policy = now.state["policy"]["name"]
    title = f"eLLM, policy {policy}"
    if "replica" in now.state:
        title += f", replica {now.state['replica']}"
    return Panel(Group(*parts, Text(""), _totals(now)), title=Text(title), title_align="left")


def _figures(now: Look) -> RenderableType:
    steps, slo = now.seen["steps"], now.seen["tpot_slo_ms"]
    busy = bool(now.seen["requests"])
    figures = {
        "decoding": f"{now.seen['counts']['decoding']}",
        "paused": f"{now.seen['counts']['paused']}",
        "waiting": f"{now.state['waiting']}",
        "cached": f"{now.state['cached_ratio_mean']:.0%}",
        "r": f"{now.seen['uncached_ratio']:.2f}",
        "batch": f"{steps['batch']:.1f}",
        "tokens/s": f"{steps['tokens_per_s']:,.0f}" if busy else "-",
        "TPOT": _ms(now.tpot_ms()),
        "SLO": "none" if slo is None else _ms(slo),
        "step": _ms(steps["mean_ms"]) if busy else "-",
        "predicted": _ms(steps["predicted_ms"]) if busy else "-",
    }
    lines: list[RenderableType] = []
    every = list(figures.items())
    for those in (every[:6], every[6:]):
        grid = Table.grid(padding=(0, 2))
        for _ in those:
            grid.add_column(no_wrap=True, min_width=9)
        grid.add_row(*(Text(name, "dim") for name, _ in those))
        grid.add_row(*(Text(value, "bold") for _, value in those))
        lines.append(grid)
    return Group(*lines)


def _tiers(now: Look, cached: Sequence[float], width: int) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for name, style in (("device", "green"), ("host", "yellow")):
        used, total = now.tier(name)
        if total:
            filled = round(width * used / total)
            bar = Text.assemble(("█" * filled, style), ("░" * (width - filled), "dim"))
            grid.add_row(name, bar, f"{used:,} of {total:,} tokens")
    line = "".join(SPARKS[round(ratio * (len(SPARKS) - 1))] for ratio in cached[-KEPT:])
    if line:
        grid.add_row("cached", Text(line[-width:], "green"), Text("over time", "dim"))
    return grid


def _requests(now: Look, room: int, bar_width: int) -> RenderableType:
    requests = now.seen["requests"]
    if not requests:
        return Text("Nobody is being served.", "dim")
    shown = requests[: room - 2] if len(requests) > room - 1 else requests
    longest = max(request["tokens"] for request in shown)
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, max_width=12)
    grid.add_column(no_wrap=True)
    grid.add_column(no_wrap=True, width=bar_width)
    grid.add_column(no_wrap=True, justify="right")
    grid.add_column(no_wrap=True, justify="right")
    headings = ("request", "does", "KV", "cached", "TPOT")
    grid.add_row(*(Text(heading, "dim") for heading in headings))
    for request in shown:
        spans = [(count, now.seen["kinds"][kind]) for count, kind in request["spans"]]
        cached = sum(count for count, kind in spans if kind == "cached")
        width = max(round(bar_width * request["tokens"] / max(longest, 1)), 1)
        grid.add_row(
            Text(_printable(request["rid"])),
            request["state"],
            bar(spans, width),
            f"{cached:,}/{request['tokens']:,}" if spans else f"{request['tokens']:,}",
            _pace(request, now.seen["tpot_slo_ms"]),
        )
    hidden = len(requests) - len(shown) + now.seen["left_out"]
    legend = "■ cached  ▨ missing, on the host  □ missing, to recompute"
    return Group(grid, Text(f"and {hidden:,} more; {legend}" if hidden else legend, "dim"))


def bar(spans: Sequence[tuple[int, str]], width: int) -> Text:
    """Spans of tokens in so many characters, each of the kind of the token in its middle."""
    total = sum(count for count, _ in spans)
    drawn = Text("" if total else "·" * width, "" if total else "dim")
    ends: list[tuple[int, str]] = []
    for count, kind in spans:
        ends.append(((ends[-1][0] if ends else 0) + count, kind))
    for cell in range(width if total else 0):
        middle = (cell + 0.5) * total / width
        drawn.append(*CELLS[next(kind for end, kind in ends if middle < end)])
    return drawn


def _pace(request: Mapping[str, Any], server_slo_ms: float | None) -> Text:
    """How fast it decodes; of a prompt that is computed in chunks, how far it is."""
    if prompt := request["prompt"]:
        share = prompt["done"] / max(request["tokens"], 1)
        return Text(f"{share:.0%}, {_ms(prompt['left_ms'])} left")
    tpot = request["tpot_ms"]
    if tpot is None:
        return Text("")
    slos = [slo for slo in (request["tpot_slo_ms"], server_slo_ms) if slo is not None]
    over = any(tpot > slo for slo in slos)
    return Text(f"> SLO {_ms(tpot)}" if over else _ms(tpot), "red" if over else "")


def _decisions(decisions: Iterable[Mapping[str, Any]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    for made in decisions:
        grid.add_row(
            Text(f"{_ms(made['ago_ms'])} ago", "dim"),
            f"admit {made['admitted']}, pause {made['paused']}",
            f"r {made['uncached_ratio']:.2f}",
            f"{made['swap_layers']}:{made['recompute_layers']}, δ {made['delta']:.0%}",
            f"in {_ms(made['took_ms'])}",
            Text("replaced", "red") if made["replaced"] else "",
        )
    return grid


def _totals(now: Look) -> RenderableType:
    named = [f"{name.removesuffix('_total').replace('_', ' ')} {now.state[name]:,}"
             for name in TOTALS]  # fmt: skip
    fallbacks = now.state["policy"].get("fallbacks", {})
    named += [f"fallbacks {', '.join(f'{k} {n:,}' for k, n in fallbacks.items()) or 'none'}"]
    return Text("  ".join(named), "dim")


def _ms(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value / 1e3:.1f} s" if value >= 1000 else f"{value:.1f} ms"


def _printable(name: str) -> str:
    """Without what would steer a terminal."""
    return "".join(c if c.isprintable() else "?" for c in name)


class History:
    """Of the looks so far."""

    def __init__(self) -> None:
        self._cached: deque[float] = deque(maxlen=KEPT)

    def after(self, now: Look) -> list[float]:
        self._cached.append(min(max(now.state["cached_ratio_mean"], 0.0), 1.0))
        return list(self._cached)
