"""`ellm-sgl top`: watch a running server in a terminal."""

from __future__ import annotations

import time

import click
import httpx
from rich.console import Console
from rich.live import Live
from rich.text import Text

from ellm_sgl.config.click_types import FiniteRange
from ellm_sgl.config.commands import answer, json_flag, told_in_a_line
from ellm_sgl.serve.top import History, TopError, draw, look

TIMEOUT_S = 20.0


@click.command()
@click.option("--url", default="http://127.0.0.1:30000", help="Of the server.")
@click.option(
    "--interval-s", type=FiniteRange(0.1, 3600), default=1.0, help="Seconds between two looks."
)
@click.option("--once", is_flag=True, help="Look once, and end.")
@click.option(
    "--api-key",
    envvar="ELLM_SGL_API_KEY",
    metavar="KEY",
    help="The server's --api-key, where it has one; better in ELLM_SGL_API_KEY, where others of "
    "the machine do not see it.",
)
@json_flag
def top(url: str, interval_s: float, once: bool, api_key: str | None, as_json: bool) -> None:
    """Watch a running server: memory by tier, each request with what of it is cached, time per
    token against its SLO, the policy's last decisions. Ctrl-C ends it.

    What the page at /ellm/ shows. --json looks once.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    with told_in_a_line(TopError, httpx.InvalidURL, UnicodeEncodeError):
        client = httpx.Client(base_url=url, headers=headers, timeout=TIMEOUT_S, trust_env=False)
    with client, told_in_a_line(TopError):
        first = look(client)
        if once or as_json or not Console().is_terminal:
            answer(as_json, first.document, draw(first, [], Console().width))
            return
        _watch(client, interval_s)


def _watch(client: httpx.Client, interval_s: float) -> None:
    history, console = History(), Console()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            try:
                now = look(client)
                size = console.size
                picture = draw(now, history.after(now), size.width, size.height)
                live.update(picture, refresh=True)
            except TopError as error:  # it may come again
                live.update(Text(f"{error}; trying again"), refresh=True)
            time.sleep(interval_s)
