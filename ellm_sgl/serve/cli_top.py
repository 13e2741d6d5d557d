"""`ellm-sgl top`: watch a running server in a terminal."""

from __future__ import annotations

import time

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ellm_sgl.client.process import stop_on_signals
from ellm_sgl.config.click_types import FiniteRange
from ellm_sgl.config.commands import answer, json_flag, told_in_a_line
from ellm_sgl.serve.asking import AskError, connected, server_options
from ellm_sgl.serve.top import History, draw, look


@click.command()
@server_options
@click.option(
    "--interval-s", type=FiniteRange(0.1, 3600), default=1.0, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@json_flag
def top(url: str, interval_s: float, once: bool, api_key: str | None, as_json: bool) -> None:
    """Watch a running server: memory by tier, each request with what of it is cached, time per
    token against its SLO, the policy's last decisions. Ctrl-C ends it.

    What the page at /ellm/ shows. --json looks once.
    """
    with told_in_a_line(AskError), connected(url, api_key) as client:
        first = look(client)
        if once or as_json or not Console().is_terminal:
            answer(as_json, first.document, draw(first, [], Console().width))
            return
        _watch(client, interval_s)


def _watch(client: httpx.Client, interval_s: float) -> None:
    history, console = History(), Console()
    with stop_on_signals(), Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                now = look(client)
                size = console.size
                picture = draw(now, history.after(now), size.width, size.height)
                live.update(picture, refresh=True)
            except AskError as error:  # it may come again
                live.update(Text(f"{error}; trying again"), refresh=True)
            time.sleep(interval_s)
