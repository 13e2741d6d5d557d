"""What a server's process has of the machine's memory, as Linux tells it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from ellm_sgl.client.process import ServerError

_PAGE = 4096
_MAPPING = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)", re.MULTILINE)
_RESIDENT = re.compile(r"^Rss:\s+(\d+) kB", re.MULTILINE)
_FLAGS = re.compile(r"^VmFlags:(.*)", re.MULTILINE)


@dataclass(frozen=True)
class _Mapping:
    begin: int
    end: int
    resident: int
    """Bytes."""


class Resident:
    """Memory of a server's scheduler, the process that has the KV (rank 0's).

    Args:
        pid: of the server.

    Raises:
        ServerError: it has none.
    """

    def __init__(self, pid: int) -> None:
        processes = psutil.Process(pid).children(recursive=True)
        found = sorted(p.pid for p in processes if "::scheduler" in " ".join(p.cmdline()))
        if not found:
            raise ServerError(f"process {pid} has no scheduler")
        self._is(found[0])

    def _is(self, pid: int) -> None:
        self.pid = pid
        self._folder = Path("/proc") / str(pid)

    def bytes(self) -> int:
        """Of the whole process."""
        return int((self._folder / "statm").read_text().split()[1]) * _PAGE

    def faults(self) -> int:
        """Page faults of the whole process so far that read nothing from a disk."""
        after_name = (self._folder / "stat").read_text().rpartition(")")[2]
        return int(after_name.split()[7])

    def of_range(self, nbytes: int) -> int:
        """Bytes of the one range of so many addresses that asked for huge pages: of an arena,
        whether they have memory or not.

        Raises:
            ServerError: there is none of that size.
        """
        for mappings in _runs(self._mappings()):
            if mappings[-1].end - mappings[0].begin == -(-nbytes // _PAGE) * _PAGE:
                return sum(m.resident for m in mappings)
        raise ServerError(f"process {self.pid} has no range of {nbytes:,} bytes")

    def _mappings(self) -> Iterator[_Mapping]:
        """Those of no file for which huge pages were asked."""
        text = (self._folder / "smaps").read_text()
        heads = list(_MAPPING.finditer(text))
        for head, after in zip(heads, [*(h.start() for h in heads[1:]), len(text)], strict=True):
            flags, found = (p.search(text, head.end(), after) for p in (_FLAGS, _RESIDENT))
            if head[4] == "0" and flags and "hg" in flags[1].split() and found:
                yield _Mapping(int(head[1], 16), int(head[2], 16), int(found[1]) << 10)


def _runs(mappings: Iterator[_Mapping]) -> list[list[_Mapping]]:
    """Neighbours together: parts of one range that are protected differently."""
    runs: list[list[_Mapping]] = []
    for mapping in mappings:
        if runs and runs[-1][-1].end == mapping.begin:
            runs[-1].append(mapping)
        else:
            runs.append([mapping])
    return runs
