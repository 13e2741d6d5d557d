"""A clock that is set while a server runs changes nothing: nobody reads it, but for one order."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LOOP = ("budget", "config", "engine", "latency", "memory", "sglang", "step", "store")
OF_TIME = {"time", "time_ns", "localtime", "gmtime", "ctime", "strftime", "clock_gettime"}
"""In the module `time`, by whatever name it is imported,"""
ANYWHERE = {"now", "utcnow", "today", "utime", "st_mtime", "st_ctime", "st_atime", "st_mtime_ns",
            "CLOCK_REALTIME"}  # fmt: skip
"""and of dates and files."""


def wall_clock_reads(text: str) -> set[str]:
    """Names in this source by which it reads, or writes, the wall clock."""
    found, modules = set(), {"time"}
    nodes = list(ast.walk(ast.parse(text)))
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {a.asname for a in node.names if a.name == "time" and a.asname}
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found |= {a.name for a in node.names} & OF_TIME
    for node in nodes:
        if isinstance(node, ast.Attribute):
            of_time = ast.unparse(node.value) in modules
            found |= {node.attr} & (OF_TIME | ANYWHERE if of_time else ANYWHERE)
    return found


def test_a_server_reads_no_clock_that_can_be_set() -> None:
    folders = [ROOT / "policies", ROOT / "kernels", *(ROOT / "ellm_sgl" / name for name in LOOP)]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 100
    read = {path.name: found for path in paths if (found := wall_clock_reads(path.read_text()))}
    assert read == {"folder.py": {"utime", "st_mtime"}}, "the order in which models were used"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import time\nt = time.time()", "time"),
        ("import time as clock\nread = clock.time", "time"),
        ("from time import time_ns as now_ns", "time_ns"),
        ("import datetime as d\nd.datetime.now()", "now"),
        ("import os\nage = os.stat('a').st_mtime", "st_mtime"),
        ("import time\ntime.clock_gettime(0)", "clock_gettime"),
    ],
)
def test_however_it_is_read_it_is_found(text: str, found: str) -> None:
    assert wall_clock_reads(text) == {found}
    assert wall_clock_reads("import time\nself.time = time.monotonic()") == set()
