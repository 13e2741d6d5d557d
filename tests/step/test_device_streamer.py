"""The streamer for CUDA, on whatever device there is: on the CPU, PyTorch's streams run at once."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from ellm_sgl.step import DeviceStreamer
from ellm_sgl.step.restoration import GroupTransfer
from ellm_sgl.step.transfer import GraphFetch
from tests.step.listed import copy_listed

UNIT = (2, 2, 16, 4, 128)
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
        ],
    ),
]


def pools(device: str, units: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Host units filled with their own number, pinned where there is a device; device units -1."""
    numbers = torch.arange(units, dtype=torch.float32).view(-1, 1, 1, 1, 1, 1)
    host = torch.empty(units, *UNIT, pin_memory=device == "cuda")
    host.copy_(numbers.expand(units, *UNIT))
    return host, torch.full((units, *UNIT), -1.0, device=device)


def transfer(sources: list[int], targets: list[int]) -> GroupTransfer:
    return GroupTransfer(torch.tensor(sources), torch.tensor(targets))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_every_group_finds_its_units_when_it_attends(
    device: str, overlap: bool, slots: int
) -> None:
    """Groups attend behind long work, which the copies must not overtake."""
    host, pool = pools(device, 60)
    streamer = DeviceStreamer(host, pool, slots, overlap)
    rings = [list(range(1 + 4 * s, 5 + 4 * s)) for s in range(slots)]
    sources = [[20 + 4 * g, 21 + 4 * g, 40 + g, 10 + g] for g in range(6)]
    groups = [transfer(of, rings[g % slots]) for g, of in enumerate(sources)]
    groups[3] = transfer([], [])
    busy = torch.randn(1024, 1024, device=device)
    for _ in range(3):
        seen = []
        with streamer.running(groups):
            for g in range(6):
                streamer.wait(g)
                for _ in range(20 if device == "cuda" else 0):
                    busy = torch.tanh(busy @ busy)
                seen.append(pool[rings[g % slots]].clone())
                streamer.done(g)
        for g in (0, 1, 2, 4, 5):
            assert seen[g].flatten(1).amin(1).tolist() == sources[g]
            assert seen[g].flatten(1).amax(1).tolist() == sources[g]


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_saved_is_what_the_step_before_wrote(device: str) -> None:
    host, pool = pools(device, 8)
    streamer = DeviceStreamer(host, pool, slots=2)
    with streamer.running(()):
        pool[4] = 42.0
    streamer.save(np.array([4, 5], np.int32), np.array([2, 3], np.int32))
    with streamer.running([transfer([2, 6], [1, 7])], ahead=transfer([1], [3])):
        pool[4] = 43.0  # the unit has a new owner
        streamer.wait(0)
        fetched = pool[[1, 7]].clone()
        streamer.done(0)
    with streamer.running(()):
        assert pool[3].min().item() == pool[3].max().item() == 1.0, "fetched by the step before"
    assert fetched.flatten(1).amin(1).tolist() == [42.0, 6.0]
    assert [float(host[u].min()) for u in (2, 3)] == [42.0, -1.0]


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    host, pool = pools("cpu", 12)
    streamer = DeviceStreamer(host, pool, slots=2)
    with pytest.raises(RuntimeError, match="layer"), streamer.running([transfer([7], [1])] * 4):
        raise RuntimeError("a layer failed")
    with streamer.running(()):
        streamer.wait(0)
        streamer.done(0)
    with streamer.running([transfer([9], [3])]):
        streamer.wait(0)
    assert float(pool[3].min()) == 9


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("slots", [1, 2, 8])
def test_a_graph_fetches_what_it_was_last_told(device: str, slots: int) -> None:
    """Captured once, replayed with other units, and with none; behind and beside long work."""
    host, pool = pools(device, 60)
    groups = 6
    fetch = GraphFetch(
        host, pool, slots, groups, most_units=4, copy=None if device == "cuda" else copy_listed
    )
    rings = [list(range(1 + 4 * s, 5 + 4 * s)) for s in range(slots)]
    held = torch.tensor(rings, device=device)
    seen = torch.zeros(groups, 4, device=device)
    nothing = [-1] * 4
    busy = torch.randn(1024, 1024, device=device)

    def step() -> None:
        work = busy
        for g in range(groups):
            fetch.wait(g)
            for _ in range(20 if device == "cuda" else 0):
                work = torch.tanh(work @ work)
            of = pool.index_select(0, held[g % slots]).flatten(1)
            seen[g].copy_((of.amin(1) + of.amax(1)) / 2)
            fetch.done(g)

    replay = captured(step) if device == "cuda" else step
    streamer = DeviceStreamer(host, pool, slots)
    for shift in (0, 3, None, 5):
        pool.fill_(-1.0)
        sources: list[list[int]] = []
        if shift is not None:
            sources = [[40 + g, 20 + g, 50 - g, 10 + shift] for g in range(groups)]
        transfers = [transfer(of, rings[g % slots]) for g, of in enumerate(sources)]
        if transfers:  # one group fetches nothing, and finds what its slot had before
            transfers[3] = transfer([], [])
            sources[3] = sources[3 - slots] if slots < 3 else nothing
        assert fetch.fits(transfers)
        with streamer.running(transfers):
            fetch.load(transfers)
            replay()
        assert seen.tolist() == (sources or [nothing] * groups)
    assert not fetch.fits([transfer([1] * 5, [2] * 5)])


def captured(step: Callable[[], None]) -> Callable[[], None]:
    """A CUDA graph's replay of `step`."""
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay
