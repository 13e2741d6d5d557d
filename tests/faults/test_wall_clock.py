"""A clock that is set while a server runs changes nothing: nobody reads it."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
LOOP = ("budget", "config", "engine", "latency", "memory", "sglang", "step", "store")
WALL = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today"}


def wall_clock_calls(path: Path) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and (name := ast.unparse(node.func)).endswith(tuple(WALL)):
            found.append(f"{path.name}:{node.lineno}: {name}")
        if isinstance(node, ast.ImportFrom) and node.module == "time":
            found += [f"{path.name}: {a.name}" for a in node.names if a.name in ("time", "time_ns")]
    return found


def test_a_server_reads_no_clock_that_can_be_set() -> None:
    folders = [ROOT / "policies", ROOT / "kernels", *(ROOT / "ellm_sgl" / name for name in LOOP)]
    paths = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(paths) > 100
    assert [call for path in paths for call in wall_clock_calls(path)] == []
