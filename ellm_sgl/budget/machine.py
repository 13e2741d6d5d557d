"""How much memory there is here: the machine's, or what the container may have of it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path("/")
_NO_LIMIT = 1 << 60
"""cgroup v1 has no word for none: it says a number that no machine has."""


@dataclass(frozen=True)
class Room:
    """Memory, in bytes."""

    limit: int
    """All of it,"""
    taken: int
    """what is in use, without what the kernel gives up when it is needed,"""
    of: str
    """and whose it is, in words."""

    @property
    def free(self) -> int:
        return max(self.limit - self.taken, 0)


def container(root: Path = ROOT) -> Room | None:
    """Of all cgroups (v1 or v2) that this process is in, the one with the least left of its limit;
    None without limits."""
    return min(_containers(root), key=lambda found: found.free, default=None)


def largest(root: Path = ROOT) -> Room:
    """The machine, or the cgroup that has less memory in all, whatever is in use."""
    return min((_machine(root), *_containers(root)), key=lambda found: found.limit)


def tightest(root: Path = ROOT) -> Room:
    """The machine, or the cgroup that has less free."""
    return min((_machine(root), *_containers(root)), key=lambda found: found.free)


def own_data(root: Path = ROOT) -> float:
    """Bytes that the kernel lets this process add to what it has of its own (`ulimit -d`), written
    to or not; inf without that limit."""
    try:
        lines = (root / "proc/self/limits").read_text().splitlines()
    except OSError:
        return math.inf
    for line in lines:
        if line.startswith("Max data size") and (soft := line.split()[3]).isdecimal():
            return int(soft) - (_kilobytes(root / "proc/self/status")["VmData:"] << 10)
    return math.inf


def _machine(root: Path) -> Room:
    kilobytes = _kilobytes(root / "proc/meminfo")
    total = kilobytes["MemTotal:"] << 10
    return Room(total, total - (kilobytes["MemAvailable:"] << 10), "the machine")


def _kilobytes(table: Path) -> dict[str, int]:
    """The numbers of one of the kernel's tables, by name."""
    rows = (line.split() for line in table.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}


def _containers(root: Path) -> Iterator[Room]:
    """Those with a limit."""
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in groups:
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Beyond memory.high the kernel slows the process down, as good as a limit.
            limits = "memory.high", "memory.max"
            yield from _limits(root / "sys/fs/cgroup", path, limits, "memory.current", "")
        elif "memory" in controllers.split(","):
            yield from _limits(
                root / "sys/fs/cgroup/memory",
                path,
                ("memory.limit_in_bytes",),
                "memory.usage_in_bytes",
                "total_",
            )


def _limits(
    mount: Path, path: str, limits: Sequence[str], usage: str, prefix: str
) -> Iterator[Room]:
    """Of a cgroup and those above it. In a container the path may be the one outside, of which
    only the mount's root is there.

    Args:
        prefix: of the names of its statistics.
    """
    inner = PurePosixPath(path.lstrip("/"))
    for group in dict.fromkeys((mount / inner, *((mount / inner).parents))):
        if not group.is_relative_to(mount):
            return
        found = {limit: _number(group / limit) for limit in limits}
        known = {limit: bound for limit, bound in found.items() if bound is not None}
        if not known:
            continue
        limit = min(known, key=known.__getitem__)
        try:
            # Of the files that are cached, whether read once or often, the kernel frees any.
            cached = _statistics(group, prefix + "inactive_file", prefix + "active_file")
            taken = int((group / usage).read_text()) - cached
        except (OSError, ValueError):
            continue
        yield Room(known[limit], max(taken, 0), f"the container ({group / limit})")


def _number(limit: Path) -> int | None:
    """Bytes; None where there is no such limit."""
    try:
        bound = int(limit.read_text())
    except (OSError, ValueError):  # none, or "max"
        return None
    return bound if bound < _NO_LIMIT else None


def _statistics(group: Path, *names: str) -> int:
    """The sum of these."""
    lines = (line.split() for line in (group / "memory.stat").read_text().splitlines())
    return sum(int(value) for name, value in lines if name in names)
