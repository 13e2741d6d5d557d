"""What the commands have in common: options, errors of one line, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

from ellm_sgl.config.ranges import as_json_value, read_json, shown

Command = TypeVar("Command", bound=Callable[..., Any])

FILE = click.Path(path_type=Path, dir_okay=False)
_WIDEST = 1000
"""Characters in a line of a table, at most."""

json_flag = click.option(
    "--json", "as_json", is_flag=True, help="One JSON document on stdout, nothing else."
)
model_path_option = click.option(
    "--model-path", metavar="DIR", help="A local model.  [default: the demo model]"
)


def _read_object(_: click.Context, __: click.Parameter, text: str) -> dict[str, Any]:
    try:
        options = read_json(text)
    except ValueError as error:
        raise click.BadParameter(f"{shown(text)} is not JSON: {error}") from None
    if not isinstance(options, dict):
        raise click.BadParameter(f'{shown(text)} is not a JSON object; write {{"name": value}}')
    return options


def policy_options(text: str) -> Callable[[Command], Command]:
    """The option --options, a JSON object, with `text` as its help."""
    return click.option(
        "--options",
        metavar="JSON",
        default="{}",
        show_default=False,
        help=text,
        callback=_read_object,
    )


def json_text(document: Mapping[str, Any]) -> str:
    """The document, with null for figures that are none: JSON has no NaN."""
    return json.dumps(as_json_value(document), allow_nan=False)


def answer(as_json: bool, document: Mapping[str, Any], *parts: RenderableType) -> None:
    """What a command found, on stdout: the document, or what people read; strings as they are."""
    if as_json:
        click.echo(json_text(document))
        return
    for part in parts:
        if isinstance(part, str):
            click.echo(part)
        else:
            show(part, Console())


def show(part: RenderableType, console: Console) -> None:
    """Print it. Nothing of a table is cut off: a narrow terminal wraps cells that may wrap, and
    breaks the lines of others; in a file a row is a line."""
    width = console.width
    if isinstance(part, Table):
        measure = Console(width=_WIDEST).measure
        for column in part.columns:
            if column.no_wrap:  # which rich leaves out of what a table needs at least
                cells = column.header, *column.cells
                column.min_width = max(measure(cell).maximum for cell in cells)
        needed = measure(part)
        console.width = max(width, needed.minimum if console.is_terminal else needed.maximum)
    console.print(part)
    console.width = width


@contextmanager
def told_in_a_line(*kinds: type[Exception]) -> Iterator[None]:
    """An error of these kinds ends the command with its message, Ctrl-C with "Aborted!"."""
    try:
        yield
    except kinds as error:
        raise click.ClickException(str(error)) from None
    except KeyboardInterrupt:
        raise click.Abort from None


def plain_table(first: str, figures: Sequence[str], **more: Any) -> Table:
    """A table whose first column is text, and the others `figures`: to the right."""
    table = Table(box=box.SIMPLE, pad_edge=False, **more)
    table.add_column(first, no_wrap=True)
    for heading in figures:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def progress_lines(line: str) -> None:
    """Tell of progress, dim, on standard error."""
    Console(stderr=True).print(line, style="dim", markup=False)
