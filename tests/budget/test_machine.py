"""How much memory there is: on machines, and in containers of both kinds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ellm_sgl.budget.machine import Room, container, largest, own_data, tightest

GIB = 1 << 30
V1 = "4:memory:/docker/abc\n1:name=systemd:/docker/abc"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A machine of 16 GiB, of which 12 are available."""
    put(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB")
    return tmp_path


def put(root: Path, path: str, text: object) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(f"{text}\n")


def version_2(root: Path, folder: str, limit: object, usage: int, cache: int = 0) -> None:
    group = f"sys/fs/cgroup/{folder}"
    put(root, f"{group}/memory.max", limit)
    put(root, f"{group}/memory.current", usage)
    put(
        root,
        f"{group}/memory.stat",
        f"anon 7\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}",
    )


def version_1(root: Path, folder: str, limit: int, usage: int, cache: int = 0) -> None:
    group = f"sys/fs/cgroup/memory/{folder}"
    put(root, f"{group}/memory.limit_in_bytes", limit)
    put(root, f"{group}/memory.usage_in_bytes", usage)
    put(root, f"{group}/memory.stat", f"cache 7\ntotal_inactive_file {cache}\ntotal_active_file 0")


def test_a_machine_without_limits(root: Path) -> None:
    assert container(root) is None
    assert largest(root) == Room(16 * GIB, 4 * GIB, "the machine")
    put(root, "proc/self/cgroup", "0::/")
    version_2(root, "", "max", 5)
    assert container(root) is None


def test_the_tightest_of_a_container_and_those_around_it(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/pod/server")
    version_2(root, "pod/server", "max", GIB)
    version_2(root, "pod", 4 * GIB, 3 * GIB, cache=2 * GIB)
    found = container(root)
    assert found is not None and found.limit == 4 * GIB and found.free == 3 * GIB
    assert found.of == f"the container ({root}/sys/fs/cgroup/pod/memory.max)"
    assert largest(root) == found
    version_2(root, "pod/server", 8 * GIB, 7 * GIB)
    found = container(root)
    assert found is not None and (found.limit, found.free) == (8 * GIB, GIB)


def test_what_the_kernel_slows_down_beyond_is_a_limit(root: Path) -> None:
    put(root, "proc/self/cgroup", "0::/pod")
    version_2(root, "pod", "max", GIB)
    put(root, "sys/fs/cgroup/pod/memory.high", "max")
    assert container(root) is None
    for most, high, limit in (("max", 8, 8), (4 * GIB, 8, 4), (9 * GIB, 8, 8)):
        version_2(root, "pod", most, GIB)
        put(root, "sys/fs/cgroup/pod/memory.high", high * GIB)
        found = container(root)
        name = "high" if limit == high else "max"
        assert found is not None and (found.limit, found.free) == (limit * GIB, (limit - 1) * GIB)
        assert found.of == f"the container ({root}/sys/fs/cgroup/pod/memory.{name})"


def test_version_1_seen_from_within(root: Path) -> None:
    """Where the path is that of the machine outside, and the mount begins at the container."""
    put(root, "proc/self/cgroup", V1 + "\n0::/")
    version_1(root, "", 2 * GIB, GIB, cache=GIB // 4)
    found = container(root)
    assert found is not None and (found.limit, found.taken) == (2 * GIB, GIB * 3 // 4)


def test_version_1_without_a_limit_says_a_number_that_is_none(root: Path) -> None:
    put(root, "proc/self/cgroup", V1)
    version_1(root, "docker/abc", 9223372036854771712, GIB)
    assert container(root) is None and largest(root).limit == 16 * GIB


def test_more_than_the_machine_is_no_limit_but_is_told_of(root: Path) -> None:
    put(root, "proc/self/cgroup", V1)
    version_1(root, "docker/abc", 64 * GIB, GIB)
    assert largest(root).of == "the machine"


def test_the_least_that_is_free_is_the_machines_or_a_containers(root: Path) -> None:
    assert tightest(root).of == "the machine"
    put(root, "proc/self/cgroup", "0::/pod")
    version_2(root, "pod", 14 * GIB, 0)
    assert tightest(root).of == "the machine" and tightest(root).free == 12 * GIB
    version_2(root, "pod", 4 * GIB, 3 * GIB)
    assert tightest(root).free == GIB


def test_what_a_process_may_yet_have_of_its_own(root: Path) -> None:
    """The kernel compares `ulimit -d` with VmData."""
    assert own_data(root) == math.inf
    put(root, "proc/self/status", "Name:\tpython\nGroups:\t \nVmRSS:\t9 kB\nVmData:\t1024 kB")
    row = "Max data size             {}    unlimited            bytes"
    put(root, "proc/self/limits", "Limit   Soft Limit\n" + row.format("unlimited"))
    assert own_data(root) == math.inf
    put(root, "proc/self/limits", row.format(2 * GIB))
    assert own_data(root) == 2 * GIB - (1 << 20)


@pytest.mark.parametrize("text", ["", "lots", "-"])
def test_files_that_cannot_be_read_are_no_limits(root: Path, text: str) -> None:
    put(root, "proc/self/cgroup", "0::/pod")
    version_2(root, "pod", text, GIB)
    assert container(root) is None
