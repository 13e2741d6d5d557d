"""The streamer brings each group's units in time, and never early into a slot still in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from ellm_sgl.kernels import choose, torch_paged
from ellm_sgl.kernels.choose import choose_copy
from ellm_sgl.kernels.cpu.attention import copy_units
from ellm_sgl.kernels.cpu.library import Loaded, load
from ellm_sgl.step.restoration import GroupTransfer
from ellm_sgl.step.transfer.native import NativeStreamer
from ellm_sgl.step.transfer.python import Streamer

UNIT = (2, 2, 4, 1, 8)
Kind = Callable[..., Any]
COMPILED = load().library is not None
needs_library = pytest.mark.skipif(not COMPILED, reason=load().problem or "built")
"""Hosts without a C++ compiler have no library: there the Python thread alone is tested."""


def by_torch(
    host: torch.Tensor, device: torch.Tensor, slots: int, overlap: bool = True
) -> Streamer:
    return Streamer(host, device, slots, overlap)


def by_compiled_copy(
    host: torch.Tensor, device: torch.Tensor, slots: int, overlap: bool = True
) -> Streamer:
    return Streamer(host, device, slots, overlap, copy_units)


@pytest.fixture(params=[by_torch, by_compiled_copy, NativeStreamer])
def kind(request: pytest.FixtureRequest) -> Kind:
    """What makes a streamer of (host, device, slots, overlap)."""
    if request.param is not by_torch and not COMPILED:
        pytest.skip(load().problem)
    return request.param


def pools(units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host units filled with their own number; device units with -1."""
    host = torch.arange(units, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1).repeat(1, *UNIT)
    return host, torch.full((units, *UNIT), -1.0)


def transfer(sources: list[int], targets: list[int]) -> GroupTransfer:
    return GroupTransfer.of(np.array(sources, np.int32), np.array(targets, np.int32))


def held(device: torch.Tensor, unit: int) -> float:
    (value,) = set(device[unit].flatten().tolist())
    return float(value)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_group_finds_its_units_when_it_attends(kind: Kind, overlap: bool, slots: int) -> None:
    host, device = pools(20)
    streamer = kind(host, device, slots, overlap)
    ring = [list(range(1 + 2 * s, 3 + 2 * s)) for s in range(slots)]
    groups = [transfer([10 + g, 5 + g], ring[g % slots]) for g in range(5)]
    for _ in range(3):
        with streamer.running(groups):
            for g in range(5):
                streamer.wait(g)
                assert [held(device, u) for u in ring[g % slots]] == [10 + g, 5 + g]
                streamer.done(g)
        device.fill_(-1.0)
    assert streamer.stall_s > 0.0 or overlap, "without overlap layers wait for every copy"


def test_a_slot_is_not_written_before_its_layers_are_done(kind: Kind) -> None:
    host, device = pools(20)
    streamer = kind(host, device, slots=2)
    groups = [transfer([10 + g], [1 + g % 2]) for g in range(4)]
    with streamer.running(groups):
        streamer.wait(0)
        streamer.wait(1)
        assert (held(device, 1), held(device, 2)) == (10, 11)  # not yet 12 and 13
        streamer.done(0)
        streamer.wait(2)
        assert (held(device, 1), held(device, 2)) == (12, 11)


def test_groups_that_need_nothing_are_passed_over(kind: Kind) -> None:
    host, device = pools(20)
    streamer = kind(host, device, slots=2)
    groups = [transfer([], []), transfer([7], [1]), transfer([], []), transfer([8], [2])]
    with streamer.running(groups):
        for g in range(4):
            streamer.wait(g)
            streamer.done(g)
    assert (held(device, 1), held(device, 2)) == (7, 8)


def test_steps_without_transfers_wait_for_nothing(kind: Kind) -> None:
    streamer = kind(*pools(4), slots=2)
    with streamer.running(()):
        streamer.wait(0)
        streamer.done(0)
    assert streamer.stall_s == 0.0


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("count", [0, 1, 4])
def test_what_a_later_step_needs_has_come_when_the_step_ends(
    kind: Kind, overlap: bool, count: int
) -> None:
    host, device = pools(20)
    streamer = kind(host, device, 2, overlap)
    groups = [transfer([10 + g], [1 + g % 2]) for g in range(count)]
    with streamer.running(groups, transfer([7, 8], [15, 16])):
        for g in range(count):
            streamer.wait(g)
            assert held(device, 1 + g % 2) == 10 + g
            streamer.done(g)
    assert (held(device, 15), held(device, 16)) == (7, 8)
    device.fill_(-1.0)
    with streamer.running(groups):  # the next step fetches nothing ahead
        for g in range(count):
            streamer.wait(g)
            streamer.done(g)
    assert held(device, 15) == -1


def test_a_step_that_fails_leaves_nothing_under_way(kind: Kind) -> None:
    host, device = pools(20)
    streamer = kind(host, device, slots=2)
    with pytest.raises(RuntimeError, match="layer"), streamer.running([transfer([7], [1])] * 4):
        raise RuntimeError("a layer failed")
    device.fill_(-1.0)
    with streamer.running([transfer([9], [3])]):
        streamer.wait(0)
    assert held(device, 3) == 9 and held(device, 1) == -1


def test_saving_copies_to_the_host(kind: Kind) -> None:
    host, device = pools(6)
    device[4] = 42.0
    kind(host, device, slots=2).save(np.array([4, 2], np.int32), np.array([1, 3], np.int32))
    assert (held(host, 1), held(host, 3), held(host, 2)) == (42, -1, 2)


@needs_library
def test_random_steps_leave_in_every_group_what_the_host_has() -> None:
    """Rings of many sizes, the thread and the caller racing for each group."""
    rng = np.random.default_rng(0)
    host, device = pools(400)
    streamer = NativeStreamer(host, device, slots=2)
    for _ in range(300):
        count, groups = int(rng.integers(0, 60)), int(rng.integers(1, 9))
        ring = rng.permutation(200)[: 2 * count].reshape(2, -1)
        sources = [rng.integers(200, 400, count) for _ in range(groups)]
        plan = [transfer(s.tolist(), ring[g % 2].tolist()) for g, s in enumerate(sources)]
        with streamer.running(plan):
            for g in range(groups if rng.random() < 0.9 else groups // 2):  # or it fails midway
                streamer.wait(g)
                assert (device[ring[g % 2], 0, 0, 0, 0, 0].numpy() == sources[g]).all()
                assert device[ring[g % 2]].flatten(1).std(dim=1).sum() == 0
                streamer.done(g)


@needs_library
@pytest.mark.parametrize(("sources", "targets"), [([20], [1]), ([-1], [1]), ([1], [20])])
def test_units_out_of_range_are_refused(sources: list[int], targets: list[int]) -> None:
    streamer = NativeStreamer(*pools(20), slots=2)
    with (
        pytest.raises(ValueError, match=r"outside 0\.\.19"),
        streamer.running([transfer(sources, targets)]),
    ):
        pass


@needs_library
def test_where_the_compiled_kernels_are_they_copy() -> None:
    assert choose_copy() is copy_units


def test_where_they_are_not_pytorch_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "load", lambda: Loaded(None, "no library"))
    assert choose_copy() is torch_paged.copy_units
