"""A container's limit, and what SGLang would take of the machine around it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ellm_sgl.config import ConfigError, EllmConfig
from ellm_sgl.memory import PageTable, PoolShape
from ellm_sgl.memory.step_room import Activations, StepRoom
from ellm_sgl.sglang import host_memory, step_memory
from ellm_sgl.sglang.host_memory import tokens_within
from ellm_sgl.sglang.platform.torchvision_ops import declare
from ellm_sgl.sglang.step_memory import StepMemory
from tests.budget.test_machine import GIB, put, version_2

declare()

TOKEN = 1 << 20
"""Bytes."""


def sglang(dp_size: int = 1, max_total_tokens: int | None = None) -> Any:
    """As much of its configurator as is asked for."""
    return SimpleNamespace(
        server_args=SimpleNamespace(
            mem_fraction_static=0.5, dp_size=dp_size, max_total_tokens=max_total_tokens
        )
    )


SGLANG = sglang()


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine of 16 GiB."""
    from sglang.srt.runtime_context import get_parallel

    put(tmp_path, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {12 << 20} kB")
    put(tmp_path, "proc/self/cgroup", "0::/pod")
    monkeypatch.setattr(host_memory, "ROOT", tmp_path)
    with get_parallel().override(tp_size=1):
        yield tmp_path


def test_sglangs_choice_is_bounded_by_the_container(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert tokens_within(EllmConfig(), 6000, TOKEN, 0, SGLANG) == 6000
    version_2(root, "pod", 4 * GIB, GIB)
    with caplog.at_level(logging.INFO):
        assert tokens_within(EllmConfig(), 6000, TOKEN, 0, SGLANG) == 1536
    assert "1536 tokens, not 6000: the container (" in caplog.text
    assert tokens_within(EllmConfig(), 100, TOKEN, 0, SGLANG) == 100
    # Of what the host tier leaves, half is the pool's, and the other half is there for steps.
    assert tokens_within(EllmConfig(), 6000, TOKEN, 1472 * TOKEN, SGLANG) == 800
    assert tokens_within(EllmConfig(), 6000, TOKEN, 2008 * TOKEN, SGLANG) == 532


def test_a_host_tier_on_disk_is_not_in_the_way(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel takes its pages back; those of a tmpfs it cannot."""
    mounts = {"/": "overlay", "/dev": "tmpfs", "/dev/disk": "ext4"}
    found = [SimpleNamespace(mountpoint=place, fstype=kind) for place, kind in mounts.items()]
    monkeypatch.setattr(psutil, "disk_partitions", lambda all: found)
    version_2(root, "pod", 4 * GIB, GIB)
    for path, left in {"/data/tier": 1536, "/dev/tier": 532, "/dev/disk/tier": 1536}.items():
        config = EllmConfig(host_kv_tokens=2008, host_path=path)
        assert tokens_within(config, 6000, TOKEN, 2008 * TOKEN, SGLANG) == left


def test_what_was_given_is_refused_where_it_can_never_be(root: Path) -> None:
    given = EllmConfig(device_kv_tokens=5000)
    assert tokens_within(given, 5000, TOKEN, 0, SGLANG) == 5000
    version_2(root, "pod", 4 * GIB, GIB)
    with pytest.raises(ConfigError, match=r"--ellm-device-kv-tokens 5000: its KV takes "
                       r"5,242,880,000 bytes, and the container \(.*memory.max\) has 4,294,967,296 "
                       r"in all; give at most 4096"):  # fmt: skip
        tokens_within(given, 5000, TOKEN, 0, SGLANG)
    with pytest.raises(ConfigError, match="--ellm-max-device-kv-tokens 4097: its KV takes"):
        tokens_within(EllmConfig(max_device_kv_tokens=4097), 100, TOKEN, 0, SGLANG)
    shared = EllmConfig(device_kv_tokens=5000, memory_budget="a:2GiB")
    assert tokens_within(shared, 5000, TOKEN, 0, SGLANG) == 5000, "it never has more than its share"


def test_a_host_tier_for_which_there_is_no_room_is_refused(root: Path) -> None:
    """Beside a pool of any size, with a container's limit and without."""
    for device, host in ((None, 17), (8, 9)):
        tokens = None if device is None else device * GIB // TOKEN
        given = EllmConfig(device_kv_tokens=tokens, host_kv_tokens=host * GIB // TOKEN)
        with pytest.raises(ConfigError, match=rf"--ellm-host-kv-tokens {host * GIB // TOKEN}: the "
                           rf"host tier takes .* bytes beside the pool's {(device or 0) * GIB:,}, "
                           "and the machine has 17,179,869,184 in all; give fewer"):  # fmt: skip
            tokens_within(given, tokens or 6000, TOKEN, host * GIB, SGLANG)
    fits = EllmConfig(device_kv_tokens=8 * GIB // TOKEN, host_kv_tokens=1)
    assert tokens_within(fits, 8192, TOKEN, 8 * GIB, SGLANG) == 8192
    version_2(root, "pod", 4 * GIB, GIB)
    with pytest.raises(ConfigError, match=r"and the container \(.*\) has 4,294,967,296 in all"):
        tokens_within(EllmConfig(device_kv_tokens=2048), 2048, TOKEN, 3 * GIB, SGLANG)


def test_a_host_tier_larger_than_what_is_free_is_refused(root: Path) -> None:
    """Weights that are loaded stay; nobody takes the host tier's memory back, either."""
    given = EllmConfig(device_kv_tokens=1024, host_kv_tokens=13 * GIB // TOKEN)
    with pytest.raises(ConfigError, match=r"--ellm-host-kv-tokens 13312: the host tier takes .* "
                       "bytes, and the machine has 12,884,901,888 free of 17,179,869,184; "
                       "give fewer"):  # fmt: skip
        tokens_within(given, 1024, TOKEN, 13 * GIB, SGLANG)
    version_2(root, "pod", 64 * GIB, 54 * GIB)  # a limit that is looser than the machine's own
    with pytest.raises(ConfigError, match=r"and the container .* has 10,737,418,240 free"):
        tokens_within(given, 1024, TOKEN, 11 * GIB, SGLANG)


def test_pool_and_host_tier_fit_on_a_machine_without_limits() -> None:
    config = EllmConfig(host_kv_tokens=1)
    for host, pool in ((2, 5), (6, 3), (8, 2)):
        tokens = tokens_within(config, 10_000, TOKEN, host * GIB, SGLANG)
        assert tokens == pool * GIB // TOKEN
    with pytest.raises(ConfigError, match="no room for a pool of KV beside the host tier's "
                       "12,880,707,584; give fewer --ellm-host-kv-tokens"):  # fmt: skip
        tokens_within(config, 10_000, TOKEN, 12 * GIB - (4 << 20), SGLANG)


@pytest.mark.parametrize("limit", [64, 16, 14])
def test_a_loose_limit_does_not_hide_the_machine(root: Path, limit: int) -> None:
    """12 GiB are free there, whatever the container might have."""
    version_2(root, "pod", limit * GIB, GIB)
    found = tokens_within(EllmConfig(host_kv_tokens=1), 10_000, TOKEN, 8 * GIB, SGLANG)
    assert found == 2 * GIB // TOKEN


@pytest.mark.parametrize("host", [0, 2, 6, 8, 11])
def test_pool_and_host_tier_leave_something_to_a_step(
    root: Path, monkeypatch: pytest.MonkeyPatch, host: int
) -> None:
    """Where they leave it nothing, prompts are computed a block at a time for ever."""
    monkeypatch.setattr(step_memory, "ROOT", root)
    version_2(root, "pod", 14 * GIB, 2 * GIB)
    tokens = tokens_within(EllmConfig(host_kv_tokens=1), 10_000, TOKEN, host * GIB, SGLANG)
    shape = PoolShape(num_layers=2, layer_group=1, block_tokens=16)
    units = tokens // shape.block_tokens * shape.num_groups
    unit_bytes = TOKEN * shape.block_tokens // shape.num_groups
    pool: Any = SimpleNamespace(
        buffer=torch.empty(0),
        unit_bytes=unit_bytes,
        lazy_units=units,
        bytes_behind=lambda count: count * unit_bytes,
    )
    table = PageTable(shape, units, units, host_units=8)
    room = StepRoom(Activations(row_bytes=400e3), shape.block_tokens)
    memory = StepMemory(table, pool, room, host * GIB, 0, 0, 1)
    assert room.rows(memory.left()) > 1000


def test_what_is_pinned_is_rounded_up_to_a_power_of_two(root: Path) -> None:
    config = EllmConfig(host_kv_tokens=7 * GIB // TOKEN)
    host_memory.check_pinned(config, 7 * GIB, SGLANG)
    host_memory.check_pinned(config, 0, SGLANG)
    with pytest.raises(ConfigError, match="the host tier takes 17,179,869,184 bytes, and the "):
        host_memory.check_pinned(config, 9 * GIB, SGLANG)


def test_what_other_replicas_have_pinned_counts_once(root: Path) -> None:
    """In what is free. In what there is, all of them count."""
    config = EllmConfig(host_kv_tokens=3 * GIB // TOKEN)
    for free in (12, 8, 4):  # as one after the other pins its own
        put(root, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {free << 20} kB")
        host_memory.check_pinned(config, 3 * GIB, sglang(3))
    with pytest.raises(ConfigError, match="takes 21,474,836,480 bytes beside the pool's 0, and the "
                       "machine has 17,179,869,184 in all"):  # fmt: skip
        host_memory.check_pinned(config, 3 * GIB, sglang(5))
    put(root, "proc/meminfo", f"MemTotal: {16 << 20} kB\nMemAvailable: {3 << 20} kB")
    with pytest.raises(ConfigError, match="takes 12,884,901,888 bytes, 4,294,967,296 of them for "
                       "this replica, and the machine has 3,221,225,472 free"):  # fmt: skip
        host_memory.check_pinned(config, 3 * GIB, sglang(3))


def test_replicas_share_the_machine(root: Path) -> None:
    assert tokens_within(EllmConfig(), 6000, TOKEN, 0, sglang(2)) == 3000
    assert tokens_within(EllmConfig(), 6000, TOKEN, 0, sglang(2, 6000)) == 6000, "given, for each"
    assert tokens_within(EllmConfig(device_kv_tokens=6000), 6000, TOKEN, 0, sglang(2)) == 6000
    with pytest.raises(ConfigError, match="give at most 8192"):
        tokens_within(EllmConfig(device_kv_tokens=9000), 9000, TOKEN, 0, sglang(2))
    version_2(root, "pod", 4 * GIB, GIB)
    assert tokens_within(EllmConfig(), 6000, TOKEN, 0, sglang(2)) == 768
    assert tokens_within(EllmConfig(), 6000, TOKEN, 1004 * TOKEN, sglang(2)) == 266


def test_a_container_that_is_full_is_told_of(root: Path) -> None:
    version_2(root, "pod", 4 * GIB, 4 * GIB)
    with pytest.raises(ConfigError, match="has 0 bytes free of 4,294,967,296, no room for a pool"):
        tokens_within(EllmConfig(), 6000, TOKEN, 0, SGLANG)
