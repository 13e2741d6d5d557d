"""A container whose limit is in a file, around each process of a server alone, found by SGLang as a
plugin of an installed package: as much as several processes of that size take counts as taken.

In cgroups of its own a server could only be put by an administrator.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_ENTRY_POINTS = "[sglang.srt.plugins]\ncontainer = container:register\n"
NO_LIMIT = 1 << 50


class Container:
    """Installs this module into `folder`; a server of so many ranks started with `environment` has
    this container's limit."""

    def __init__(self, folder: Path, ranks: int = 1) -> None:
        info = folder / "container-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: container\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(_ENTRY_POINTS)
        (folder / "container.py").write_text(Path(__file__).read_text())
        self._file = folder / "limit"
        path = os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))
        self.environment = {
            "PYTHONPATH": path,
            "CONTAINER_LIMIT": str(self._file),
            "CONTAINER_RANKS": str(ranks),
        }
        self.limit(NO_LIMIT)

    def limit(self, nbytes: int) -> None:
        new = self._file.with_suffix(".new")
        new.write_text(str(nbytes))
        new.rename(self._file)


def register() -> None:
    """SGLang calls this in every process of a server."""
    import psutil

    from ellm_sgl.budget.machine import ROOT, Room
    from ellm_sgl.sglang import step_memory

    ours: Any = step_memory

    file, ranks = Path(os.environ["CONTAINER_LIMIT"]), int(os.environ["CONTAINER_RANKS"])

    def tightest(root: Path = ROOT) -> Room:
        taken = ranks * psutil.Process().memory_info().rss
        limit = int(file.read_text())
        return Room(limit, min(taken, limit), f"the container ({file})")

    ours.tightest = tightest
