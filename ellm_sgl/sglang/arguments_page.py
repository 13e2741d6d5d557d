"""`python -m ellm_sgl.sglang.arguments_page` writes docs/sglang-arguments.md to standard output."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import groupby
from operator import attrgetter

from ellm_sgl.sglang.arguments import Argument, Kind, table
from ellm_sgl.sglang.versions import VERSIONS

_HEAD = """\
# SGLang's arguments with eLLM

What becomes of each of the {count} arguments of SGLang {version} when `--ellm-policy` enables eLLM
(with `off`, SGLang is stock). This page is made from the table by which the server refuses them,
`ellm_sgl/sglang/arguments.toml`; a test fails when SGLang has an argument that the table lacks.
To make it again: `python -m ellm_sgl.sglang.arguments_page > docs/sglang-arguments.md`.
"""


_SECTIONS = (
    ("Refused", Kind.REFUSED, ("arguments", "because", "not refused")),
    ("Set by eLLM", Kind.ADAPTED, ("argument", "to")),
    ("Work", Kind.WORKS, ("arguments", "shown by")),
    ("Without bearing", Kind.NO_BEARING, ("arguments", "are about")),
)
"""Title, rows, and the heads of the columns."""


def page() -> str:
    """The page, in Markdown."""
    first, *later = VERSIONS
    rows = table(first)
    lines = [_HEAD.format(count=len(rows), version=first)]
    for title, kind, head in _SECTIONS:
        lines += [f"## {title}", ""]
        if kind is Kind.REFUSED:
            lines += ["One sentence says so when the server starts, and what to do.", ""]
        lines += _grouped((row for row in rows.values() if row.kind is kind), head)
    for version in later:
        lines += _differences(version, first)
    return "\n".join(lines)


def _differences(version: str, first: str) -> list[str]:
    """What a later version has otherwise than the first."""
    rows, before = table(version), table(first)
    gone = [row for field, row in before.items() if field not in rows]
    changed = [row for field, row in rows.items() if before.get(field) != row]
    lines = [f"## Otherwise in SGLang {version} ({len(rows)} arguments)", ""]
    if gone:
        lines += [f"No more: {', '.join(f'`{row.flag}`' for row in gone)}.", ""]
    for title, kind, head in _SECTIONS:
        if these := [row for row in changed if row.kind is kind]:
            lines += [f"{title}:", "", *_grouped(these, head)]
    return lines


def _grouped(rows: Iterable[Argument], head: tuple[str, ...]) -> list[str]:
    """A Markdown table, one line for all arguments with the same text."""
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join(['---'] * len(head))} |"]
    for _, group in groupby(rows, attrgetter("why", "tests", "allowed")):
        same = list(group)
        cells = [", ".join(f"`{row.flag}`" for row in same), _text(same[0])]
        if len(head) == 3:
            values = [f"`{value}`" for value in same[0].allowed if value]
            cells.append(", ".join(values) or _partly(same[0]))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _text(row: Argument) -> str:
    if row.kind is not Kind.WORKS:
        return row.why
    path, _, test = row.tests.partition("::")
    shown = f"[{test}](../{path})"
    return f"{shown}, {row.why}" if row.why else shown


def _partly(row: Argument) -> str:
    otherwise = row.when is not None and row.remedy != Argument.remedy
    return f"otherwise: {row.remedy}" if otherwise else ""


if __name__ == "__main__":
    sys.stdout.write(page())
