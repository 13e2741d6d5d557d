"""Tables of the commands: whole on a narrow terminal, and in a file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ellm_sgl.config.commands import plain_table, show

NAME, FIGURE = "a name of several words, " * 3 + "no less", "0.123 [0.1, 0.2], 1,234"
TEXT = "torch_native 5.4, two passes 1.0"


@pytest.mark.parametrize("terminal", [True, False])
def test_nothing_of_a_table_is_cut_off(terminal: bool) -> None:
    table = plain_table("name", ["figure"])
    table.add_column("times faster than")
    table.add_row(NAME, FIGURE, TEXT)
    file = io.StringIO()
    console = Console(file=file, width=80, force_terminal=terminal, color_system=None)
    show(table, console)
    printed = file.getvalue()
    assert "…" not in printed and console.width == 80
    assert all(word in printed for word in (NAME, FIGURE, *TEXT.split()))
    assert (f"{FIGURE}   {TEXT}" in printed) is not terminal, "in a file a row is a line"
    show("text " * 30, console)
    assert max(map(len, file.getvalue()[len(printed) :].splitlines())) <= 80, "text wraps as before"
