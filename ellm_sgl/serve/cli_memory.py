"""`ellm-sgl memory`: who shares a budget of KV memory; and another size for a server's pool."""

from __future__ import annotations

from typing import Any

import click
from rich.console import RenderableType

from ellm_sgl.budget import Budget, Sharer, list_budgets, path_of
from ellm_sgl.config.click_types import TOKENS
from ellm_sgl.config.commands import answer, json_flag, plain_table, told_in_a_line
from ellm_sgl.serve.asking import AskError, connected, server_options
from ellm_sgl.serve.resize import resize

_FIGURES = ("floor", "needs", "share", "has")


@click.command()
@click.argument("name", required=False)
@click.option(
    "--resize",
    "tokens",
    type=TOKENS,
    help="Instead: have the pool of the server at --url hold so much KV; in tokens.",
)
@server_options
@click.option(
    "--admin-api-key",
    envvar="ELLM_SGL_ADMIN_API_KEY",
    metavar="KEY",
    help="The server's, where it has one: for --resize, beside --api-key.",
)
@json_flag
def memory(
    name: str | None,
    tokens: int | None,
    url: str,
    api_key: str | None,
    admin_api_key: str | None,
    as_json: bool,
) -> None:
    """List the servers that share a budget (--ellm-memory-budget): the one of this NAME, or all of
    yours. Or, with --resize, give one server's pool another size while it serves.

    In MiB: the floor (what it always has), what its requests need, its share (what it may have),
    and what it has committed. Exit status 1 if there is no such budget, or its ledger cannot be
    read; or if the pool does not come to its size.
    """
    if tokens is not None:
        if name is not None:
            raise click.UsageError(f"--resize is of a server, not of budget {name}; give one")
        with told_in_a_line(AskError), connected(url, api_key) as client:
            resized = resize(client, tokens, admin_api_key)
        answer(as_json, resized.to_json(), str(resized))
        if resized.outcome != "applied":
            raise SystemExit(1)
        return
    budgets = list_budgets(name)
    if name is not None and not budgets:
        raise click.ClickException(f"{name}: no such budget ({path_of(name)} does not exist)")
    parts: list[RenderableType] = []
    for budget in budgets:
        parts += _shown(budget)
    answer(as_json, {"budgets": [_document(b) for b in budgets]}, *parts or ["no budgets"])
    if any(budget.problem for budget in budgets):
        raise SystemExit(1)


def _document(budget: Budget) -> dict[str, Any]:
    return {
        "name": budget.name,
        "bytes": budget.nbytes,
        "committed_bytes": _committed(budget),
        "problem": budget.problem,
        "servers": [
            {
                "name": sharer.row.label,
                "pid": sharer.row.pid,
                "port": sharer.row.port,
                "floor_bytes": sharer.row.floor,
                "needed_bytes": sharer.row.want,
                "share_bytes": sharer.row.share,
                "committed_bytes": sharer.row.committed,
                "state": _state(sharer),
            }
            for sharer in budget.sharers
        ],
    }


def _shown(budget: Budget) -> list[RenderableType]:
    if budget.problem is not None:
        return [f"{budget.name}: {budget.problem}"]
    table = plain_table("server", ("pid", "port", *_FIGURES))
    table.add_column("state", no_wrap=True)
    for sharer in budget.sharers:
        row = sharer.row
        sizes = (row.floor, row.want, row.share, row.committed)
        figures = (f"{nbytes / 2**20:,.0f}" for nbytes in sizes)
        table.add_row(row.label, str(row.pid), str(row.port), *figures, _state(sharer))
    told = (
        f"{_committed(budget) / 2**20:,.0f} of {budget.nbytes / 2**20:,.0f} MiB committed, in MiB:"
    )
    return [f"{budget.name}: {told}", table if budget.sharers else "no servers"]


def _committed(budget: Budget) -> int:
    return sum(sharer.row.committed for sharer in budget.sharers if sharer.alive)


def _state(sharer: Sharer) -> str:
    """In a word or two."""
    row = sharer.row
    if not sharer.alive:
        return "gone"
    if row.committed > row.share:
        return "gives back"
    return "grows" if row.want > row.committed < row.share else "steady"
