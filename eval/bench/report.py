"""The report of a scenario: tables on a terminal, one JSON document, a plot."""

from __future__ import annotations

import os
import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
from rich import box
from rich.console import RenderableType
from rich.table import Table as RichTable
from rich.text import Text

from ellm_sgl.eval.bench.result import Result, Table
from ellm_sgl.eval.bench.scenario import Scenario
from ellm_sgl.eval.plotting import new_figure

PACKAGES = ("ellm-sgl", "sglang", "torch", "numpy")


def provenance() -> dict[str, Any]:
    """When, where, with what and how: to be asked for before anything is measured."""
    return {
        "command": shlex.join(["ellm-sgl", *sys.argv[1:]]),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "processor": _processor(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gb": round(psutil.virtual_memory().total / 1e9, 1),
            "system": platform.platform(),
            "load_average": os.getloadavg()[0],
        },
        "versions": {"python": platform.python_version(), **versions(PACKAGES)},
    }


def _processor() -> str:
    """Its name; Linux tells it in one place only."""
    with suppress(OSError):
        told = Path("/proc/cpuinfo").read_text()
        if found := re.search(r"^model name\s*:[ \t]*(.*\S)", told, re.MULTILINE):
            return found[1]
    return platform.machine()


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Of those that are installed."""
    found = {}
    for name in packages:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def document(name: str, scenario: Scenario, result: Result) -> dict[str, Any]:
    """What was found, raw and as tables, without `provenance`."""
    return {
        "bench": name,
        "options": asdict(scenario),
        "tables": [asdict(table) for table in scenario.tables(result)],
        "notes": scenario.notes(result),
        **scenario.document(result),
    }


def render(scenario: Scenario, result: Result) -> Iterator[RenderableType]:
    """For a terminal."""
    yield from map(_drawn, scenario.tables(result))
    yield from map(Text, scenario.notes(result))


def _drawn(table: Table) -> RichTable:
    """Names to the left, figures to the right; what stands before the setting's name, too."""
    names = table.headings.index("") + 1
    drawn = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=table.title or None)
    for place, heading in enumerate(table.headings):
        drawn.add_column(heading, justify="left" if place < names else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*row)
    return drawn


def plot(scenario: Scenario, result: Result, file: Path) -> None:
    """Write a picture, in the format that the file's name ends with."""
    figure = new_figure(figsize=(9, 3 * max(len(scenario.cells()), 1)))
    scenario.plot(result, figure)
    figure.savefig(file, dpi=110)
